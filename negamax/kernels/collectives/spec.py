"""The sum over ranks of a layer's output, fused with the residual add and the norm that follow
it.
"""

from __future__ import annotations

from torch import Tensor

from negamax.kernels.collectives import cases
from negamax.kernels.norm import cases as norm_cases
from negamax.kernels.norm.spec import WIDE_ERROR, NormWeight, add_rms, prepare, sum_parts
from negamax.kernels.op import Kernel, Op, rounding_tolerance
from negamax.kernels.peers import Collective
from negamax.kernels.signatures import ALL_REDUCE_ADD_RMS, COMPLETE_RESIDUAL


def all_reduce_add_rms(
    # [T, width] or [T, P, width], this rank's partial result; its content is undefined afterwards
    x: Tensor,
    residual: Tensor,  # [T, width], changed in place
    norm: NormWeight,
    group: Collective | None,  # None: one rank
) -> Tensor:  # [T, width]
    """residual += the sum of x over its parts and the ranks, in place; the norm of the residual.

    Rounded after the sum over parts, after the sum over ranks and after the residual add.
    """
    total = sum_parts(x)
    if group is not None and group.size > 1:
        total = group.all_reduce(total)
    return add_rms(total, residual, norm)


def complete_residual(
    residual: Tensor,
    group: Collective | None,
    *,
    copy: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """A copy of the residual [T, width] that `all_reduce_add_rms` has left, with all rows on every
    rank, in `out` where given; without `copy` the residual itself where it has them.
    """
    if out is not None:
        return out.copy_(residual)
    return residual.clone() if copy else residual


OPS = (
    Op(
        name=ALL_REDUCE_ADD_RMS,
        summary="sum over ranks, residual += it, then RMS norm of the residual",
        reference=Kernel(ALL_REDUCE_ADD_RMS, "reference", all_reduce_add_rms, prepare),
        cases=norm_cases.small,
        apply=cases.apply_all_reduce,
        tolerance=rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
        cost=norm_cases.cost,
        wide=norm_cases.full_size,
        wide_error=WIDE_ERROR,
    ),
    Op(
        name=COMPLETE_RESIDUAL,
        summary="all rows of a residual that ranks may share out",
        reference=Kernel(COMPLETE_RESIDUAL, "reference", complete_residual),
        cases=norm_cases.small,
        apply=cases.apply_complete,
        tolerance=rounding_tolerance(scale=0.0, reason="a copy"),
        cost=cases.cost_complete,
    ),
)
