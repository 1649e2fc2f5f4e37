import torch

from negamax.kernels.platform import platform_of
from negamax.kernels.registry import OPS, KernelTable
from negamax.parallel.collectives import SingleRank
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow
from negamax.worker.batch import sample_inputs
from negamax.worker.grammar_bitmask import RowBitmasks
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import Sampled, Sampler

VOCAB = 500
CPU = torch.device("cpu")
REFERENCES = KernelTable.of(
    (op.reference for op in OPS.values()), platform=platform_of(CPU), dtype=torch.bfloat16
)
DEFAULTS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "max_tokens": 9,
}  # fmt: skip
GREEDY = SamplingParams(**(DEFAULTS | {"temperature": 0.0, "seed": 0}))


def rows_of(kinds: tuple[dict[str, object], ...]) -> RequestState:
    rows = RequestState(len(kinds), 64, max_blocks=4, eos_token_ids=(1,), device=CPU)
    for slot, kind in enumerate(kinds):
        params = SamplingParams(**(DEFAULTS | {"seed": slot} | kind))
        rows._assign(NewRow(slot, [7, 8, 9, 9], 3, 0, [0], params))
    return rows


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(
    logits: torch.Tensor, rows: RequestState, masks: RowBitmasks | None = None, *, on_shards: bool
) -> Sampled:
    inputs = sample_inputs(list(range(len(logits))), [4] * len(logits), rows)
    sampler = Sampler(rows, kernels=REFERENCES, group=SingleRank(), on_shards=on_shards)
    return sampler(logits.clone(), inputs, masks=masks)
