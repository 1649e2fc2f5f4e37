"""Launch sizes of the block-sparse attention kernels, by architecture; not tuned at run time.

The sizes in `H200SelectionTiles` were measured, except for decodes with index keys in bf16; all
other sizes are estimates.
"""

import torch

from negamax.kernels.launch.tile import Launch, has_h200_tiles


class SelectionTiles:
    """Launch sizes that were not measured and need at most 64 KB of shared memory."""

    prefill_rows = 64  # number of (query, head) rows per program
    attend_prefill = Launch(block_n=32, num_warps=4, num_stages=2)

    def select_decode(self, cache_bytes: int) -> Launch:
        """Return the launch sizes for index keys with `cache_bytes` bytes per element."""
        return Launch(num_warps=4, num_stages=2 if cache_bytes == 1 else 1)

    def decode_is_dependent(self, num_tokens: int, *, kv_heads: int) -> bool:
        """Return whether attention may start before the block selection ends (dependent launch)."""
        return True

    def select_block_m(self, rows: int) -> int:
        """Return the number of index queries per tile of a prefill with `rows` index queries."""
        return 64

    def select_prefill(self, block_m: int, cache_bytes: int) -> Launch:
        """Return launch sizes for `block_m` index queries and `cache_bytes` bytes per key value."""
        return Launch(num_warps=4, num_stages=2 if cache_bytes == 1 else 1)


class H200SelectionTiles(SelectionTiles):
    """Decodes run four programs per multiprocessor, each with loads of several blocks in flight."""

    # Tiles of 128 rows read fewer keys per query, but take 1.2 to 1.8 times as long as tiles of 64.
    attend_prefill = Launch(block_n=64, num_warps=4, num_stages=3)

    def select_decode(self, cache_bytes: int) -> Launch:
        return Launch(num_warps=4, num_stages=2 if cache_bytes > 1 else 3, maxnreg=128)

    def decode_is_dependent(self, num_tokens: int, *, kv_heads: int) -> bool:
        """Return whether a dependent launch (see `launch_options`) is faster. After a selection for
        few tokens an ordinary launch is faster, most likely because waiting programs would occupy
        multiprocessors that score blocks. With two KV heads a dependent launch is always faster.
        """
        return kv_heads > 1 or num_tokens > 4

    def select_block_m(self, rows: int) -> int:
        return 64 if rows <= 1024 else 128

    def select_prefill(self, block_m: int, cache_bytes: int) -> Launch:
        return Launch(num_warps=4 if block_m == 64 else 8, num_stages=3)


def tiles_for(device: torch.device) -> SelectionTiles:
    return H200SelectionTiles() if has_h200_tiles(device) else SelectionTiles()
