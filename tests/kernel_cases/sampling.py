from functools import partial

import torch
from torch import Tensor

from negamax.kernels.op import AnyKernel
from negamax.kernels.sampling.op import CANDIDATES, DRAW_LEADING, PICK, RowSampling
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn, table


def pick_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    sizes = ((0, 16), (1, 4160), (9, 331), (5, 2048))
    broken = _pick_case(dtype, generator, 6, 300, "NaN, infinities, a tie")
    logits = broken.tensors["logits"]
    logits[0, 7], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :299] = -torch.inf
    logits[4, 5] = logits[4, 250] = 50.0
    broken.tensors["filters"][broken.tensors["slots"][4], 0] = 0.0
    tie = _pick_case(dtype, generator, 2, 4500, "a tie of two tiles")
    tie.tensors["logits"] = logits = _inside_longer_rows(tie.tensors["logits"])
    logits[1, 4200] = logits[1, 4400] = logits[1, 30] = 50.0
    return [*table(_pick_case, sizes)(dtype, generator), broken, tie]


def _pick_case(
    _dtype: torch.dtype, generator: torch.Generator, rows: int, vocab: int, label: str = ""
) -> Case:
    tensors = _rows(rows, vocab, generator)
    tensors["filters"] = 0.5 + torch.rand(rows + 2, 4, generator=generator, device=generator.device)
    tensors["filters"][1::3, 0] = 0.0
    return Case(label or f"R={rows} V={vocab}", tensors, {"first_id": 1000, "group": None})


def leading_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    sizes = ((0, 100), (1, 700), (3, 331), (7, 64), (2, 20))
    broken = _leading_case(dtype, generator, 4, 300, "NaN, infinities, ties")
    logits = broken.tensors["logits"]
    logits[0, 7], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 20:90] = 50.0
    broken.tensors["filters"][:, 1] = 40
    ties = _leading_case(dtype, generator, 8, 300, "ties at top_k")
    ties.tensors["logits"] = _inside_longer_rows(ties.tensors["logits"])
    ties.tensors["logits"][:, [3, 100, 290]] = 50.0
    ties.tensors["filters"] = torch.tensor([[1.0, 2.0, 1.0, 0.0]]).repeat(10, 1)
    return [*table(_leading_case, sizes)(dtype, generator), broken, ties]


def _leading_case(
    _dtype: torch.dtype, generator: torch.Generator, rows: int, vocab: int, label: str = ""
) -> Case:
    """Make rows. Every third row is greedy, has no top_k, or has a top_k that is too large."""
    device, slots = generator.device, rows + 2
    uniform = partial(torch.rand, slots, generator=generator, device=device)
    top_k = torch.randint(1, CANDIDATES + 1, (slots,), generator=generator, device=device).float()
    filters = torch.stack((0.5 + uniform(), top_k, 0.5 + 0.5 * uniform(), 0.1 * uniform()), dim=1)
    filters[2::9, 0], filters[5::9, 1], filters[8::9, 1] = 0.0, 0.0, CANDIDATES + 1
    tensors = {
        **_rows(rows, vocab, generator),
        "filters": filters,
        "otherwise": torch.arange(rows, device=device),
    }
    return Case(label or f"R={rows} V={vocab}", tensors, {"first_id": 500, "group": None})


def _rows(rows: int, vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Make logits of some of `rows` + 2 slots, and the inputs of a row's random numbers."""
    device = generator.device
    draw = partial(torch.randint, generator=generator, device=device)
    return {
        "logits": randn(rows, vocab, dtype=torch.float32, generator=generator, scale=3.0),
        "seeds": draw(-(2**63), 2**63 - 1, (rows + 2,)),
        "slots": torch.randperm(rows + 2, generator=generator, device=device)[:rows],
        "positions": draw(0, 200_000, (rows,)),
    }


def _inside_longer_rows(logits: Tensor) -> Tensor:
    """Return the same logits inside longer rows that end in the largest values."""
    behind = logits.new_full((logits.shape[0], 100), 90.0)
    return torch.cat((logits, behind), dim=1)[:, : logits.shape[1]]


def apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    tensors = dict(case.tensors)
    logits = tensors.pop("logits")
    rows = RowSampling(*map(tensors.pop, RowSampling._fields))
    return (kernel.run(logits, rows, **tensors, **case.numbers),)


def cost(case: Case) -> Cost:
    logits = case.tensors["logits"]
    return Cost(num_bytes=num_bytes(logits), flops=logits.numel())


def _wide(*ranks: int) -> list[tuple[int, int]]:
    return [(rows, 200_064 // count) for count in ranks for rows in (1, 16, 100)]


CASES = {
    PICK: OpCases(pick_small, apply, cost, table(_pick_case, _wide(1, 2, 4))),
    DRAW_LEADING: OpCases(leading_small, apply, cost, table(_leading_case, _wide(1, 4))),
}
