"""Sampling ops, defined in PyTorch: edits of logits, and the draw of one token per row.

A row's draw depends on that row alone: one uniform number per row decides it by inverting the cumulative distribution over
the row's tokens in falling order of probability. Filters are applied in the order temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance

# Rows with 1 <= top_k <= CANDIDATES are drawn from this many leading tokens; all others from the sorted vocabulary.
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
    probs = torch.softmax(values / temperature.unsqueeze(-1), dim=-1)
    ranks = torch.arange(candidates, device=logits.device)
    limit = torch.where(top_k > 0, top_k, float(candidates)).unsqueeze(-1)
    keep = (ranks < limit) & (probs >= min_p.unsqueeze(-1) * probs[:, :1])
    probs = probs * keep
    # top-p over what top-k and min-p left: keep a token while the mass before it is below top_p of the total.
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    probs = probs * (cumulative - probs < top_p.unsqueeze(-1) * total)
    cumulative = probs.cumsum(dim=-1)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    chosen = (cumulative <= target).sum(dim=-1, keepdim=True)
    # Rounding may push the target onto the total: fall back to the last token that still has mass.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return token_ids.gather(1, torch.minimum(chosen, last).clamp_min_(0)).squeeze(1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` only (the SplitMix64 finaliser, public domain, on their mix)."""
    mask = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


def apply_penalties(
    logits: Tensor,  # [V] fp32, changed in place
    prompt_ids: Tensor,  # [P] int64
    output_ids: Tensor,  # [O] int64
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    """Repetition penalty over prompt and output (divide positive, multiply negative logits), then OpenAI's frequency
    (per occurrence) and presence (once) penalties over the output."""
    if repetition != 1.0:
        seen = torch.cat((prompt_ids, output_ids)).unique()
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / repetition, scores * repetition)
    if frequency or presence:
        counts = torch.bincount(output_ids, minlength=logits.shape[0])
        logits -= frequency * counts + presence * (counts > 0)


def token_logprobs(
    logprobs: Tensor,  # [R, V] fp32, log-softmax of the model's own logits
    token_ids: Tensor,  # [R] int64
    *,
    num_top: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [R] fp32, [R] int64, [R, num_top] int64, [R, num_top] fp32
    """Log-probability and rank (1 = most likely) of `token_ids`, and the `num_top` most likely tokens of each row."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = torch.topk(logprobs, num_top, dim=-1)
    return chosen.squeeze(1), ranks, ids, values


def _greedy_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    sizes = ((0, 16), (1, 4160), (9, 331))
    return [
        Case(f"R={rows} V={vocab}", {"logits": randn(rows, vocab, dtype=torch.float32, generator=generator, scale=3.0)})
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


def _apply_greedy(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(case.tensors["logits"]),)


def _apply_draw(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    filters = {name: tensor for name, tensor in case.tensors.items() if name != "logits"}
    return (kernel.run(case.tensors["logits"], **filters, **case.numbers),)


def _cost(case: Case) -> Cost:
    logits = case.tensors["logits"]
    return Cost(num_bytes=num_bytes(logits), flops=logits.numel())


_EXACT = rounding_tolerance(scale=0.0, reason="a token is right or wrong")

OPS = (
    Op(
        name="sampling.greedy",
        summary="the most likely token of each row",
        reference=Kernel("sampling.greedy", "reference", greedy),
        cases=_greedy_cases,
        apply=_apply_greedy,
        tolerance=_EXACT,
        cost=_cost,
    ),
    Op(
        name="sampling.draw",
        summary="one token per row from what temperature, min-p, top-k and top-p leave",
        reference=Kernel("sampling.draw", "reference", sample),
        cases=_draw_cases,
        apply=_apply_draw,
        tolerance=_EXACT,
        cost=_cost,
    ),
)
