"""The Triton kernel that places a step's tokens, against its definition."""

from __future__ import annotations

import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.kvcache import spec
from negamax.kernels.kvcache import triton as kvcache


def test_tokens_are_placed_as_the_definition_says() -> None:
    op = spec.OPS[0]
    for case in op.cases(torch.bfloat16, torch.Generator().manual_seed(0)):
        expected, actual = op.apply(op.reference, case), op.apply(kvcache.KERNELS[0], case)
        for want, got in zip(expected[:2], actual[:2], strict=True):
            torch.testing.assert_close(
                got, want, atol=op.tolerance[torch.bfloat16].atol, rtol=0.0, msg=case.label
            )
        assert torch.equal(actual[2], expected[2]), case.label
