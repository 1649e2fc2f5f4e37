"""Run variants of rank processes: `python -m tests.dist.ranks KIND ENDPOINT RANK [MORE]`."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from negamax.scheduler.step import StepPlan, StepResult
from negamax.worker import rank_process
from negamax.worker.config import WorkerConfig, WorkerReady


def run_captured(endpoint: str, rank: int) -> int:
    """Run a rank with captured steps. Return 3 if the rank replays no step."""
    import pytest

    from tests.cpu import graph_support

    pool, patch = graph_support.RepeatedSteps(), pytest.MonkeyPatch()
    graph_support.install(patch, graph_support.runtime(pool, is_asynchronous=True))
    graph_support.watch_reads(patch)
    code = rank_process.main(endpoint, rank)
    return code if pool.num_replays else 3


def run_counting(endpoint: str, rank: int) -> int:
    """Run a rank that writes the number of tokens of each step into the folder COUNTED_TOKENS."""
    from negamax.models.decoder import Decoder

    forward, counts = Decoder.forward, list[int]()

    def counted(self: Decoder, token_ids: Any, *args: Any, **options: Any) -> Any:
        counts.append(len(token_ids))
        return forward(self, token_ids, *args, **options)

    Decoder.forward = counted  # type: ignore[method-assign]
    code = rank_process.main(endpoint, rank)
    Path(os.environ["COUNTED_TOKENS"], str(rank)).write_text(" ".join(map(str, counts)))
    return code


def run_recording_drafts(endpoint: str, rank: int, folder: str) -> int:
    """Run a rank that records its draft tokens in `folder`, one file per rank."""
    from tests import tiny_draft

    seen = tiny_draft.watch(setattr)
    code = rank_process.main(endpoint, rank)
    Path(folder, f"rank{rank}").write_text(json.dumps(seen))
    return code


def run_with_drafts(endpoint: str, rank: int, file: str) -> int:
    """Run a rank that proposes drafts from the texts in `file` (`tests.drafts`)."""
    from tests import drafts

    known = json.loads(Path(file).read_text())
    outputs = {(seed, tuple(prompt)): tokens for seed, prompt, tokens in known}
    drafts.install(setattr, drafts.ScriptedProposer(drafts.RANDOM, outputs))
    return rank_process.main(endpoint, rank)


def run_with_wrong_slice(endpoint: str, rank: int) -> int:
    """Run a rank that loads the first rank's part of a K norm if it is the second rank."""
    from negamax.models.decoder import Decoder
    from negamax.worker import runner

    load_model = runner.load_model

    def load(model: Decoder, *args: Any, **options: Any) -> str:
        slot = model.weight_slots()["model.layers.0.self_attn.k_norm.weight"]
        slot.region = (range(len(slot.region[0])),)
        return load_model(model, *args, **options)

    setattr(runner, "load_model", load)  # noqa: B010  (mypy refuses an assignment)
    return rank_process.main(endpoint, rank)


def run_faulty(endpoint: str, rank: int) -> int:
    from tests import row_faults

    row_faults.install(rank, setattr)
    return rank_process.main(endpoint, rank)


def run_foreign(endpoint: str, rank: int) -> int:
    sys.path.append(str(Path(__file__).parents[1] / "cpu"))
    from foreign_family.config import FAMILY

    from negamax.models.registry import FAMILIES

    FAMILIES[FAMILY.architecture] = FAMILY
    return rank_process.main(endpoint, rank)


class EchoWorker:
    poll_control = None

    def __init__(self, config: WorkerConfig) -> None:
        self._layout = config.layout
        self.ready = WorkerReady(7, "float32", "cpu", "", "")

    def launch(self, plan: StepPlan, wait_for_bitmask: Any) -> StepResult:
        ranks = [self._layout.dp_rank, self._layout.tp_rank]
        return StepResult(plan.step_id, [*ranks, *plan.slots], {}, {}, {})

    def take_row_failures(self) -> dict[int, str]:
        return {}

    def take_file_progress(self, output: StepResult) -> None:
        pass

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_echo(endpoint: str, rank: int) -> int:
    # The real module would import torch.
    sys.modules["negamax.worker.worker"] = SimpleNamespace(Worker=EchoWorker)  # type: ignore[assignment]
    return rank_process.main(endpoint, rank)


KINDS = {
    "captured": run_captured, "counting": run_counting, "recording drafts": run_recording_drafts,
    "with drafts": run_with_drafts, "faulty": run_faulty, "foreign": run_foreign, "echo": run_echo,
    "wrong slice": run_with_wrong_slice,
}  # fmt: skip

if __name__ == "__main__":
    kind, endpoint, rank, *more = sys.argv[1:]
    sys.exit(KINDS[kind](endpoint, int(rank), *more))
