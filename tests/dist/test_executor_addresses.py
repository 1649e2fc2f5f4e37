import subprocess
from pathlib import Path
from typing import Any

import pytest

from negamax.base import supervision
from negamax.engine.core import executor
from negamax.engine.core.executor import MultiProcessExecutor
from negamax.models.registry import bundled_spec
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.step import StepPlan
from negamax.worker.config import RankAddresses, WorkerConfig
from tests.ports import free_port

SIZES: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16,
    "num_kv_blocks": 7, "kv_cache_memory": None, "gpu_memory_utilization": 0.9,
    "cudagraph_size": 0, "num_threads": 1, "seed": 0,
}  # fmt: skip


def tcp(count: int) -> tuple[str, ...]:
    return tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(count))


def plan(step_id: int, slot: int) -> StepPlan:
    return StepPlan(step_id, [], [], [], [slot], [1], [0], [True])


@pytest.mark.parametrize("local", [True, False])
def test_plans_reach_the_ranks_of_their_replica(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    spawn = supervision.spawn

    def recording(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "echo", *args)

    monkeypatch.setattr(supervision, "spawn", recording)
    monkeypatch.setattr(executor, "SHUTDOWN_SECONDS", 120.0)
    config = WorkerConfig(
        bundled_spec("minimax-m2"), (1,), None, layout, "cpu", "float32", "auto", **SIZES,
        show_progress=False, addresses=None,
    )  # fmt: skip
    addresses = None
    if not local:
        addresses = RankAddresses(tcp(4), tcp(2), str(tmp_path / "meet"), str(tmp_path / "beats"))
    ranks = MultiProcessExecutor(config, addresses)
    try:
        first = ranks.launch([plan(1, 10), plan(1, 11)])
        second = ranks.launch([plan(2, 20), plan(2, 21)])
        for step, handle in ((1, first), (2, second)):
            results = handle.results()
            assert [result.step_id for result in results] == [step, step]
            # the first rank of each replica answers with its plan
            assert [result.token_ids for result in results] == [
                [0, 0, 10 * step],
                [1, 0, 10 * step + 1],
            ]
    finally:
        ranks.shutdown()
    assert [child.exit_code for child in ranks._processes] == [0] * 4
