"""Define penalties on logits, log-probabilities, and the draw of one token per row.

A row's draw does not depend on other rows. Filters apply in this order: temperature, min-p, top-k,
top-p.

  sample         inverts the cumulative distribution of the tokens, in descending order of
                 probability, at one uniform number per row
  pick           draws from sharded logits without filters by Gumbel-max: P(i) is
                 softmax(logits / T)[i]; ranks exchange one value and one index
  draw_leading   draws like `sample` from sharded logits, for rows with a small top_k
"""

from typing import NamedTuple

import torch
from torch import Tensor

from negamax.kernels.op import EXACT, op
from negamax.kernels.peers import Collective
from negamax.kernels.sampling import noise

# Rows with 1 <= top_k <= CANDIDATES draw from CANDIDATES leading tokens, and other rows draw from
# the sorted vocabulary.
CANDIDATES = 64


class RowSampling(NamedTuple):
    """Filters, seeds and positions of R sampled rows."""

    # [slots, 4] fp32: temperature (0: the most likely token), top_k (an integer; 0: off), top_p in
    # (0, 1], min_p in [0, 1]
    filters: Tensor
    seeds: Tensor  # [slots] int64, the seed of each slot's request
    slots: Tensor  # [R] int64, the slot of each row
    positions: Tensor  # [R] int64, positions in the sequences, which select the noise


def sample(
    logits: Tensor,  # [R, V] fp32
    *,
    filters: Tensor,  # [R, 4] fp32: temperature > 0, top_k (0: off), top_p, min_p
    uniforms: Tensor,  # [R] fp32 in [0, 1)
    candidates: int,  # number of tokens to draw from: >= the largest top_k; V if a row has no top_k
) -> Tensor:  # [R] int64
    """Draw one token per row from the `candidates` most likely tokens."""
    values, token_ids = torch.topk(logits, candidates, dim=-1)  # descending order
    return draw_from(values, token_ids, filters=filters, uniforms=uniforms)


def draw_from(
    values: Tensor,  # [R, C] fp32, logits of the leading tokens in descending order
    token_ids: Tensor,  # [R, C] int64, ids of the leading tokens
    *,
    filters: Tensor,  # [R, 4] fp32: temperature > 0, top_k (0: off), top_p, min_p
    uniforms: Tensor,
) -> Tensor:  # [R] int64
    """Draw one token per row from `token_ids`."""
    candidates, (temperature, top_k, top_p, min_p) = values.shape[1], filters.unbind(1)
    probs = torch.softmax(values / temperature.unsqueeze(-1), dim=-1)
    ranks = torch.arange(candidates, device=values.device)
    limit = torch.where(top_k > 0, top_k, float(candidates)).unsqueeze(-1)
    keep = (ranks < limit) & (probs >= min_p.unsqueeze(-1) * probs[:, :1])
    probs = probs * keep
    # top-p applies after top-k and min-p. Top-p keeps a token if the sum of the probabilities of
    # more likely tokens is below top_p times the total.
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    probs = probs * (cumulative - probs < top_p.unsqueeze(-1) * total)
    cumulative = probs.cumsum(dim=-1)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    chosen = (cumulative <= target).sum(dim=-1, keepdim=True)
    # If rounding makes `target` the sum of `probs`, draw the last token with a probability > 0.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return token_ids.gather(1, torch.minimum(chosen, last).clamp_min(0)).squeeze(1)


def pick(
    logits: Tensor,  # [R, V of this rank] fp32
    rows: RowSampling,
    /,
    *,
    first_id: int,  # id of the token in the first column of `logits`
    group: Collective | None = None,  # ranks that shard the vocabulary; None: not sharded
) -> Tensor:  # [R] int64
    """Pick the token with the largest logit / T + Gumbel(seed, position, token).

    All ranks return the same tokens. Among tied tokens the lowest id is picked. A row whose logits
    contain NaN or infinity, or only minus infinity, gets -1.
    """
    ids = first_id + torch.arange(logits.shape[1], device=logits.device)
    temperature = rows.filters[rows.slots, :1]
    keys = noise.row_keys(rows.seeds[rows.slots], rows.positions)
    exponentials = noise.exponentials(
        noise.token_bits((keys[0].unsqueeze(1), keys[1].unsqueeze(1)), ids)
    )
    noisy = (logits / temperature).clamp_max(noise.LARGEST_SCORE) - exponentials.log()
    scores = torch.where(temperature > 0, noisy, logits)
    broken = logits.isnan() | (logits == torch.inf)
    scores = scores.masked_fill(broken, torch.inf)
    return best_of_ranks(*largest(scores, ids), group)


def largest(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest score [R], and the lowest id with this score; ids [N] or [R, N]."""
    best = scores.max(dim=1).values
    of_best = ids.where(scores == best.unsqueeze(1), torch.iinfo(torch.int64).max)
    return best, of_best.min(dim=1).values


def best_of_ranks(best: Tensor, chosen: Tensor, group: Collective | None) -> Tensor:
    """Return each row's `chosen` (int64) of the rank with the largest `best`; -1 if not finite."""
    if group is not None and group.size > 1:
        best, chosen = largest(
            group.all_gather(best.unsqueeze(1), dim=1), group.all_gather(chosen.unsqueeze(1), dim=1)
        )
    return torch.where(best.isfinite(), chosen, -1)


def draw_leading(
    logits: Tensor,  # [R, V of this rank] fp32
    rows: RowSampling,
    /,
    *,
    first_id: int,  # id of the token in the first column of `logits`
    otherwise: Tensor,  # [R] int64, results for rows that this call does not draw
    group: Collective | None = None,  # ranks that shard the vocabulary; None: not sharded
) -> Tensor:  # [R] int64
    """Draw a token for each row with 1 <= top_k <= CANDIDATES and a temperature above 0.

    Rows that this call does not draw get their token from `otherwise`. All ranks return the same
    tokens. Tied tokens are ordered by id. A drawn row whose logits contain NaN or infinity, or only
    minus infinity, gets -1.
    """
    logits = logits.masked_fill(logits.isnan(), torch.inf)
    values, columns = torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = values[:, :CANDIDATES], columns[:, :CANDIDATES] + first_id
    if group is not None and group.size > 1:
        values, order = torch.sort(
            group.all_gather(values, dim=1), dim=-1, descending=True, stable=True
        )
        values, ids = (
            values[:, :CANDIDATES],
            group.all_gather(ids, dim=1).gather(1, order[:, :CANDIDATES]),
        )
    filters = rows.filters[rows.slots]
    uniforms = noise.uniforms(rows.seeds[rows.slots], rows.positions)
    drawn = draw_from(values, ids, filters=filters, uniforms=uniforms)
    drawn = drawn.where(values[:, 0].isfinite(), -1)
    temperature, top_k = filters[:, 0], filters[:, 1]
    return drawn.where((temperature > 0) & (top_k >= 1) & (top_k <= CANDIDATES), otherwise)


def apply_penalties(
    logits: Tensor,  # [V] fp32
    prompt_ids: Tensor,  # [P] int64
    output_ids: Tensor,  # [O] int64, -1: no token
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:  # [V] fp32
    """Apply the repetition penalty for tokens of prompt and output, then the frequency and presence
    penalties of the OpenAI API for tokens of the output.

    The repetition penalty divides positive logits and multiplies negative logits. The frequency
    penalty is subtracted once per occurrence of a token, the presence penalty once per token.
    """
    # none of the operations below makes the host wait for the GPU
    counts = torch.zeros_like(logits).index_add(
        0, output_ids.clamp_min(0), (output_ids >= 0).to(logits.dtype)
    )
    if repetition != 1.0:
        seen = (counts > 0).index_fill(0, prompt_ids, True)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
    if frequency or presence:
        logits = logits - (frequency * counts + presence * (counts > 0))
    return logits


def token_logprobs(
    logprobs: Tensor,  # [R, V] fp32, log-softmax of the model's own logits
    token_ids: Tensor,  # [R] int64, tokens whose log-probabilities are returned
    *,
    num_top: int,
    # log-probabilities [R] fp32, ranks [R] int64, top ids [R, num_top] int64, top log-probabilities
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank (1 = most likely) of `token_ids`, and each row's top tokens.

    Tied tokens are in the order of their ids, for any `num_top`.
    """
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    ids = torch.cat([_top_ids(rows, num_top) for rows in logprobs.split(_TOP_ROWS)])
    return chosen.squeeze(1), ranks, ids, logprobs.gather(1, ids)


_TOP_ROWS = 32  # number of rows per sort; their keys take 51 MB for a vocabulary of 200,000


def _top_ids(logprobs: Tensor, num_top: int) -> Tensor:
    """Return the ids [R, num_top] int64 of the top tokens, ordered as in `token_logprobs`."""
    if num_top == 0:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.int64)
    # log-probabilities are at most 0, so a larger one has a smaller absolute value and bit pattern
    keys = logprobs.abs().view(torch.int32).long()
    keys <<= 32
    keys |= torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.topk(num_top, dim=-1, largest=False).values & 0xFFFF_FFFF


_NEAR_TIES = 1e-6  # allowed fraction of rows in which tokens with nearly equal logits are swapped

PICK = op(
    "sampling.pick",
    pick,
    None,
    "one token per row by logit / T + Gumbel noise, over all ranks",
    EXACT,
    wide_error=_NEAR_TIES,
)
DRAW_LEADING = op(
    "sampling.draw_leading",
    draw_leading,
    None,
    "one token per row with a small top_k, by its filters, over all ranks",
    EXACT,
    wide_error=_NEAR_TIES,
)
