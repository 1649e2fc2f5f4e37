"""Random 4-bit and 8-bit matrices of a given standard deviation, for synthetic weights."""

import math

import torch
from torch import Tensor

from negamax.formats.floats import E2M1, E4M3, E4M3_MAX
from negamax.formats.tensor_format import Role, StoredTensor, TensorFormat

# element format -> standard deviation of the numbers that `_values` draws
_STD = {E2M1: 2.93, "uint4": 3.24, "int4": 3.24, "uint8": 73.9, "int8": 73.9, E4M3: 80.0}
_SCALE_SPREAD = 0.1  # standard deviation of scales, relative to their mean
_LEVEL_1 = 16.0  # mean of the block scales in formats with a global scale


def draw(
    stored: TensorFormat,
    tensor: StoredTensor,
    shape: tuple[int, ...],
    *,
    std: float,
    generator: torch.Generator,
) -> Tensor:
    """Draw `tensor` of the format `stored`, for matrices with standard deviation `std`."""
    dtype, device = getattr(torch, tensor.dtypes[0]), generator.device
    if tensor.role is Role.VALUES:
        return _values(stored.element, dtype, shape, generator=generator)
    if tensor.role is Role.ZERO_POINT:
        byte = 0x88 if stored.element == "uint4" and dtype is torch.int32 else 0x08
        byte = 0x80 if stored.element == "uint8" else byte
        word = torch.full((*shape, dtype.itemsize), byte, dtype=torch.uint8, device=device)
        whole: Tensor = word.view(dtype).squeeze(-1)
        return whole
    assert tensor.role is Role.SCALE, f"cannot draw tensor {tensor.name} of {stored.name}"
    scale = std / _STD[stored.element]
    if tensor.level == 2:
        return torch.full(shape, scale / _LEVEL_1, dtype=dtype, device=device)
    uniform = torch.rand(shape, generator=generator, device=device)
    if dtype is torch.uint8:  # E8M0 bytes of powers of two whose mean square is scale**2
        exponent = math.floor(math.log2(scale))
        share: float = (scale**2 / 4.0**exponent - 1) / 3
        return (uniform < share).to(torch.uint8).add_(127 + exponent)
    scale = _LEVEL_1 if any(t.level == 2 for t in stored.tensors) else scale
    return ((1 + (2 * uniform - 1) * _SCALE_SPREAD * 3**0.5) * scale).to(dtype)


def _values(
    element: str, dtype: torch.dtype, shape: tuple[int, ...], *, generator: torch.Generator
) -> Tensor:
    """Draw Gaussian E4M3 values or random bytes; 4-bit integers are 1 to 15, most often near 8."""
    if element == E4M3:
        normal = torch.randn(
            shape, dtype=torch.bfloat16, generator=generator, device=generator.device
        )
        return normal.mul_(_STD[E4M3]).clamp_(-E4M3_MAX, E4M3_MAX).to(dtype)

    def random_bytes() -> Tensor:
        sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(
            0, 256, sizes, dtype=torch.uint8, generator=generator, device=generator.device
        )

    found = random_bytes()
    if element in ("uint4", "int4"):
        found = (found & 0x77).add_(random_bytes() & 0x77).add_(0x11)
    return found.view(dtype)
