"""Launch sizes of the Triton attention kernels, by architecture; not tuned at run time."""

from dataclasses import dataclass

import torch

from negamax.kernels.launch.tile import Launch, has_h200_tiles


@dataclass(frozen=True)
class DecodeSplit:
    """Constants for splitting the keys of a decode step over programs, for any cache dtype."""

    block_n: int = 64  # number of keys per tile
    min_tiles: int = 1  # minimum number of tiles per split of the keys
    programs: float = 3  # number of programs per multiprocessor for tiles of up to 16 query rows
    split_programs: float = 1.5  # Programs per multiprocessor if each program processes one split.
    # Give each program one split (up to 16 query rows) only if every sequence can have `min_splits`
    # splits. With fewer splits, some splits would be twice as long as others.
    min_splits: int = 3
    wide_programs: float = 2  # number of programs per multiprocessor for tiles of 17 to 32 rows
    min_runs: int = 4  # in steps with fewer sequences, each program processes one query


DECODE = DecodeSplit()
_SHORT = 3072  # in sequences with more tokens, tiles of 128 queries read the keys less often
_FEW = 64  # steps of up to this number of queries do not fill tiles of 128 queries


class AttentionTiles:
    """Unmeasured launch sizes; two pipeline stages need at most 64 KB of shared memory."""

    def decode_launch(self, cache_bytes: int, *, block_m: int, split_kv: bool) -> Launch:
        """Return launch sizes for `block_m` rows per tile, `cache_bytes` bytes per cached value."""
        return Launch(num_warps=4, num_stages=2)

    def prefill_block_m(self, longest: int, num_tokens: int) -> int:
        """Return the number of queries per program; small tiles compute fewer masked scores."""
        return 64

    def prefill_programs(self, block_m: int) -> int:
        """Return the number of programs per multiprocessor that split the keys of a few tiles."""
        return 128 // block_m

    def prefill_launch(self, block_m: int, cache_bytes: int, *, is_shard: bool) -> Launch:
        """Return launch sizes for tiles of `block_m` queries and cache elements of `cache_bytes`
        bytes. `is_shard`: the cache contains only a rank's shard of the blocks.
        """
        return Launch(block_n=32, num_warps=4, num_stages=2)


class H200AttentionTiles(AttentionTiles):
    """Launch sizes that were measured on an H200 with head_dim 128."""

    def decode_launch(self, cache_bytes: int, *, block_m: int, split_kv: bool) -> Launch:
        if split_kv or block_m > 16:
            return Launch(num_warps=4, num_stages=3, maxnreg=255)
        return Launch(num_warps=4, num_stages=2 if cache_bytes > 1 else 3, maxnreg=168)

    def prefill_block_m(self, longest: int, num_tokens: int) -> int:
        return 64 if longest <= _SHORT or num_tokens <= _FEW else 128

    def prefill_launch(self, block_m: int, cache_bytes: int, *, is_shard: bool) -> Launch:
        if block_m == 64:
            return Launch(block_n=32 if cache_bytes > 1 else 64, num_warps=4, num_stages=3)
        # With FP8 caches two programs of 4 warps fit on a multiprocessor. Programs for shards need
        # more registers.
        num_warps = 8 if cache_bytes > 1 or is_shard else 4
        return Launch(block_n=64, num_warps=num_warps, num_stages=3)


def tiles_for(device: torch.device) -> AttentionTiles:
    return H200AttentionTiles() if has_h200_tiles(device) else AttentionTiles()


def choose_decode_programs(
    num_seqs: int,
    kv_heads: int,
    multiprocessors: int,
    *,
    num_rows: int = 1,
    min_splits: int = 1,
    constants: DecodeSplit = DECODE,
) -> tuple[int, bool]:
    """Return the number of programs per KV head for tiles of `num_rows` query rows. Also return
    whether a program has one split of one sequence, which needs `min_splits` programs per sequence.
    """
    runs = constants.programs if num_rows <= 16 else constants.wide_programs
    split, many = (
        max(1, int(multiprocessors * number // kv_heads))
        for number in (constants.split_programs, runs)
    )
    return (split, True) if num_seqs * min_splits <= split else (many, False)
