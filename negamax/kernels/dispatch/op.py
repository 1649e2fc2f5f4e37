"""Send tokens to experts on other ranks, and return the sums of the experts' outputs.

Each rank of a group has its own tokens, padded to the same number of rows on all ranks.

    dispatch    row t of rank r becomes row r * num_rows + t on the ranks whose experts it selected
    combine     the experts' outputs for this row are summed and return to rank r as row t
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import GROUP
from negamax.kernels.op import EXACT, op, rounding_tolerance
from negamax.kernels.peers import Collective

MOST_CHOICES = 16  # maximum number of experts per token


@dataclass(frozen=True)
class ExpertRanges:
    """Rank r has experts firsts[r] to firsts[r] + count - 1."""

    firsts: Tensor  # [ranks] int32, index of each rank's first expert
    count: int


def most_words(hidden_size: int) -> int:
    """Return an upper bound of the number of 4-byte words of a dispatched row.

    A row holds the hidden state twice (in 16 bits, and in FP8 with scales), and the ids and weights
    of up to MOST_CHOICES experts.
    """
    return hidden_size // 2 + hidden_size // 4 + hidden_size // GROUP + 2 * MOST_CHOICES


def dispatch(
    ids: Tensor,  # [T, top_k] int32, the experts that each token selected; -1: no expert
    columns: Sequence[Tensor],  # tensors [T, ...] whose rows are sent with the tokens' ids
    /,
    *,
    experts: ExpertRanges,
    group: Collective,
    num_rows: int,  # padded number of rows, at least T and equal on all ranks
) -> tuple[Tensor, list[Tensor]]:
    """Return the expert ids [ranks * num_rows, top_k] and the `columns` of all ranks' rows.

    The ids of padding rows are -1. The `columns` of a row that selected no expert of this rank are
    undefined; the reference implementation returns the `columns` of every row.
    """
    sent, parts = (ids, *columns), []
    for column in sent:
        missing, bits = num_rows - len(column), column.contiguous().view(torch.uint8)
        fill = 255 if column is ids else 0  # padding ids are -1: four bytes of 255
        parts.append((F.pad(bits, (0, 0, 0, missing), value=fill) if missing else bits).flatten())
    gathered = group.all_gather(torch.cat(parts).unsqueeze(0), dim=0)
    received = [
        piece.reshape(group.size * num_rows, -1).contiguous().view(column.dtype)
        for piece, column in zip(gathered.split([len(p) for p in parts], dim=1), sent, strict=True)
    ]
    return received[0], received[1:]


def combine(
    # outputs of this rank's experts [ranks * num_rows, width], or P summands [ranks * num_rows, P,
    # width]; 0 in rows that selected no expert of this rank
    out: Tensor,
    ids: Tensor,  # [ranks * num_rows, top_k] int32, result of `dispatch`
    /,
    *,
    experts: ExpertRanges,
    group: Collective,
) -> Tensor:  # [num_rows, width]
    """Sum `out` over its P summands, then over ranks; round each sum. Return this rank's rows."""
    return group.reduce_scatter(out if out.dim() == 2 else out.sum(1))


DISPATCH = op(
    "dispatch.dispatch", dispatch, None, "tokens to the ranks of their selected experts", EXACT
)
COMBINE = op(
    "dispatch.combine",
    combine,
    None,
    "expert outputs, summed on the tokens' ranks",
    rounding_tolerance(reason="a sum of few values"),
)
