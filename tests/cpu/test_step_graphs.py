from contextlib import nullcontext
from typing import Any

import graph_support
import pytest
from graph_support import RepeatedSteps

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core.loop import EngineLoop
from negamax.engine.grammar import manager
from negamax.scheduler.step import SequenceUpdate
from negamax.worker import eager_steps, runner
from negamax.worker.eagle3 import Eagle3Proposer
from tests.layouts import full

LONG: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
PARAMS = [
    SamplingParams(seed=seed, **params)
    for seed, params in enumerate(
        (
            {"temperature": 0.0, **LONG},
            {"temperature": 1.0, **LONG},
            {"temperature": 1.0, "top_k": 5, "top_p": 0.9, **LONG},
            {"temperature": 0.8, "min_p": 0.05, "logprobs": 2, **LONG},
            {"temperature": 0.0, "frequency_penalty": 0.7, "prompt_logprobs": 1, **LONG},
            {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True},
            {"temperature": 1.0, "max_tokens": 9, "grammar": Grammar(kind="regex", text="[a-z]*")},
            {"temperature": 1.0, "top_k": 3, "max_tokens": 5, "ignore_eos": True},
        )
    )
]
PROMPTS = [[5 + seed, *range(20 + seed, 20 + 7 * seed)] for seed in range(len(PARAMS))]
OPTIONS: dict[str, dict[str, Any]] = {
    "preempted": {"num_kv_blocks": 18},
    "chunks and uncaptured rows": {
        "max_num_batched_tokens": 11,
        "max_num_seqs": 5,
        "max_cudagraph_capture_size": 3,
    },
}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RepeatedSteps:
    pool = RepeatedSteps()
    graph_support.install(monkeypatch, graph_support.runtime(pool))
    return pool


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps wait for grammars, so that their number does not depend on time."""
    step = EngineLoop.step

    def waiting(self: EngineLoop) -> list[SequenceUpdate]:
        while self._grammars.num_opening:
            self._grammars.wait(0.01)
            self._add_opened()
        return step(self)

    monkeypatch.setattr(EngineLoop, "step", waiting)
    for name in ("GRACE_SECONDS", "ALONE_SECONDS"):
        monkeypatch.setattr(manager, name, 60.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("options", ["chunks and uncaptured rows", full("preempted")])
def test_captured_steps_give_what_eager_ones_give(options: str, pool: RepeatedSteps) -> None:
    def answers(*, enforce_eager: bool) -> list[Any]:
        chosen = {"max_num_seqs": 8, "max_num_batched_tokens": 96, **OPTIONS[options]}
        chosen |= {"device": "cpu", "num_threads": 1, "max_model_len": 64, "block_size": 4}
        with LLM("nano", enforce_eager=enforce_eager, **chosen) as llm:
            found = [
                (output.token_ids, output.finish_reason, output.logprobs, one.prompt_logprobs)
                for one in llm.generate(PROMPTS, PARAMS)
                for output in one.outputs
            ]
            stats = llm.stats()
            steps.append(stats.step_count)
            assert stats.preemption_count > 0 or options != "preempted"
            return found

    steps: list[int] = []
    expected = answers(enforce_eager=True)
    assert pool.num_graphs == 0
    assert answers(enforce_eager=False) == expected
    assert steps[0] == steps[1]
    assert pool.num_replays >= steps[1]


def test_steps_before_the_first_request_change_nothing(
    pool: RepeatedSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover the steps by which a GPU compiles its kernels."""
    options: dict[str, Any] = {
        "max_num_seqs": 3, "max_num_batched_tokens": 20, "max_model_len": 64, "block_size": 4,
        "expert_distribution_recorder_mode": "stat",
        "speculative_config": {"method": "eagle3", "model": "nano-draft"},
    }  # fmt: skip
    counts: list[int] = []

    def launch(*args: Any, **named: Any) -> None:
        propose = Eagle3Proposer.propose
        with monkeypatch.context() as patch:
            patch.setattr(eager_steps, "warming_up", lambda _context: nullcontext())
            patch.setattr(
                Eagle3Proposer,
                "propose",
                lambda *those: (counts.append(len(those[2].slots)), propose(*those))[1],
            )
            eager_steps.compile_eager_steps(*args, **named)

    def answers() -> list[list[int]]:
        with LLM("nano", device="cpu", num_threads=1, **options) as llm:
            found = llm.generate(PROMPTS[:3], PARAMS[:3])
            return [output.token_ids for one in found for output in one.outputs]

    expected = answers()
    monkeypatch.setattr(runner, "compile_eager_steps", launch)
    assert answers() == expected
    assert max(counts) == 3 and min(counts) == 1
