"""The sum over ranks of a layer's output, fused with the residual add and the norm that follow
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.norm import spec as norm_spec
from negamax.kernels.norm.spec import NormWeight
from negamax.kernels.op import AnyKernel, Case, Kernel, Op, rounding_tolerance
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
    total = norm_spec.sum_parts(x)
    if group is not None and group.size > 1:
        total = group.all_reduce(total)
    return norm_spec.add_rms(total, residual, norm)


def complete_residual(residual: Tensor, group: Collective | None) -> Tensor:
    """A copy of the residual [T, width] that `all_reduce_add_rms` has left, with all rows on every
    rank.
    """
    return residual.clone()


def _apply_complete(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(case.tensors["residual"], case.numbers["group"]),)


def _apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    residual = case.tensors["residual"].clone()
    out = kernel.run(
        case.tensors["x"].clone(),
        residual,
        norm_spec.prepare_case(kernel, case),
        case.numbers["group"],
    )
    return (*norm_spec.case_outputs(out, case), residual)


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """Those of `norm.add_rms` on one rank. What several ranks make of it needs several processes:
    tests/gpu and tests/dist.
    """
    return [
        _alone(case)
        for case in (
            *norm_spec.add_cases(dtype, generator),
            *norm_spec.part_cases(dtype, generator),
        )
    ]


def _wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [_alone(case) for case in norm_spec.wide_cases(dtype, generator)]


def _alone(case: Case) -> Case:
    return Case(case.label, case.tensors, {**case.numbers, "group": None})


OPS = (
    Op(
        name=ALL_REDUCE_ADD_RMS,
        summary="sum over ranks, residual += it, then RMS norm of the residual",
        reference=Kernel(ALL_REDUCE_ADD_RMS, "reference", all_reduce_add_rms, norm_spec.prepare),
        cases=_cases,
        apply=_apply,
        tolerance=rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
        cost=norm_spec.cost_add,
        wide=_wide,
        wide_error=norm_spec.WIDE_ERROR,
    ),
    Op(
        name=COMPLETE_RESIDUAL,
        summary="all rows of a residual that ranks may share out",
        reference=Kernel(COMPLETE_RESIDUAL, "reference", complete_residual),
        cases=_cases,
        apply=_apply_complete,
        tolerance=rounding_tolerance(scale=0.0, reason="a copy"),
        cost=norm_spec.cost_add,
    ),
)
