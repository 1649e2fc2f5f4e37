"""Exchange of keys and values between context-parallel ranks. Each rank sends the keys and values
of its shard of the new tokens to all other ranks, so every rank's cache contains every token.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.kvcache.op import TokenTables, cache_rows, slots_of


class KeyExchange:
    """The exchange of keys and values in one step. One message per layer contains the new rows of
    all caches in their stored format. Padding rows belong to a block that no sequence owns.
    """

    def __init__(
        self, metadata: AttentionMetadata, *, block_size: int, heads: Collection[int]
    ) -> None:
        """`metadata`: metadata of a sharded step. `heads`: the head counts of caches, each once."""
        shared = metadata.shared_tokens
        assert shared is not None
        self._group = shared.group
        tokens = TokenTables(shared.positions, shared.token_slots, metadata.block_tables)
        slots = slots_of(tokens, block_size=block_size)
        self._rows = {
            count: cache_rows(slots, kv_heads=count, block_size=block_size) for count in heads
        }

    def __call__(self, caches: Sequence[Tensor]) -> None:
        """Write all ranks' new rows to `caches` [num_blocks, heads, block_size, width]."""
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


def _stored_rows(cache: Tensor) -> Tensor:
    """View `cache` as bytes [rows, bytes per row], because FP8 tensors cannot be indexed."""
    return cache.view(torch.uint8).view(-1, cache.shape[-1] * cache.element_size())
