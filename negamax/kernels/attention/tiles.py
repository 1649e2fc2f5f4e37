"""Sizes of the Triton attention kernels by architecture. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from negamax.kernels import platform


@dataclass(frozen=True)
class DecodeSplit:
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
    registers: int | None  # per thread at most


@dataclass(frozen=True)
class PrefillLaunch:
    keys: int  # per tile
    warps: int
    stages: int


DECODE = DecodeSplit(keys=64, min_tiles=1, programs=3, few=1.5)
_SHORT = 4096  # tokens; beyond it large tiles read keys less often


@dataclass(frozen=True)
class Tiles:
    """Where nothing was measured: two stages, and 64 KB of shared memory are enough."""

    measured_on: str | None = None

    def decode_launch(self, cache_bytes: int, *, split_kv: bool) -> DecodeLaunch:
        """For a cache of `cache_bytes` per element."""
        return DecodeLaunch(warps=4, stages=2, registers=None)

    def prefill_queries(self, longest: int) -> int:
        """Queries per program where the longest sequence has `longest` tokens: small tiles waste
        less at the diagonal.
        """
        return 64

    def prefill_launch(self, queries: int, cache_bytes: int) -> PrefillLaunch:
        """For tiles of `queries` and a cache of `cache_bytes` per element."""
        return PrefillLaunch(keys=32, warps=4, stages=2)


@dataclass(frozen=True)
class H200(Tiles):
    """Measured with head_dim 128."""

    measured_on: str | None = "H200"

    def decode_launch(self, cache_bytes: int, *, split_kv: bool) -> DecodeLaunch:
        if split_kv:
            return DecodeLaunch(warps=4, stages=3, registers=255)
        return DecodeLaunch(warps=4, stages=2 if cache_bytes > 1 else 3, registers=168)

    def prefill_queries(self, longest: int) -> int:
        return 64 if longest <= _SHORT else 128

    def prefill_launch(self, queries: int, cache_bytes: int) -> PrefillLaunch:
        if queries == 64:
            return PrefillLaunch(keys=32 if cache_bytes > 1 else 64, warps=4, stages=3)
        return PrefillLaunch(keys=64, warps=8, stages=3)


_LIKE_H200 = H200(measured_on=None)  # as much shared memory, nothing measured
# cpu: the interpreter
_BY_ARCH = {"sm_90": H200(), "sm_100": _LIKE_H200, "sm_103": _LIKE_H200, "cpu": H200()}


def tiles_for(device: torch.device) -> Tiles:
    """The sizes for `device`."""
    return _BY_ARCH.get(platform.platform_of(device).arch, Tiles())


def decode_programs(num_seqs: int, kv_heads: int, multiprocessors: int) -> tuple[int, bool]:
    """Programs per KV head, and whether sequences are cut into pieces (of which a program has one)
    or run together.
    """
    few, many = (
        max(1, int(multiprocessors * number // kv_heads))
        for number in (DECODE.few, DECODE.programs)
    )
    return (few, True) if num_seqs <= few else (many, False)
