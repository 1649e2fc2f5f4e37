"""Cases of dispatch and combine, on a group of one rank that holds some of the experts.

Tests in tests/gpu and tests/dist run several ranks.
"""

from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import GROUP
from negamax.kernels.dispatch.op import COMBINE, DISPATCH, ExpertRanges
from negamax.kernels.op import AnyKernel
from negamax.kernels.peers import PeerMemory, PeerRegion
from tests.kernel_cases.case import Case, Cost, num_bytes, randn, tabled

HELD = range(3, 7)  # experts of the one rank


class OneRank:
    size, rank = 1, 0

    def __init__(self, device: torch.device, *, rows: int, words: int) -> None:
        memory = torch.zeros(2, 2, rows, words, dtype=torch.int64, device=device)
        control = torch.zeros(3, dtype=torch.int64, device=device)
        control[1] = 1 << 60  # The wait never times out.
        tokens, sums = (
            PeerRegion(
                torch.tensor([copy.data_ptr(), control.data_ptr()], device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
                rows,
                words,
            )
            for copy in memory
        )
        self.peers: PeerMemory | None = PeerMemory(
            0, 1, reduce=sums, stats=sums, pick=sums, tokens=tokens, owner=(memory, control)
        )

    def all_reduce(self, tensor: Tensor, **_options: int) -> Tensor:
        return tensor

    all_gather = reduce_scatter = all_reduce


def _case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    num_rows: int,
    width: int,
    top_k: int,
) -> Case:
    """Make a case in which the rank holds `HELD` of ten experts.

    Some tokens select none of these experts, and one token selects no expert.
    """
    device = generator.device
    ids = torch.rand(num_tokens, 10, generator=generator, device=device).argsort(1)
    ids = ids[:, :top_k].to(torch.int32)
    if num_tokens > 2:
        ids[1] = -1
        ids[2, ids[2].ge(HELD.start) & ids[2].lt(HELD.stop)] = 0
    parts = (num_rows, 2, width)
    values = torch.randn(num_tokens, width, generator=generator, device=device)
    tensors = {
        "ids": ids,
        "weights": torch.rand(num_tokens, top_k, generator=generator, device=device),
        "x": randn(num_tokens, width, dtype=dtype, generator=generator),
        "q": values.to(torch.float8_e4m3fn).view(torch.uint8),
        "scale": torch.rand(num_tokens, width // GROUP, generator=generator, device=device),
        "out": randn(*parts, dtype=dtype, generator=generator),
    }
    label = f"{num_tokens} tokens in {num_rows} rows of {width} top_k={top_k} {dtype}"
    return Case(label, tensors, {"num_rows": num_rows})


def _meet(case: Case) -> dict[str, Any]:
    device, rows = case.tensors["ids"].device, case.numbers["num_rows"]
    firsts = torch.tensor([HELD.start], dtype=torch.int32, device=device)
    group = OneRank(device, rows=rows, words=2 * case.tensors["x"].shape[1])
    return {"experts": ExpertRanges(firsts, len(HELD)), "group": group}


def _padded_ids(case: Case) -> Tensor:
    ids, rows = case.tensors["ids"], case.numbers["num_rows"]
    return torch.cat((ids, ids.new_full((rows - len(ids), ids.shape[1]), -1)))


def _are_held(ids: Tensor) -> Tensor:
    return (ids.ge(HELD.start) & ids.lt(HELD.stop)).any(1, keepdim=True)


def apply_dispatch(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t, num_rows = case.tensors, case.numbers["num_rows"]
    meeting = _meet(case)
    for columns in ([t["weights"], t["x"]], [t["weights"], t["q"], t["scale"], t["x"]]):
        ids, received = kernel.run(t["ids"], columns, num_rows=num_rows, **meeting)
    return ids, *(column.masked_fill(~_are_held(ids), 0) for column in received)


def apply_combine(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    ids = _padded_ids(case)
    out = case.tensors["out"] * _are_held(ids).unsqueeze(-1)
    meeting = _meet(case)
    return tuple(kernel.run(each, ids, **meeting) for each in (out, out[:, 0].contiguous()))


def cost_dispatch(case: Case) -> Cost:
    sent = [case.tensors[name] for name in ("ids", "weights", "x", "q", "scale")]
    return Cost(num_bytes=2 * num_bytes(*sent), flops=0)


def cost_combine(case: Case) -> Cost:
    out = case.tensors["out"]
    return Cost(num_bytes=num_bytes(out) * 3 // 2, flops=out.numel())


# tokens, rows, width, top-k
_SMALL = ((1, 1, 128, 4), (5, 7, 256, 8), (3, 3, 384, 5))
_WIDE = [(n, n, *sizes) for sizes in ((3072, 8), (6144, 4)) for n in (1, 16, 128)]
CASES = {
    DISPATCH: tabled(_case, _SMALL, apply_dispatch, cost_dispatch, _WIDE),
    COMBINE: tabled(_case, _SMALL, apply_combine, cost_combine, _WIDE),
}
