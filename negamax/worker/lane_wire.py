"""Define the messages of lanes, which copy KV blocks between ranks of different engines."""

import msgspec

PIECE_BYTES = 16 * 2**20  # maximum bytes of a reply, unless one block is larger


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """Adjacent heads of one kind of cache, numbered as on the rank that stores the heads."""

    kind: int
    first: int
    stop: int


class ReadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Asks a lane to send heads of host blocks. The reply is an error text (b"": no error),
    followed by a frame for each range: [blocks, layers, heads, words] int64.
    """

    places: list[int]  # indices of the host blocks to send
    ranges: list[HeadRange]
    step_id: int  # the lane replies after the copies of plans up to this step id


class KindLayout(msgspec.Struct, frozen=True, array_like=True):
    """Address of one kind of cache in a lane's memory, [blocks, layers, heads, words] int64."""

    address: int
    shape: tuple[int, int, int, int]


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """Asks a lane to send its `Description`."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes  # metadata of the NIXL agent
    kinds: list[KindLayout]


class ImportBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Asks a lane of the same engine to fill host blocks from the lanes of another engine."""

    number: int
    places: list[int]  # indices of the host blocks to write
    after_step: int  # the lane writes after the copies of plans up to this step id
    lanes: list[str]  # endpoints of the ranks of the other engine
    remote_places: list[int]  # index of the other engine's host block for each of `places`
    remote_step: int  # `ReadBlocks.step_id` of the reads from the other engine


class ImportDone(msgspec.Struct, frozen=True, array_like=True):
    """Tells an engine that its lane has finished writing the blocks of an import."""

    number: int
    problem: str = ""  # error text; "" if the blocks are complete


ToLane = ReadBlocks | Describe
encode = msgspec.msgpack.Encoder().encode
to_lane_decoder: msgspec.msgpack.Decoder[ToLane] = msgspec.msgpack.Decoder(ToLane)
description_decoder = msgspec.msgpack.Decoder(Description)
import_decoder = msgspec.msgpack.Decoder(ImportBlocks)
done_decoder = msgspec.msgpack.Decoder(ImportDone)
