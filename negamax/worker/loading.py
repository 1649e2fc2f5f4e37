"""Fill a rank's weights from a checkpoint, the weight cache or a seed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from negamax.base.log import get_logger
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import LoadPlan, plan_load
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.checkpoint.weight_cache import load_cached
from negamax.kernels.registry import KernelTable
from negamax.layers.weights import WeightSlot
from negamax.models.build import build_empty_slots
from negamax.models.decoder import Decoder
from negamax.worker import kv_cache
from negamax.worker.config import WorkerConfig

logger = get_logger(__name__)


def plan_loading(
    config: WorkerConfig, *, kernels: KernelTable, cache_dtype: torch.dtype
) -> LoadPlan | None:
    """Plan how the checkpoint's files fill the model. Return None for synthetic weights."""
    if config.folder is None:
        return None
    slots = build_empty_slots(config.spec, config.layout, kernels=kernels)
    with _progress("checking files", config) as progress:
        plan = plan_load(slots, config.spec, Path(config.folder), config.layout, progress=progress)
    kv_cache.check_scales(plan.skipped, dtype=cache_dtype)
    return plan


def load_model(
    model: Decoder, config: WorkerConfig, plan: LoadPlan | None, *, device: torch.device
) -> str:
    """Fill and pack the weights by `plan` (None: synthetic). Return a line for the log. Loading
    uses one CPU thread, because more threads would wait at barriers for seconds on busy cores.
    """
    torch.set_num_threads(1)
    shown = config.show_progress and config.layout.rank == 0
    if plan is None:
        with Progress("drawing synthetic weights", unit=_millions, enabled=shown) as progress:
            fill_synthetic(
                model.weight_slots(), config.spec, config.seed, device=device, progress=progress
            )
        summary = f"synthetic weights, seed {config.seed}"
    else:
        load = partial(_fill, model.weight_slots(), plan, config)
        if config.weight_cache is None or config.folder is None:
            summary = load()
        else:
            summary = load_cached(
                Path(config.weight_cache).expanduser(),
                model.weight_slots(),
                checkpoint=Path(config.folder),
                layout=config.layout,
                load=load,
                show_progress=shown,
            )
    with _progress("packing weights of layers", config) as progress:
        model.finish_loading(progress)
    torch.set_num_threads(config.num_threads)
    return summary


def _fill(slots: Mapping[str, WeightSlot], plan: LoadPlan, config: WorkerConfig) -> str:
    with _progress("loading weights", config, unit=format_bytes) as progress:
        summary = fill(slots, plan, progress=progress).summary()
    if config.layout.rank:  # rank 0 returns its summary to the engine, which logs it
        logger.info("rank %d: %s", config.layout.rank, summary)
    return summary


def _progress(what: str, config: WorkerConfig, unit: Callable[[int], str] = str) -> Progress:
    """Return a display of this rank's progress in work that every rank does."""
    rank = config.layout.rank if config.layout.world_size > 1 else None
    return Progress(what, unit=unit, enabled=config.show_progress, rank=rank)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f} M"
