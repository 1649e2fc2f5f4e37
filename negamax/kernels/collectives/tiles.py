"""Launch sizes of the kernels that exchange rows with other ranks."""

from __future__ import annotations

WARPS = 8  # of the program that holds one row
# from here on the links' bandwidth outweighs the second exchange (4 ranks, 6 KB rows)
TWO_SHOT_ROWS = 16
# From here on every rank normalises its share of the rows only. By arithmetic (4 GPUs, 6 KB rows,
# links at 380 GB/s): 512 rows take 6 us to scatter, 5 to normalise and gather, 6 for two barriers;
# summed on all ranks, 23 us, and the norm of all rows.
SHARD_ROWS = 512
SCATTER_WARPS = 4  # of the program that sends a row
SHARD_WARPS = 8  # of the program that completes one
PUSH_WORDS = 1024  # that a program sends of tensors gathered as they are


def two_shot(num_rows: int, *, world: int, words: int) -> bool:
    """Whether ranks sum a slice of each row and pass the sums on, instead of each summing whole
    rows.

    A rank sends (world - 1) rows per row in one shot, and 2 (world - 1) / world in two: the same
    for two ranks.
    """
    return world > 2 and num_rows >= TWO_SHOT_ROWS and words % (world * 64) == 0


def shards(num_rows: int) -> bool:
    """Whether the ranks share out the rows. The same for every norm of a step, since all of them
    see the same rows.
    """
    return num_rows >= SHARD_ROWS
