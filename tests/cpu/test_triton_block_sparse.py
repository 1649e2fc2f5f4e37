"""The Triton kernels of block-sparse attention on what only they meet: FP8 caches and results,
padding, captured steps, several drafts of a sequence. In the interpreter, at sizes it can bear.
"""

from __future__ import annotations

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.attention.triton_head_norm import sparse_norm_rope_write
from negamax.kernels.block_sparse import spec
from negamax.kernels.kvcache.spec import FP8, cache_rows
from negamax.kernels.rope.spec import cos_sin, signed_frequencies

FP8_ERROR = 0.03  # of rounding to e4m3


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtypes", [(FP8, torch.bfloat16), (torch.bfloat16, FP8)])
def test_norms_write_caches_of_two_dtypes_and_keep_broken_rows_finite(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """The second token is no number anywhere, the third one has no slot."""
    heads, kv_heads, block_size = 6, 2, 16
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(3, (heads + 3 * kv_heads + 1) * 128, generator=generator).bfloat16()
    projected[1, ::7] = torch.nan
    projected[1, 5] = torch.inf
    weights = 1 + 0.2 * torch.randn(2, 2, 128, generator=generator)
    norm = spec.SparseHeadNorm(*weights, heads=heads, kv_heads=kv_heads, eps=1e-6)
    angles = cos_sin(torch.tensor([5, 900, 31]), signed_frequencies(64, 5e6))
    slots = torch.tensor([17, 2, -1])
    rows = cache_rows(slots, kv_heads=kv_heads, block_size=block_size)

    def caches() -> list[torch.Tensor]:
        shapes = ((kv_heads, dtypes[0]), (kv_heads, dtypes[0]), (1, dtypes[1]))
        return [torch.zeros(4, n, block_size, 128, dtype=dtype) for n, dtype in shapes]

    scales, want, got = (0.5, 0.25), caches(), caches()
    expected = spec.norm_rope_write(
        projected[:2].float(), norm, *(x[:2] for x in angles), *want, rows[:4], kv_scales=scales
    )
    actual = sparse_norm_rope_write(projected, norm, *angles, *got, rows, kv_scales=scales)
    for result, defined in zip(actual, expected, strict=True):
        assert result.isfinite().all()
        assert relative_error(result[0], defined[0]) < 5e-3
    for stored, defined in zip(got, want, strict=True):
        assert stored.float().isfinite().all()
        error = FP8_ERROR if stored.dtype == FP8 else 5e-3
        assert relative_error(stored[1].float(), defined[1].float()) < error
        written = stored.float().abs().sum(dim=(1, 3)).nonzero().tolist()
        assert written == [[0, 2], [1, 1]]  # block and place
