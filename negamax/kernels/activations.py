"""What flows between kernels: plain activations, and beside them the same values in FP8 where the
next product wants them.

A norm or an attention kernel that knows its consumer multiplies with FP8 blocks writes both, so
that no launch is spent on quantising. The layers hand on what a kernel returned without looking
into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from negamax.kernels.collectives.spec import Collective

GROUP = 128  # columns that share a scale


@dataclass(frozen=True)
class Activations:
    """`plain` and its FP8 form: plain[t, c] is about values[t, c] * scales[t, c // 128]."""

    plain: Tensor  # [T, width] bf16 or fp16
    values: Tensor  # [T, width] float8_e4m3fn
    scales: Tensor  # [T, width / 128] fp32


@dataclass(frozen=True)
class ShardedActivations(Activations):
    """Activations of many tokens whose rows the ranks of `group` share out: `values` and `scales`
    have all of them, `plain` only those of this rank, from row `first` on. Valid until the group's
    next sum over ranks."""

    group: Collective
    first: int


def plain(x: Tensor | Activations) -> Tensor:
    """The activations in the model's dtype, all rows of them."""
    assert not isinstance(x, ShardedActivations), (
        "this rank has only its own rows of the plain activations"
    )
    return x.plain if isinstance(x, Activations) else x


def model_dtype(x: Tensor | Activations) -> torch.dtype:
    """The dtype of the plain activations."""
    return x.plain.dtype if isinstance(x, Activations) else x.dtype


def concatenate(parts: Sequence[Tensor | Activations]) -> Tensor | Activations:
    """The rows of all `parts`, in order; either all of them carry FP8 or none does."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Activations)]
    if not quantized:
        return torch.cat([plain(part) for part in parts])
    assert len(quantized) == len(parts), "some parts carry FP8 and some do not"
    return Activations(
        plain=torch.cat([plain(part) for part in quantized]),
        values=torch.cat([part.values.view(torch.uint8) for part in quantized]).view(
            torch.float8_e4m3fn
        ),
        scales=torch.cat([part.scales for part in quantized]),
    )
