"""Cases of the fused all-reduce: the inputs of `norm.add_rms` on one rank.

Tests in tests/gpu and tests/dist run several ranks.
"""

from torch import Tensor

from negamax.kernels.collectives.op import ALL_REDUCE_ADD_RMS, COMPLETE_RESIDUAL
from negamax.kernels.op import AnyKernel
from tests.kernel_cases import norm
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes
from tests.kernel_cases.norm import case_outputs, prepare_case


def apply_all_reduce(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    residual = case.tensors["residual"].clone()
    out = kernel.run(case.tensors["x"].clone(), residual, prepare_case(kernel, case), None)
    return (*case_outputs(out, case), residual)


def apply_complete(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(case.tensors["residual"], None),)


def cost_complete(case: Case) -> Cost:
    return Cost(num_bytes=2 * num_bytes(case.tensors["residual"]), flops=0)


CASES = {
    ALL_REDUCE_ADD_RMS: OpCases(norm.small, apply_all_reduce, norm.cost, norm.full_size),
    COMPLETE_RESIDUAL: OpCases(norm.small, apply_complete, cost_complete),
}
