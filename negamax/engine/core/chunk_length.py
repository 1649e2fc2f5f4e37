"""Choose the lengths of prompt chunks. Pipeline stages get chunks of equal time. Torch-free."""

from __future__ import annotations

from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.options.engine import EngineOptions
from negamax.planner.chunks import plan_even_times
from negamax.planner.cost import Costs, Model
from negamax.planner.gpus import MEASURED, GpuModel, visible_gpus
from negamax.scheduler.chunk_length import ChunkLength, EvenChunks
from negamax.worker.config import WorkerConfig

logger = get_logger(__name__)


def choose_chunk_length(
    options: EngineOptions, config: WorkerConfig, *, max_model_len: int
) -> ChunkLength:
    """Choose chunk lengths for requests of up to `max_model_len` tokens."""
    layout, most = config.layout, config.max_num_batched_tokens
    if layout.pp == 1 or not options.enable_dynamic_chunking or max_model_len <= most:
        return EvenChunks()
    gpu = _find_gpu(config.device)
    model = Model.of(
        config.spec, gpu, kv_dtype=config.kv_cache_dtype, index_dtype=config.index_cache_dtype
    )
    costs = Costs(model, gpu, layout, per_node=layout.ranks_per_node)
    length = plan_even_times(
        costs,
        max_num_batched_tokens=most,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )
    logger.info(
        "prompts run in chunks of equal time: %d tokens at first, %d at the end of the longest",
        most,
        length.fit(max_model_len, most, most)[0],
    )
    return length


def _find_gpu(device: str) -> GpuModel:
    """The GPU model to calculate with. Only the ratio of attention to GEMM time matters, so another
    model stands in for an unknown GPU.
    """
    if device == "cpu":
        return MEASURED
    try:
        return next(iter(visible_gpus()), MEASURED)
    except ConfigError:
        return MEASURED
