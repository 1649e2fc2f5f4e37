"""Describe how a rank runs the model: weight formats, cache dtypes, kernels and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from negamax.base import env
from negamax.formats.floats import PLAIN
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe.op import EXPERTS
from negamax.layers.weights import WeightSlot
from negamax.quantization.detect import detect

if TYPE_CHECKING:
    from negamax.worker.runner import ModelRunner


def describe_shape(runner: ModelRunner, *, cache_dtype: torch.dtype) -> dict[str, Any]:
    """Return a description as JSON values. `negamax.engine.shape` adds the fields of the engine."""
    kernels, on_gpu = runner.kernels, runner.device.type == "cuda"
    scheme = detect(runner.config.spec.quantization)
    chosen = {str(op): kernels.candidates[op][0].provider for op in sorted(kernels.candidates)}
    for op in (LINEAR, EXPERTS):
        for stored in scheme.formats if scheme else ():
            if kernel := kernels.choose(op, stored):
                chosen[f"{op} of {stored.name}"] = kernel.provider
    tiles = None
    if on_gpu:
        from negamax.kernels.launch.tile import has_h200_tiles  # this module needs Triton

        tiles = "measured on H200" if has_h200_tiles(runner.device) else "not measured"
    shapes = runner.graphs.shapes if runner.graphs else {}
    return {
        "weights": _list_formats(runner.model.weight_slots()),
        "dtype": str(kernels.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache_dtype).removeprefix("torch."),
        "index_cache_dtype": runner.config.index_cache_dtype,
        "kernels": chosen,
        "tiles": tiles,
        "graphs": {kind: len(each) for kind, each in shapes.items()},
        "gpu": torch.cuda.get_device_name(runner.device) if on_gpu else None,
        "torch": str(torch.__version__),
        "triton": env.installed_version("triton"),
    }


def _list_formats(slots: Mapping[str, WeightSlot]) -> dict[str, str]:
    """Map the last part of each module name to the formats of the module's matrices in memory."""
    found: dict[str, dict[str, None]] = {}
    for slot in slots.values():
        module, _, values = slot.name.rpartition(".")
        if slot.needed and len(slot.shape) > 1 and slot.stored in (None, slot.source.values):
            dtype = str(slot.dtype).removeprefix("torch.")
            held = slot.source.name if slot.stored else dtype
            if slot.stored is None and slot.source is not PLAIN:
                held = f"{slot.source.name} as {dtype}"
            found.setdefault(module.rpartition(".")[2] or values, {})[held] = None
    return {kind: ", ".join(sorted(formats)) for kind, formats in sorted(found.items())}
