from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import graph_support
import pytest

from negamax import LLM, SamplingParams
from negamax.worker.device import Runtime
from tests import tiny

ROWS = 6
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "num_threads": 1, "max_num_seqs": ROWS, "max_num_batched_tokens": 40,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    at: float = field(default_factory=time.perf_counter)

    def synchronize(self) -> None:
        """Do nothing: the event has passed."""

    def elapsed_time(self, other: Moment) -> float:
        return 1e3 * (other.at - self.at)


class Clocked(graph_support.Clockless):
    def record_event(self) -> Any:
        return Moment()


def test_steps_are_timed_and_answers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny.save(tiny.make_model(3, **tiny.small_sizes(vocab_size=97)), tmp_path))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7, 5, 6], [9, 9, 9]]

    def answers(llm: LLM) -> list[list[int]]:
        return [one.outputs[0].token_ids for one in llm.generate(prompts, params)]

    def run(runtime: Runtime, config: dict[str, Any] | None) -> tuple[list[list[int]], Any]:
        graph_support.install(monkeypatch, runtime)
        with LLM(folder, **OPTIONS | {"speculative_config": config}) as llm:
            return answers(llm), llm._loop.executor.ready.step_seconds

    clocked = graph_support.runtime(graph_support.RepeatedSteps(), kind=Clocked)
    expected, times = run(graph_support.runtime(graph_support.RepeatedSteps()), None)
    assert times == ()
    found, times = run(clocked, OPTIONS["speculative_config"])
    assert found == expected
    assert [(rows, drafts) for rows, drafts, _ in times] == [
        (rows, drafts) for drafts in (0, 1, 2, 3, 5) for rows in (1, 2, 4, 6)
    ]
    assert all(seconds > 0.0 for _, _, seconds in times)
    found, times = run(clocked, OPTIONS["speculative_config"] | {"adaptive": False})
    assert (found, times) == (expected, ())
