"""The KV cache of one rank: how many blocks fit, and the tensors that hold them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from negamax.base.errors import ResourceError
from negamax.layers.attention import KvView

GIB = 2**30
# Of the memory that is free once the weights are loaded, the share a CPU rank takes for its cache unless told otherwise.
CPU_CACHE_SHARE = 0.25


def allocate(layers: int, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[KvView]:
    """Key and value tensors of every layer, `shape` = [num_blocks, kv_heads, block_size, head_dim] each, zeroed."""
    make = _zeros_on_large_pages if device.type == "cpu" else partial(torch.zeros, device=device)
    return [KvView(k=make(shape, dtype=dtype), v=make(shape, dtype=dtype)) for _ in range(layers)]


def _zeros_on_large_pages(shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Zeros in memory of its own, on 2 MiB pages where the system grants them.

    Attention gathers blocks of a few KiB from all over the pool: on 4 KiB pages nearly every block is a miss of the address
    cache. Untouched pages take no memory.
    """
    num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel()).view(*shape)


def choose_num_blocks(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    memory: int | None,
    num_ranks: int,
) -> int:
    """How many blocks of `block_bytes` to allocate: what all sequences could use at most, bounded by memory.

    `memory` is the user's bound in bytes per rank; without one the bound is a share of the free memory divided over the
    ranks of this machine. Errors: `ResourceError` where not even one sequence of `max_model_len` tokens fits.
    """
    blocks_per_sequence = -(-max_model_len // block_size)
    budget = memory if memory is not None else int(available_memory() * CPU_CACHE_SHARE) // num_ranks
    affordable = budget // block_bytes
    if affordable < blocks_per_sequence:
        fitting = affordable * block_size
        raise ResourceError(
            f"one sequence of {max_model_len} tokens needs {blocks_per_sequence * block_bytes / GIB:.2f} GiB of KV cache, "
            f"{budget / GIB:.2f} GiB are available for it",
            hint=f"lower --max-model-len to {fitting} or raise --kv-cache-memory",
        )
    return int(min(affordable, blocks_per_sequence * max_num_seqs))


def available_memory() -> int:
    """Bytes of main memory a process could take now (Linux: MemAvailable; elsewhere half of the physical memory)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def check_weights_fit(weight_bytes: int, *, num_ranks: int) -> None:
    """Refuse a model whose weights exceed the free main memory (`weight_bytes` over all ranks of this machine)."""
    free = available_memory()
    if weight_bytes > free:
        raise ResourceError(
            f"the weights need {weight_bytes / GIB:.1f} GiB in main memory ({num_ranks} ranks), {free / GIB:.1f} GiB are free",
            hint="use a smaller model or a machine with more memory",
        )
