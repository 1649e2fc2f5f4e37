"""Sampling ops, defined in PyTorch: edits of logits, and the draw of one token per row.

A row's draw depends on that row alone. `draw`: one uniform number per row decides it by inverting
the cumulative distribution over the row's tokens in falling order of probability. Filters are
applied in the order temperature, min-p, top-k, top-p. `pick`, for logits split over ranks and rows
without filters: every token gets its own noise and the largest sum wins (the Gumbel-max trick: P(i
wins) is softmax(logits / T)[i]), so that ranks need to exchange a value and an index only.
`draw_leading`: what `draw` does, for split logits and rows with a small top_k, which need only the
leading tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.op import (
    AnyKernel,
    Case,
    Cost,
    Kernel,
    Op,
    num_bytes,
    randn,
    rounding_tolerance,
)
from negamax.kernels.peers import Collective
from negamax.kernels.sampling import noise
from negamax.kernels.signatures import DRAW, DRAW_LEADING, GREEDY, PICK

# Rows with 1 <= top_k <= CANDIDATES are drawn from this many leading tokens; all others from the
# sorted vocabulary.
CANDIDATES = 64


def greedy(logits: Tensor) -> Tensor:  # [R, V] fp32 -> [R] int64
    """The most likely token of each row."""
    return logits.argmax(dim=-1)


def sample(
    logits: Tensor,  # [R, V] fp32
    *,
    temperature: Tensor,  # [R] fp32, above 0
    top_k: Tensor,  # [R] fp32 holding integers; 0 is off
    top_p: Tensor,  # [R] fp32 in (0, 1]
    min_p: Tensor,  # [R] fp32 in [0, 1]
    uniforms: Tensor,  # [R] fp32 in [0, 1)
    candidates: int,  # tokens considered: at least every row's top_k, or V
) -> Tensor:  # [R] int64
    """Draw one token per row from the `candidates` most likely ones."""
    values, token_ids = torch.topk(logits, candidates, dim=-1)  # sorted, falling
    return draw_from(
        values,
        token_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniforms=uniforms,
    )


def draw_from(
    values: Tensor,  # [R, C] fp32, logits of the leading tokens in falling order
    token_ids: Tensor,  # [R, C] int64
    *,
    temperature: Tensor,  # [R] each, as in `sample`
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:  # [R] int64
    """Draw one token per row from the given ones."""
    candidates = values.shape[1]
    probs = torch.softmax(values / temperature.unsqueeze(-1), dim=-1)
    ranks = torch.arange(candidates, device=values.device)
    limit = torch.where(top_k > 0, top_k, float(candidates)).unsqueeze(-1)
    keep = (ranks < limit) & (probs >= min_p.unsqueeze(-1) * probs[:, :1])
    probs = probs * keep
    # top-p over what top-k and min-p left: keep a token while the mass before it is below top_p of
    # the total.
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    probs = probs * (cumulative - probs < top_p.unsqueeze(-1) * total)
    cumulative = probs.cumsum(dim=-1)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    chosen = (cumulative <= target).sum(dim=-1, keepdim=True)
    # Rounding may push the target onto the total: fall back to the last token that still has mass.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return token_ids.gather(1, torch.minimum(chosen, last).clamp_min_(0)).squeeze(1)


def pick(
    logits: Tensor,  # [R, V of this rank] fp32
    *,
    first_id: int,  # the token of the first column
    temperature: Tensor,  # [R] fp32; 0: the most likely token
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64
    group: Collective | None = None,  # the ranks that hold the vocabulary; None: this one alone
) -> Tensor:  # [R] int64
    """The token with the largest logit / T + Gumbel(seed, position, token), the lowest id of
    several; on every rank the same.

    -1 where a row's largest logit is not finite: it holds NaN or infinity, or nothing above minus
    infinity.
    """
    ids = first_id + torch.arange(logits.shape[1], device=logits.device)
    keys = noise.row_keys(seeds, positions)
    exponentials = noise.exponentials(
        noise.token_bits((keys[0].unsqueeze(1), keys[1].unsqueeze(1)), ids)
    )
    noisy = (logits / temperature.unsqueeze(1)).clamp_max(noise.LARGEST_SCORE) - exponentials.log()
    scores = torch.where(temperature.unsqueeze(1) > 0, noisy, logits)
    broken = logits.isnan() | (logits == torch.inf)
    scores = scores.masked_fill(broken, torch.inf)
    best = scores.max(dim=1).values  # [R]
    chosen = (
        torch.where(scores == best.unsqueeze(1), ids, torch.iinfo(torch.int64).max)
        .min(dim=1)
        .values
    )
    return best_of_ranks(best, chosen, group)


def best_of_ranks(best: Tensor, chosen: Tensor, group: Collective | None) -> Tensor:
    """The token of the rank with the largest score. best [R] fp32, chosen [R] int64: this rank's ->
    [R] int64.
    """
    if group is not None and group.size > 1:
        scores = group.all_gather(best.unsqueeze(1), dim=1)  # [R, ranks]
        ids = group.all_gather(chosen.unsqueeze(1), dim=1)
        best = scores.max(dim=1).values
        chosen = (
            torch.where(scores == best.unsqueeze(1), ids, torch.iinfo(torch.int64).max)
            .min(dim=1)
            .values
        )
    return torch.where(best.isfinite(), chosen, -1)


def draw_leading(
    logits: Tensor,  # [R, V of this rank] fp32
    *,
    first_id: int,  # the token of the first column
    filters: Tensor,  # [R, 4] fp32: temperature, top_k, top_p, min_p
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64
    otherwise: Tensor,  # [R] int64
    group: Collective | None = None,  # the ranks that hold the vocabulary; None: this one alone
) -> Tensor:  # [R] int64
    """The token drawn for each row with 1 <= top_k <= CANDIDATES and a temperature, on every rank
    the same; for the other rows `otherwise`. Of equal logits the lower ids count as larger. -1
    where a row holds NaN or infinity, or nothing above minus infinity.
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
    temperature, top_k, top_p, min_p = filters.unbind(1)
    drawn = draw_from(
        values,
        ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniforms=noise.uniforms(seeds, positions),
    )
    drawn = drawn.where(values[:, 0].isfinite(), -1)
    return drawn.where((temperature > 0) & (top_k >= 1) & (top_k <= CANDIDATES), otherwise)


def apply_penalties(
    logits: Tensor,  # [V] fp32, changed in place
    prompt_ids: Tensor,  # [P] int64
    output_ids: Tensor,  # [O] int64, -1: none
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Repetition penalty over prompt and output (divide positive, multiply negative logits), then
    OpenAI's frequency (per occurrence) and presence (once) penalties over the output."""
    # written so that a GPU's host waits for nothing
    counts = torch.zeros_like(logits).index_add_(
        0, output_ids.clamp_min(0), (output_ids >= 0).to(logits.dtype)
    )
    if repetition != 1.0:
        seen = (counts > 0).index_fill_(0, prompt_ids, True)
        logits.copy_(
            torch.where(
                seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
            )
        )
    if frequency or presence:
        logits -= frequency * counts + presence * (counts > 0)


def token_logprobs(
    logprobs: Tensor,  # [R, V] fp32, log-softmax of the model's own logits
    token_ids: Tensor,  # [R] int64
    *,
    num_top: int,
    # [R] fp32, [R] int64, [R, num_top] int64, [R, num_top] fp32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank (1 = most likely) of `token_ids`, and the `num_top` most likely
    tokens of each row.
    """
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = torch.topk(logprobs, num_top, dim=-1)
    return chosen.squeeze(1), ranks, ids, values


def _greedy_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    sizes = ((0, 16), (1, 4160), (9, 331))
    return [
        Case(
            f"R={rows} V={vocab}",
            {"logits": randn(rows, vocab, dtype=torch.float32, generator=generator, scale=3.0)},
        )
        for rows, vocab in sizes
    ]


def _draw_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for rows, vocab, candidates, top_k in ((1, 4160, 64, 40), (7, 331, 331, 0), (16, 100, 64, 1)):
        tensors = {
            "logits": randn(rows, vocab, dtype=torch.float32, generator=generator, scale=3.0),
            "temperature": 0.5 + torch.rand(rows, generator=generator),
            "top_k": torch.full((rows,), float(top_k)),
            "top_p": 0.5 + 0.5 * torch.rand(rows, generator=generator),
            "min_p": 0.1 * torch.rand(rows, generator=generator),
            "uniforms": torch.rand(rows, generator=generator),
        }
        cases.append(Case(f"R={rows} V={vocab} top_k={top_k}", tensors, {"candidates": candidates}))
    return cases


def _pick_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = [
        _pick_case(rows, vocab, generator)
        for rows, vocab in ((0, 16), (1, 4160), (9, 331), (5, 2048))
    ]
    broken = _pick_case(6, 300, generator)
    logits = broken.tensors["logits"]
    logits[0, 7], logits[1, 299], logits[2], logits[3, :299] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    logits[4, 5] = logits[4, 250] = 50.0
    broken.tensors["temperature"][4] = 0.0
    return [*cases, Case("NaN, infinities, a tie", broken.tensors, broken.numbers)]


def _pick_wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """MiniMax-M2's vocabulary on one, two and four ranks."""
    return [
        _pick_case(rows, 200_064 // ranks, generator)
        for ranks in (1, 2, 4)
        for rows in (1, 16, 100)
    ]


def _pick_case(rows: int, vocab: int, generator: torch.Generator) -> Case:
    device = generator.device
    temperature = 0.5 + torch.rand(rows, generator=generator, device=device)
    temperature[1::3] = 0.0
    tensors = {
        "logits": torch.randn(rows, vocab, generator=generator, device=device) * 3.0,
        "temperature": temperature,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, device=device),
        "positions": torch.randint(0, 200_000, (rows,), generator=generator, device=device),
    }
    return Case(f"R={rows} V={vocab}", tensors, {"first_id": 1000, "group": None})


def _leading_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = [
        _leading_case(rows, vocab, generator=generator)
        for rows, vocab in ((0, 100), (1, 700), (3, 331), (7, 64), (2, 20))
    ]
    broken = _leading_case(4, 300, generator=generator)
    logits = broken.tensors["logits"]
    logits[0, 7], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 20:90] = 50.0
    broken.tensors["filters"][:, 1] = 40
    return [*cases, Case("NaN, infinities, ties", broken.tensors, broken.numbers)]


def _leading_wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _leading_case(rows, 200_064 // ranks, generator=generator)
        for ranks in (1, 4)
        for rows in (1, 16, 100)
    ]


def _leading_case(rows: int, vocab: int, *, generator: torch.Generator) -> Case:
    """Every third row is not to be drawn: it is greedy, has no top_k, or one that is too large."""
    device = generator.device

    def uniform() -> Tensor:
        return torch.rand(rows, generator=generator, device=device)

    top_k = torch.randint(1, CANDIDATES + 1, (rows,), generator=generator, device=device).float()
    filters = torch.stack((0.5 + uniform(), top_k, 0.5 + 0.5 * uniform(), 0.1 * uniform()), dim=1)
    filters[2::9, 0], filters[5::9, 1], filters[8::9, 1] = 0.0, 0.0, CANDIDATES + 1
    tensors = {
        "logits": torch.randn(rows, vocab, generator=generator, device=device) * 3.0,
        "filters": filters,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, device=device),
        "positions": torch.randint(0, 200_000, (rows,), generator=generator, device=device),
        "otherwise": torch.arange(rows, device=device),
    }
    return Case(f"R={rows} V={vocab}", tensors, {"first_id": 500, "group": None})


def _apply_pick(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(**case.tensors, **case.numbers),)


def _apply_greedy(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(case.tensors["logits"]),)


def _apply_draw(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    filters = {name: tensor for name, tensor in case.tensors.items() if name != "logits"}
    return (kernel.run(case.tensors["logits"], **filters, **case.numbers),)


def _cost(case: Case) -> Cost:
    logits = case.tensors["logits"]
    return Cost(num_bytes=num_bytes(logits), flops=logits.numel())


_NEAR_TIES = 1e-6  # no rounding to speak of, but tokens that all but tie may change places
_EXACT = rounding_tolerance(scale=0.0, reason="a token is right or wrong")

OPS = (
    Op(
        name=GREEDY,
        summary="the most likely token of each row",
        reference=Kernel(GREEDY, "reference", greedy),
        cases=_greedy_cases,
        apply=_apply_greedy,
        tolerance=_EXACT,
        cost=_cost,
    ),
    Op(
        name=DRAW,
        summary="one token per row from what temperature, min-p, top-k and top-p leave",
        reference=Kernel(DRAW, "reference", sample),
        cases=_draw_cases,
        apply=_apply_draw,
        tolerance=_EXACT,
        cost=_cost,
    ),
    Op(
        name=PICK,
        summary="one token per row by logit / T + Gumbel noise, over all ranks",
        reference=Kernel(PICK, "reference", pick),
        cases=_pick_cases,
        apply=_apply_pick,
        tolerance=_EXACT,
        cost=_cost,
        wide=_pick_wide,
        wide_error=_NEAR_TIES,
    ),
    Op(
        name=DRAW_LEADING,
        summary="sampling.draw from logits split over ranks, for rows with a small top_k",
        reference=Kernel(DRAW_LEADING, "reference", draw_leading),
        cases=_leading_cases,
        apply=_apply_pick,
        tolerance=_EXACT,
        cost=_cost,
        wide=_leading_wide,
        wide_error=_NEAR_TIES,
    ),
)
