import torch

from negamax.kernels.platform import platform_of
from negamax.kernels.registry import OPS, KernelTable
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow
from negamax.worker.request_state import RequestState

VOCAB = 500
CPU = torch.device("cpu")
REFERENCES = KernelTable.of(
    (op.reference for op in OPS.values()), platform=platform_of(CPU), dtype=torch.bfloat16
)


def rows_of(kinds: tuple[dict[str, object], ...]) -> RequestState:
    rows = RequestState(len(kinds), 64, max_blocks=4, eos_token_ids=(1,), device=CPU)
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 5,
    }
    for slot, kind in enumerate(kinds):
        rows._assign(
            NewRow(
                slot, [7, 8, 9, 9], 3, 0, [0], SamplingParams(**(defaults | {"seed": slot} | kind))
            )
        )
    return rows
