"""Messages between engines that prefill prompts and engines that decode."""

import msgspec


class OpenLease(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The decoding engine asks for the blocks of a prompt. The prefilling engine answers with
    `LeaseOpened` or `LeaseRefused` when the prompt is computed.
    """

    lease_id: str
    engine_id: str  # Engine that has the lease; "" if the prompt may not be computed yet.
    fingerprint: str  # Digest of the model, its caches and the version.
    prompt_hash: bytes  # Result of `hash_prompt`.
    num_blocks: int


class LeaseOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    lease_id: str
    lanes: list[str]  # Endpoints of the ranks that send the blocks.
    places: list[int]  # Indices of the host blocks, in the order of the prompt.
    step_id: int  # Step whose copies to host memory must be complete before a read.
    num_cached_tokens: int  # Prompt tokens that the prefix cache already had.


class LeaseRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    lease_id: str
    reason: str


class RenewLeases(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """The decoding engine sends this message several times before a lease would expire."""

    lease_ids: list[str]


class CloseLease(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The decoding engine sends this message when it stops reading. The answer is `LeaseClosed`."""

    lease_id: str


class LeaseClosed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    lease_id: str
    was_held: bool  # Whether the blocks were kept until the lease was closed.


FromDecoder = OpenLease | RenewLeases | CloseLease
FromPrefiller = LeaseOpened | LeaseRefused | LeaseClosed
Message = FromDecoder | FromPrefiller

encode = msgspec.msgpack.Encoder().encode
from_decoder = msgspec.msgpack.Decoder(FromDecoder)
from_prefiller = msgspec.msgpack.Decoder(FromPrefiller)
