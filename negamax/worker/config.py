"""What one worker rank needs to know. Plain data: it crosses to rank processes as MessagePack."""

from __future__ import annotations

from dataclasses import dataclass

from negamax.config.model_spec import ModelSpec
from negamax.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class WorkerConfig:
    """One rank's share of the engine's configuration. `folder` None means synthetic weights."""

    spec: ModelSpec
    eos_token_ids: tuple[int, ...]  # of the checkpoint's generation defaults
    folder: str | None
    layout: ParallelLayout
    dtype: str  # "auto", "bfloat16", "float16", "float32"
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory: int | None  # bytes per rank
    num_threads: int
    seed: int
    init_method: str | None  # rendezvous of the ranks; None where there is one rank


@dataclass(frozen=True)
class WorkerReady:
    """What a started rank reports."""

    num_kv_blocks: int
    dtype: str
    device: str
    kernels: str  # the kernel table, one line per op
    load_summary: str
