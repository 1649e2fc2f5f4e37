"""Messages of the lanes that carry KV blocks between ranks of different engines. Torch-free."""

import msgspec

PIECE_BYTES = 16 * 2**20  # about, of one reply


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """Adjacent heads of one kind of cache, numbered as on the rank that stores them."""

    kind: int
    first: int
    stop: int


class ReadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """To a lane: send these heads of host blocks. The reply is b"" or a problem, then a frame for
    each range: [blocks, layers, heads, words] int64.
    """

    places: list[int]  # host blocks
    ranges: list[HeadRange]
    step_id: int  # wait for the copies of plans up to this one


class KindLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a lane keeps a kind of cache: [blocks, layers, heads, words] int64."""

    address: int
    shape: tuple[int, int, int, int]


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """To a lane: send a `Description` in place of blocks."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes  # metadata of the NIXL agent
    kinds: list[KindLayout]


class ImportBlocks(msgspec.Struct, frozen=True, array_like=True):
    """From an engine to its own lanes: fill host blocks from the lanes of another engine."""

    number: int
    places: list[int]  # host blocks that are written,
    after_step: int  # once the copies of plans up to this one are complete
    lanes: list[str]  # endpoints of the other engine's ranks
    remote_places: list[int]  # their host blocks, one for each of `places`
    remote_step: int  # as `ReadBlocks.step_id`


class ImportDone(msgspec.Struct, frozen=True, array_like=True):
    """From a lane to its engine. Nothing writes the blocks any more."""

    number: int
    problem: str = ""  # "": the blocks are complete


ToLane = ReadBlocks | Describe
encode = msgspec.msgpack.Encoder().encode
to_lane_decoder: msgspec.msgpack.Decoder[ToLane] = msgspec.msgpack.Decoder(ToLane)
description_decoder = msgspec.msgpack.Decoder(Description)
import_decoder = msgspec.msgpack.Decoder(ImportBlocks)
done_decoder = msgspec.msgpack.Decoder(ImportDone)
