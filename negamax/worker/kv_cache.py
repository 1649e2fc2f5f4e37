"""Allocate the KV caches of one rank, and compute how many blocks fit."""

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from negamax.base import env
from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs, block_bytes, slot_bytes
from negamax.kernels.registry import KernelTable
from negamax.layers.attention import KvCaches
from negamax.models.family import INT8_CACHE
from negamax.models.memory import draft_bytes, expert_padding, weight_bytes
from negamax.worker.config import WorkerConfig

logger = get_logger(__name__)

GIB = 2**30
# Default size of the KV caches of all CPU ranks, as a fraction of the free memory after loading.
CPU_CACHE_SHARE = 0.25
# GPU memory for CUDA graphs and the driver, in addition to the measured peak of a full step.
GRAPH_RESERVE = GIB
# Minimum size of the device buffer for copies to host memory.
STAGING_BYTES = 128 * 2**20
HOST_SHARE = 0.9  # Fraction of the free main memory that host blocks may use.
ALIGNMENT = 512  # Alignment in bytes of each layer's cache in one allocation; kernels rely on it.


def check_scales(skipped: Iterable[str], *, dtype: torch.dtype) -> None:
    """Refuse an FP8 cache if `skipped` shows that the checkpoint has scales of int8 KV caches."""
    if dtype == torch.float8_e4m3fn and INT8_CACHE in skipped:
        raise ConfigError(
            "--kv-cache-dtype is fp8, but the checkpoint has scales for an int8 KV cache",
            hint="use --kv-cache-dtype auto",
        )


def allocate(
    caches: KvCacheSpecs,
    num_blocks: int,
    *,
    block_size: int,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device,
    shared: bool = False,
) -> list[KvCaches]:
    """Allocate zeroed caches [num_blocks, heads, block_size, width] of every layer, in the dtype of
    the cache's specification or else in `dtype`. Caches with equal specifications share an
    allocation. With `shared`, layers with equal specifications share one cache.
    """
    kinds = Counter(cache for layer in caches for cache in layer)
    pools: dict[KvCacheSpec, Iterator[Tensor]] = {}
    for cache, layers in kinds.items():
        blocks = cache.local_blocks(num_blocks, ranks)
        shape = (blocks, cache.local_heads(ranks), block_size, cache.width)
        element = dtype if cache.dtype is None else getattr(torch, cache.dtype)
        pools[cache] = cycle(_zeros(1 if shared else layers, shape, dtype=element, device=device))
    return [{cache.name: next(pools[cache]) for cache in layer} for layer in caches]


def allocate_own(
    config: WorkerConfig, num_blocks: int, *, layers: int | None = None, **options: Any
) -> list[KvCaches]:
    """Allocate the caches of a rank's first `layers` layers (None: all), as `allocate` does."""
    sizes = {"block_size": config.block_size, "ranks": config.layout.attention.size}
    return allocate(config.kv_caches[:layers], num_blocks, **sizes, **options)


def _zeros(
    layers: int, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    stride = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if device.type == "cpu":
        raw = zeros_on_large_pages(layers * stride)
    else:
        raw = torch.zeros(layers * stride, dtype=torch.uint8, device=device)
    return [layer[:num_bytes].view(dtype).view(shape) for layer in raw.split(max(1, stride))]


def zeros_on_large_pages(num_bytes: int) -> Tensor:
    """Allocate zeroed bytes on 2 MiB pages if possible. With 4 KiB pages, attention would have a
    TLB miss for each small block that it gathers. Untouched pages take no memory.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def choose_blocks(
    config: WorkerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    workspace: int = 0,
    encoding: int = 0,
    partial: int = 0,
) -> int:
    """Return how many KV blocks this rank can store. `dtype` is the default dtype of caches.
    `workspace`: GPU bytes of a step. `encoding`: GPU bytes to encode the largest image. An image
    that is encoded in parts takes `partial` bytes between steps.
    """
    if config.num_kv_blocks:
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # The workspace is subtracted twice: CUDA graphs and eager steps have separate workspaces.
        budget = (
            int(total * config.gpu_memory_utilization)
            - (total - free)
            - workspace
            - max(workspace, encoding)
            - partial
            - GRAPH_RESERVE
            - draft_buffers(config)
            - stage_buffers(config)
            - config.has_host_blocks * max(STAGING_BYTES, bytes_of_blocks(1, config, dtype=dtype))
        )
    else:
        budget = int(env.available_memory() * CPU_CACHE_SHARE) // config.num_cpu_ranks
    return choose_num_blocks(
        block_bytes=bytes_of_blocks(1, config, dtype=dtype),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        budget=budget,
    )


def draft_buffers(config: WorkerConfig) -> int:
    """Return the bytes that captured steps need for drafts: logits and residual streams."""
    speculation, spec = config.speculation, config.spec
    if speculation is None or not config.cudagraph_size:
        return 0
    rows = config.cudagraph_size * speculation.num_speculative_tokens
    logits = rows * -(-spec.vocab_size // config.layout.attention.size) * 4
    if config.draft and config.draft.spec.most_tokens is not None:  # the draft has its own logits
        logits *= 2
    streams = len(config.draft.spec.aux_layers) if config.draft else 0
    return logits + streams * config.max_num_batched_tokens * spec.hidden_size * 2


def stage_buffers(config: WorkerConfig) -> int:
    """Return the bytes of residual streams that wait between pipeline stages."""
    if config.layout.pp == 1:
        return 0
    streams = 1 + (len(config.draft.spec.aux_layers) if config.draft else 0)
    return 4 * streams * config.max_num_batched_tokens * config.spec.hidden_size * 2


def choose_host_blocks(
    config: WorkerConfig, num_blocks: int, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many blocks this rank stores in host memory. `num_blocks`: number of KV blocks.
    Raises `ConfigError` if the result is 0, and `ResourceError` if the blocks do not fit.
    """
    size, ranks = config.kv_offloading_size, config.layout.world_size
    per_block = bytes_of_blocks(1, config, dtype=dtype)
    if config.kv_offloading_ratio is not None:
        asked = f"--kv-offloading-ratio is {config.kv_offloading_ratio:g}"
        chosen = int(config.kv_offloading_ratio * num_blocks)
    elif size is not None:
        asked = f"--kv-offloading-size is {size:g} (GiB)"
        chosen = int(size * GIB / ranks) // per_block
    else:
        return 0
    if not chosen:
        raise ConfigError(
            f"{asked}, which is less than one KV block of {per_block / 2**20:.2f} MiB for "
            f"each of {ranks} ranks",
            hint=f"use --kv-offloading-size {2 * ranks * per_block / GIB:.3g} or more",
        )
    local, free = config.layout.ranks_per_node, min(env.available_memory(), env.main_memory())
    free = int(free * HOST_SHARE)
    if device.type == "cpu":  # subtract the KV cache, whose untouched pages Linux counts as free
        free -= local * bytes_of_blocks(num_blocks, config, dtype=dtype)
    needed = local * chosen * per_block
    if needed > free:
        most = max(0, free) * ranks / local / GIB
        raise ResourceError(
            f"{asked}: {local} ranks on this machine need {needed / GIB:.2f} GiB of main memory "
            f"for KV blocks; {max(0, free) / GIB:.2f} GiB are available",
            hint=f"use --kv-offloading-size {int(100 * most) / 100:g} or less"
            if most >= 0.01
            else "remove this option, or use a machine with more memory",
        )
    return chosen


def choose_num_blocks(
    *, block_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int, budget: int
) -> int:
    """Return how many KV blocks `max_num_seqs` sequences could use, limited to `budget` bytes.
    Raises `ResourceError` if one sequence of `max_model_len` tokens does not fit.
    """
    blocks_per_sequence = -(-max_model_len // block_size)
    affordable = max(0, budget) // max(1, block_bytes)
    if affordable < blocks_per_sequence:
        fitting = affordable * block_size
        raise ResourceError(
            f"one sequence of {max_model_len} tokens needs "
            f"{blocks_per_sequence * block_bytes / GIB:.2f} GiB of KV cache; "
            f"{max(0, budget) / GIB:.2f} GiB are available",
            hint=f"lower --max-model-len to {fitting} or raise --kv-cache-memory"
            if fitting > 1
            else "use more GPUs (--tensor-parallel-size), a smaller model, or more memory",
        )
    return int(min(affordable, blocks_per_sequence * max_num_seqs))


def bytes_of_blocks(num_blocks: int, config: WorkerConfig, *, dtype: torch.dtype) -> int:
    """Return the bytes of `num_blocks` on this rank. `dtype`: default dtype of caches."""
    return num_blocks * block_bytes(
        config.kv_caches, config.block_size, dtype=_name(dtype), ranks=config.layout.attention.size
    )


def describe(num_blocks: int, config: WorkerConfig, *, dtype: torch.dtype) -> str:
    size = bytes_of_blocks(num_blocks, config, dtype=dtype) / GIB
    per_token = bytes_of_blocks(1, config, dtype=dtype) // config.block_size
    caches = [cache for layer in config.kv_caches for cache in layer]
    index = {cache.dtype for cache in caches if cache.is_index}
    others = (f"{name} (index keys)" for name in index - {None, _name(dtype)})
    kinds = " and ".join((_name(dtype), *others))
    is_sharded = any(cache.is_sharded for cache in caches)
    shards = ", some blocks of each KV head on each rank" if config.layout.dcp > 1 else ""
    shards += ", a shard of the index keys on each rank" if is_sharded else ""
    asked, limit = config.kv_cache_memory or 0, ""
    one_more = bytes_of_blocks(num_blocks + 1, config, dtype=dtype)
    if config.num_kv_blocks is None and asked >= one_more:
        limit = (
            f" (of the {asked / GIB:.2f} GiB allowed: --max-num-seqs {config.max_num_seqs} "
            f"requests of {config.max_model_len} tokens need no more)"
        )
    cache = f"KV cache {size:.2f} GiB{limit} per rank in {kinds}"
    return f"{cache}, {per_token:,} bytes per token{shards}"


def check_rows_fit(config: WorkerConfig, *, device: torch.device) -> None:
    """Refuse sequences whose tokens and block tables exceed the free memory."""
    if device.type == "cpu":
        item, free = 8, env.available_memory() // config.num_cpu_ranks
    else:
        item, free = 4, torch.cuda.mem_get_info(device)[0]
    per_row = slot_bytes(config.max_model_len, config.block_size, item=item)
    needed = per_row * (config.max_num_seqs + 1)
    if needed > free:
        raise ResourceError(
            f"{config.max_num_seqs} sequences of up to {config.max_model_len} tokens need "
            f"{needed / GIB:.2f} GiB for token ids and block tables; {free / GIB:.2f} GiB are free",
            hint="lower --max-num-seqs or --max-model-len",
        )


def check_weights_fit(config: WorkerConfig, *, kernels: KernelTable, device: torch.device) -> None:
    """Refuse weights that exceed the free memory of the GPU, or of the machine for CPU ranks."""
    spec, layout, draft = config.spec, config.layout, config.own_draft
    on_gpu, num_ranks, kept = device.type == "cuda", layout.world_size, kernels.reads_stored
    padding = expert_padding(spec, kept=kept, layout=layout)
    if padding and layout.rank == 0:
        logger.info("each rank holds %s", padding)
    of_draft, sizes = 0, {"dtype": _name(kernels.dtype), "kept": kept}
    if draft is not None:
        of_draft = draft_bytes(draft.spec, ranks=layout.tp, embeds=layout.is_first_stage, **sizes)
    counted = [layout] if on_gpu else [layout.replace_rank(rank) for rank in range(num_ranks)]
    of_draft *= 1 if on_gpu else layout.stage_size
    needed = of_draft + sum(weight_bytes(spec, layout=each, **sizes) for each in counted)
    if on_gpu:
        free = torch.cuda.mem_get_info(device)[0]
        more = "--tensor-parallel-size, --pipeline-parallel-size"
        where, remedy = f"on {device}", f"use more GPUs ({more}) or a smaller model"
    else:
        free = env.available_memory()
        where, remedy = "in main memory", "use a smaller model or a machine with more memory"
    if needed > free:
        raise ResourceError(
            f"the weights need {needed / GIB:.1f} GiB {where} ({num_ranks} ranks); "
            f"{free / GIB:.1f} GiB are free"
            + (f"; the draft model needs {of_draft / GIB:.1f} GiB" if of_draft else ""),
            hint=remedy,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
