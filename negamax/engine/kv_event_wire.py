"""Define the messages that describe a prefix cache, in vLLM's schema of KV events."""

from array import array

import msgspec

from negamax.scheduler.prefix_cache import HASH_BYTES

# vLLM's names of the cache levels; "GPU" stands for the KV cache on any device.
KV, HOST, FILES = "GPU", "CPU", "STORAGE"
SEQUENCE_BYTES = 8  # Size of a sequence number, which is big-endian.
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The base class of events. A message is a map whose "type" names the class of the event."""


class BlockStored(KvEvent, kw_only=True):
    """Consecutive blocks of a hash chain that the cache has stored."""

    block_hashes: list[int]
    parent_block_hash: int | None  # Hash of the previous block in the chain; None if there is none.
    token_ids: msgspec.Raw  # A list with the token ids of all blocks.
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    # One entry per block: [cache salt] for the first block of a salted chain, else None.
    extra_keys: list[list[str] | None] | None = None
    group_idx: int
    kv_cache_spec_kind: str


class BlockRemoved(KvEvent):
    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(KvEvent):
    pass


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # Seconds since 1970.
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


def shorten_hashes(hashes: list[bytes]) -> list[int]:
    """Shorten each hash to 64 bits, as in vLLM, because some subscribers read only integers."""
    return array("Q", b"".join(hashes))[:: HASH_BYTES // 8].tolist()
