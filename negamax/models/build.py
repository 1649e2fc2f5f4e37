"""Build the model of a spec on this rank."""

from importlib import import_module

import torch

from negamax.config.model_spec import ModelSpec
from negamax.kernels.registry import KernelTable
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.registry import find_family
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat


def build_model(
    spec: ModelSpec,
    *,
    context: ParallelContext,
    device: torch.device,
    kernels: KernelTable,
    keep_quantized: bool = True,
) -> Decoder:
    """Build this rank's part of the model, without weights.

    With `keep_quantized`, a matrix stays quantized if a kernel reads its format. The loader
    dequantizes every matrix that does not stay quantized. Raises `ConfigError` for an unknown
    architecture, and if the ranks of `context.layout` cannot split the sizes of the model.
    """
    family = find_family(spec.architecture)
    weights = WeightFormat(kernels.dtype, device, detect(spec.quantization), keep_quantized)
    code = import_module(f"{family.package}.model")
    model: Decoder = code.build(spec, LayerSetup(context, weights, kernels))
    return model


def build_empty_slots(
    spec: ModelSpec, layout: ParallelLayout, *, kernels: KernelTable, keep_quantized: bool = True
) -> dict[str, WeightSlot]:
    """Return the weight slots of the rank of `layout`, without weights, to plan a load."""
    return build_model(
        spec, context=ParallelContext(layout), device=torch.device("meta"), kernels=kernels,
        keep_quantized=keep_quantized,
    ).weight_slots()  # fmt: skip
