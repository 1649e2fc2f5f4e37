import random
from contextlib import nullcontext
from typing import Any

import graph_support
import pytest
from graph_support import RepeatedSteps

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core.loop import EngineLoop
from negamax.engine.grammar import manager
from negamax.scheduler import scheduler
from negamax.scheduler.draft_length import FixedDraftLength
from negamax.scheduler.step import SequenceUpdate
from negamax.worker import batch, device, eager_steps, graphs, request_state, runner, step, worker
from negamax.worker.eagle3 import Eagle3Proposer
from tests import drafts
from tests.drafts import ACCEPTED, RANDOM, REJECTED
from tests.layouts import full

LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
LETTERS = Grammar(kind="regex", text="[a-z ]{9}")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, **LONG},
    {"temperature": 1.0, **LONG},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, **LONG},
    {"temperature": 0.9, "min_p": 0.05, "logprobs": 2, **LONG},
    {"temperature": 0.0, "frequency_penalty": 0.7, "prompt_logprobs": 1, **LONG},
    {"temperature": 1.0, "max_tokens": 20, "grammar": LETTERS},
    {"temperature": 1.0, "max_tokens": 2, "ignore_eos": True},
    {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True},  # context limit
)
PARAMS = [SamplingParams(seed=seed, **kind) for seed, kind in enumerate(KINDS)]
SHORT = [
    SamplingParams(seed=seed, **kind | {"max_tokens": min(10, kind["max_tokens"])})
    for seed, kind in enumerate(KINDS)
]
PROMPTS = [[5 + seed, *range(20 + seed, 20 + 4 * seed)] for seed in range(len(PARAMS))]
FEW_GRAPHS = "chunks and uncaptured rows"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {"num_kv_blocks": 30},
    FEW_GRAPHS: {
        "max_num_batched_tokens": 23, "max_num_seqs": 5, "max_cudagraph_capture_size": 3,
    },
}  # fmt: skip


def engine(**options: Any) -> LLM:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": 64, "block_size": 4}
    return LLM("nano", device="cpu", num_threads=1, **sizes | options)


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    found = []
    for one in llm.generate(PROMPTS, params):
        output = one.outputs[0]
        scored = (*(output.logprobs or ()), *(one.prompt_logprobs or ()))
        logprobs = [entry.logprob for entry in scored]
        found.append((output.token_ids, output.finish_reason, logprobs))
    return found


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps wait for grammars, so that the number of steps does not depend on time."""
    step = EngineLoop.step

    def waiting(self: EngineLoop) -> list[SequenceUpdate]:
        while self._grammars.opening_ids():
            self._grammars.wait(0.01)
            self._add_opened()
        return step(self)

    monkeypatch.setattr(EngineLoop, "step", waiting)
    for name in ("GRACE_SECONDS", "ALONE_SECONDS"):
        monkeypatch.setattr(manager, name, 60.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    "options", [OPTIONS[FEW_GRAPHS], full({"num_kv_blocks": 18})], ids=["few graphs", "preempted"]
)
def test_captures_equal_eager(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RepeatedSteps()
    graph_support.install(monkeypatch, graph_support.runtime(pool))
    found, steps = [], []
    for enforce_eager in (True, False):
        with engine(enforce_eager=enforce_eager, **options) as llm:
            found.append(answers(llm, SHORT))
            stats = llm.stats()
        assert (pool.num_graphs == 0) == enforce_eager
        assert stats.preemption_count > 0 or "num_kv_blocks" not in options
        steps.append(stats.step_count)
    assert found[0] == found[1]
    assert steps[0] == steps[1] <= pool.num_replays


def test_steps_before_the_first_request_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_support.install(monkeypatch, graph_support.runtime(RepeatedSteps()))
    options: dict[str, Any] = {
        "max_num_seqs": 3, "max_num_batched_tokens": 20,
        "expert_distribution_recorder_mode": "stat",
        "speculative_config": {"method": "eagle3", "model": "nano-draft"},
    }  # fmt: skip
    counts: list[int] = []

    def launch(*args: Any, **named: Any) -> None:
        propose = Eagle3Proposer.propose

        def counting(*those: Any) -> Any:
            counts.append(len(those[2].slots))
            return propose(*those)

        with monkeypatch.context() as patch:
            patch.setattr(eager_steps, "warming_up", lambda _context, **_options: nullcontext())
            patch.setattr(Eagle3Proposer, "propose", counting)
            eager_steps.compile_eager_steps(*args, **named)

    def texts() -> list[list[int]]:
        with engine(**options) as llm:
            found = llm.generate(PROMPTS[:3], SHORT[:3])
            return [output.token_ids for one in found for output in one.outputs]

    expected = texts()
    monkeypatch.setattr(runner, "compile_eager_steps", launch)
    assert texts() == expected
    assert max(counts) == 3 and min(counts) == 1


class AnyDraftLength(FixedDraftLength):
    def __init__(self, num_tokens: int) -> None:
        self._most, self._rng = num_tokens, random.Random(3)

    def choose(self, num_rows: int) -> int:
        return self._rng.choice((0, 1, 2, self._most, self._most))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RepeatedSteps:
    return graph_support.capture(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the tokens of an engine without graphs.

    Chunks and decodes round log-probabilities differently; with AMX the difference was 1.8e-3.
    """
    with pytest.MonkeyPatch.context() as patch:
        graph_support.capture(patch)
        with engine() as llm:
            found = answers(llm)
    return [(ids, end, pytest.approx(logprobs, abs=3e-3)) for ids, end, logprobs in found]


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ACCEPTED, "plain"),
        full(RANDOM, "preempted"),
        full(REJECTED, "plain"),
        full(RANDOM, "plain"),
        full(RANDOM, FEW_GRAPHS),
    ],
)
def test_captured_drafts_change_nothing(
    kind: str, options: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[graphs.StepShape] = set()
    replay = graphs.StepGraphs.replay

    def noting(self: graphs.StepGraphs, shape: graphs.StepShape) -> graphs.StepBuffers:
        shapes.add(shape)
        return replay(self, shape)

    monkeypatch.setattr(graphs.StepGraphs, "replay", noting)
    monkeypatch.setattr(scheduler, "FixedDraftLength", AnyDraftLength)
    monkeypatch.setattr(runner, "draft_lengths", lambda *_: (1, 3))
    outputs = drafts.outputs_of(PARAMS, PROMPTS, [answer[0] for answer in expected])
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(kind, outputs))
    with engine(**OPTIONS[options]) as llm:
        assert answers(llm) == expected
        stats = llm.stats()
    assert {shape.num_drafts for shape in shapes if shape.is_sampled} == {0, 1, 3}
    assert options != "preempted" or stats.preemption_count > 0
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    assert rate == 0.0 if kind == REJECTED else rate > (0.9 if kind == ACCEPTED else 0.2)


def test_step_is_one_launch_and_copy(pool: RepeatedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check rows that do not sample from all logits; such rows would need more launches."""
    params = [
        SamplingParams(seed=seed, temperature=1.0, top_p=1.0, top_k=5 * seed, **LONG)
        for seed in (0, 1)
    ]
    prompts = PROMPTS[:2]
    with engine() as llm:
        outputs = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    outcomes = drafts.outputs_of(params, prompts, outputs)
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(RANDOM, outcomes))
    counts: list[tuple[int, int]] = []
    num_copies = 0

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal num_copies
        num_copies += 1
        return upload(*args, **options)

    def launch(self: worker.Worker, plan: Any, *args: Any) -> Any:
        nonlocal num_copies
        num_copies, before = 0, pool.num_replays
        output = launched(self, plan, *args)
        if not plan.new_rows and not plan.appended_slots:
            counts.append((pool.num_replays - before, num_copies))
        return output

    launched, upload = worker.Worker.launch, device.upload
    monkeypatch.setattr(worker.Worker, "launch", launch)
    for module in (batch, device, graphs, request_state, step):
        monkeypatch.setattr(module, "upload", counting)
    with engine(block_size=64) as llm:
        again = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert again == outputs
    assert len(counts) > 5 and set(counts) == {(1, 1)}
