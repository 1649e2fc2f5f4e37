"""Exchange between context-parallel ranks in a layer. Each sends the keys and values of its shard
of the new tokens to all, so every cache holds every token.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.kvcache.op import TokenTables, cache_rows, slots_of


class KeyExchange:
    """The exchange of one step. Cache rows travel in their stored format, in one message for all
    caches of a layer. Padding rows are in a block that no sequence owns.
    """

    def __init__(
        self, metadata: AttentionMetadata, *, block_size: int, heads: Collection[int]
    ) -> None:
        """For caches of so many `heads`. `metadata`: of a sharded step."""
        shared = metadata.shared_tokens
        assert shared is not None
        self._group = shared.group
        tokens = TokenTables(shared.positions, shared.token_slots, metadata.block_tables)
        slots = slots_of(tokens, block_size=block_size)
        self._rows = {
            count: cache_rows(slots, kv_heads=count, block_size=block_size) for count in heads
        }

    def __call__(self, caches: Sequence[Tensor]) -> None:
        """Complete `caches` [num_blocks, heads, block_size, width] with all ranks' tokens."""
        group, sent = self._group, []
        rows = [self._rows[cache.shape[1]] for cache in caches]
        for cache, places in zip(caches, rows, strict=True):
            own = places.view(group.size, -1)[group.rank]
            sent.append(_stored_rows(cache).index_select(0, own).flatten())
        gathered = group.all_gather(torch.cat(sent).unsqueeze(0), dim=0)
        parts = gathered.split([len(part) for part in sent], dim=1)
        for cache, places, part in zip(caches, rows, parts, strict=True):
            stored = _stored_rows(cache)
            stored.index_copy_(0, places, part.reshape(-1, stored.shape[1]))


def key_exchange(
    metadata: AttentionMetadata, *, block_size: int, heads: Collection[int]
) -> KeyExchange | None:
    """Return the exchange of a step; None if every rank computes all of its tokens."""
    if metadata.shared_tokens is None:
        return None
    return KeyExchange(metadata, block_size=block_size, heads=heads)


def _stored_rows(cache: Tensor) -> Tensor:
    """View as [rows, bytes of a row]: FP8 tensors cannot be indexed."""
    return cache.view(torch.uint8).view(-1, cache.shape[-1] * cache.element_size())
