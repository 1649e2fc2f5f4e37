"""The all-reduce of a layer's output, fused with the residual add and the norm after it."""

from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.norm.op import WIDE_ERROR, add_rms, prepare, sum_parts
from negamax.kernels.op import EXACT, Prepared, op, rounding_tolerance
from negamax.kernels.peers import Collective


def all_reduce_add_rms(
    # this rank's partial result [T, width], or P summands [T, P, width]; undefined afterwards
    x: Tensor,
    residual: Tensor,  # [T, width], changed in place
    norm: Prepared,
    group: Collective | None,  # ranks whose x are summed; None: there is only one rank
    /,
) -> Hidden:  # [T, width]
    """Sum x over parts and ranks, add the total to the residual, return the residual's norm."""
    total = sum_parts(x)
    if group is not None and group.size > 1:
        total = group.all_reduce(total)
    return add_rms(total, residual, norm)


def complete_residual(
    residual: Tensor, group: Collective | None, /, *, copy: bool = True, out: Tensor | None = None
) -> Tensor:
    """Gather all rows of the residual on every rank; return a copy [T, width], in `out` if given.

    If `copy` is false and this rank has all rows, return the residual itself.
    """
    if out is not None:
        return out.copy_(residual)
    return residual.clone() if copy else residual


ALL_REDUCE_ADD_RMS = op(
    "collectives.all_reduce_add_rms",
    all_reduce_add_rms,
    prepare,
    "sum over ranks, residual += it, then RMS norm of the residual",
    rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
    wide_error=WIDE_ERROR,
)
COMPLETE_RESIDUAL = op(
    "collectives.complete_residual",
    complete_residual,
    None,
    "all rows of a residual that may be sharded",
    EXACT,
)
