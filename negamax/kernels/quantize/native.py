"""Convert E4M3 to the dtype that a GPU multiplies: e4m3fnuz on MI300, otherwise e4m3fn.

In e4m3fnuz, the bits of an e4m3fn value stand for half the value, and the bits of -0 stand for NaN.
"""

import torch
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels import platform
from negamax.kernels.activations import GROUP, QuantizedActivations

Outputs = tuple[Tensor, Tensor | None, Tensor | None]  # activations: plain, FP8, FP8 scales


def native_e4m3(device: torch.device) -> torch.dtype:
    """Return the E4M3 dtype that `device` multiplies."""
    features = platform.platform_of(device).features
    is_fnuz = Feature.FP8 in features and Feature.E4M3FN not in features
    return torch.float8_e4m3fnuz if is_fnuz else torch.float8_e4m3fn


def empty_e4m3(like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate an FP8 copy of `like` [T, width]: values, and scales [T, width / 128]."""
    num_tokens, width = like.shape
    scale = torch.empty((num_tokens, width // GROUP), dtype=torch.float32, device=like.device)
    return torch.empty_like(like, dtype=native_e4m3(like.device)), scale


def outputs(out: Tensor, *, quantize: bool) -> Outputs:
    """Return `out` and, with `quantize`, an FP8 copy of `out`, which a kernel then fills."""
    return (out, *empty_e4m3(out)) if quantize else (out, None, None)


def result(
    out: Tensor, values: Tensor | None, scales: Tensor | None
) -> Tensor | QuantizedActivations:
    if values is None or scales is None:
        return out
    return QuantizedActivations(out, values, scales)


def to_native(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert e4m3fn values and their scales to the E4M3 dtype of their device."""
    if native_e4m3(values.device) is torch.float8_e4m3fn:
        return values, scale
    bits = values.view(torch.uint8)
    is_nan = bits.bitwise_and(0x7F) == 0x7F
    bits = bits.masked_fill(bits == 0x80, 0).masked_fill_(is_nan, 0x80)
    return bits.view(torch.float8_e4m3fnuz), scale * 2.0
