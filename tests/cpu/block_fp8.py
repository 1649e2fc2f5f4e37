import torch
from torch import Tensor

from negamax.formats.floats import E4M3_MAX


def scale_shape(rows: int, columns: int, *, block: tuple[int, int] = (128, 128)) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_block(
    weight: Tensor,  # [N, K] any float dtype
    *,
    block: tuple[int, int] = (128, 128),
    # [N, K] float8_e4m3fn, [ceil(N / block rows), ceil(K / block columns)] fp32
) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    grid = scale_shape(rows, columns, block=block)
    padding = (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)
    padded = torch.nn.functional.pad(weight.float(), padding)
    largest = padded.view(grid[0], block[0], grid[1], block[1]).abs().amax(dim=(1, 3))
    # If the quotient underflowed to 0, zeros would become NaN.
    scale = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny).where(largest != 0, 1.0)
    spread = scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return (weight.float() / spread[:rows, :columns]).to(torch.float8_e4m3fn), scale
