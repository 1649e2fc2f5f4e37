"""Messages between engines that prefill prompts and engines that decode them."""

import msgspec


class OpenLease(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The decoding engine asks for the blocks of a prompt. The prefilling engine answers with
    `LeaseOpened` or `LeaseRefused` when the prompt is computed.
    """

    lease_id: str
    engine_id: str  # Id of the engine that stores the blocks; "" if the engine is unknown.
    fingerprint: str  # Digest of the model, cache formats and version.
    prompt_hash: bytes  # Result of `hash_prompt`.
    num_blocks: int


class LeaseOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    lease_id: str
    lanes: list[str]  # Endpoints at which the prefilling ranks send blocks.
    places: list[int]  # Indices of the host blocks with the prompt's KV, in order.
    step_id: int  # Id of the step that copies the last blocks to host memory.
    num_cached_tokens: int  # Number of prompt tokens found in the prefix cache.


class LeaseRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    lease_id: str
    reason: str


class RenewLeases(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """The decoding engine sends this message regularly, so that its leases do not expire."""

    lease_ids: list[str]


class CloseLease(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The decoding engine ends a lease after its last read. The answer is `LeaseClosed`."""

    lease_id: str


class LeaseClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    lease_id: str
    was_held: bool  # Whether the prefilling engine kept the blocks until the lease was closed.


FromDecoder = OpenLease | RenewLeases | CloseLease
FromPrefiller = LeaseOpened | LeaseRefused | LeaseClosed
Message = FromDecoder | FromPrefiller

encode = msgspec.msgpack.Encoder().encode
from_decoder = msgspec.msgpack.Decoder(FromDecoder)
from_prefiller = msgspec.msgpack.Decoder(FromPrefiller)
