"""Messages between engines that prefill and engines that decode."""

import msgspec


class OpenLease(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """From the decoding engine: the blocks of a prompt are wanted. The answer, `LeaseOpened` or
    `LeaseRefused`, comes once the prompt is computed.
    """

    lease_id: str
    engine_id: str  # the engine that is meant; "": any, perhaps before it computes the prompt
    fingerprint: str  # of model, caches and versions
    prompt_hash: bytes  # `hash_prompt`
    num_blocks: int


class LeaseOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    lease_id: str
    lanes: list[str]  # endpoints of the ranks
    places: list[int]  # host blocks, in order
    step_id: int  # the copies of plans up to this one must be complete
    num_cached_tokens: int  # prompt tokens that were not computed for it


class LeaseRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    lease_id: str
    reason: str


class RenewLeases(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """From the decoding engine, several times in the time of a lease."""

    lease_ids: list[str]


class CloseLease(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """From the decoding engine: it reads no more. The answer is `LeaseClosed`."""

    lease_id: str


class LeaseClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    lease_id: str
    was_held: bool  # whether the blocks were kept until the end


FromDecoder = OpenLease | RenewLeases | CloseLease
FromPrefiller = LeaseOpened | LeaseRefused | LeaseClosed
Message = FromDecoder | FromPrefiller

encode = msgspec.msgpack.Encoder().encode
from_decoder = msgspec.msgpack.Decoder(FromDecoder)
from_prefiller = msgspec.msgpack.Decoder(FromPrefiller)
