"""Sizes of the Triton attention kernels, by what they were measured on: one H200, head_dim 128.

Nothing is tuned at run time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeCut:
    """How the keys of a decode step are cut up, before the dtype of the cache is known."""

    keys: int  # per tile
    min_tiles: int  # that a program takes before another one helps it
    programs: float  # per multiprocessor
    # programs per multiprocessor that read fast enough, each with a piece of one sequence
    few: float


@dataclass(frozen=True)
class DecodeLaunch:
    warps: int
    stages: int
    registers: int  # per thread at most


@dataclass(frozen=True)
class PrefillLaunch:
    keys: int  # per tile
    warps: int
    stages: int


DECODE = DecodeCut(keys=64, min_tiles=1, programs=3, few=1.5)
_SHORT = 4096  # tokens; beyond it large tiles read keys less often


def decode_programs(num_seqs: int, kv_heads: int, multiprocessors: int) -> tuple[int, bool]:
    """Programs per KV head, and whether sequences are cut into pieces (of which a program has one)
    or run together.
    """
    few, many = (
        max(1, int(multiprocessors * number // kv_heads))
        for number in (DECODE.few, DECODE.programs)
    )
    return (few, True) if num_seqs <= few else (many, False)


def decode_launch(cache_bytes: int, *, cut: bool) -> DecodeLaunch:
    """For a cache of `cache_bytes` per element."""
    if cut:
        return DecodeLaunch(warps=4, stages=3, registers=255)
    return DecodeLaunch(warps=4, stages=2 if cache_bytes > 1 else 3, registers=168)


def prefill_queries(longest: int) -> int:
    """Queries per program where the longest sequence has `longest` tokens: small tiles waste less
    at the diagonal.
    """
    return 64 if longest <= _SHORT else 128


def prefill_launch(queries: int, cache_bytes: int) -> PrefillLaunch:
    """For tiles of `queries` and a cache of `cache_bytes` per element."""
    if queries == 64:
        return PrefillLaunch(keys=32 if cache_bytes > 1 else 64, warps=4, stages=3)
    return PrefillLaunch(keys=64, warps=8, stages=3)
