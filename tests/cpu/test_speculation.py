"""Draft tokens change the number of steps, but not texts, log-probabilities or caching."""

import time
from itertools import product
from pathlib import Path
from typing import Any

import graph_support
import msgspec
import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.kernels.drafts.op import count_accepted
from negamax.scheduler.draft_length import FixedDraftLength
from negamax.scheduler.step import StepPlan
from negamax.worker.synthetic_acceptance import SyntheticAcceptance
from tests import drafts, tiny
from tests.drafts import ACCEPTED, KINDS, NUM_DRAFT_TOKENS, RANDOM, REJECTED, Key
from tests.layouts import full
from tests.loop_driver import free_all, generate_tokens

LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(seed=seed, **params)
    for seed, params in enumerate(
        (
            {"temperature": 0.0, **LONG},
            {"temperature": 1.0, **LONG},
            {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 2, **LONG},
            {"temperature": 0.8, "min_p": 0.05, "prompt_logprobs": 1, **LONG},
            {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, **LONG},
            {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {7: 2.0}, **LONG},
            # The stop token often is inside a run of accepted draft tokens.
            {"temperature": 1.0, "stop_token_ids": tuple(range(20)), "max_tokens": 40},
            {"temperature": 1.0, "stop_token_ids": tuple(range(40)), "min_tokens": 9},
            {"temperature": 1.0, "max_tokens": 1},
            {"temperature": 0.0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True},
            {"temperature": 1.0, "max_tokens": 500, "ignore_eos": True},  # context limit
        )
    )
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 3},
    "preempted": {"num_kv_blocks": 44},
    "no overlap": {"enable_overlap": False},
}


def prompt(seed: int) -> list[int]:
    """Return prompt `seed`. Seeds of equal parity share a prefix, which later prompts find."""
    common = torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(seed % 2))
    own = torch.randint(3, 97, (seed % 7 + 1,), generator=torch.Generator().manual_seed(seed))
    return common.tolist() + own.tolist()


PROMPTS = [prompt(seed) for seed in range(len(PARAMS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(
        tiny.make_model(3, **tiny.small_sizes(vocab_size=97)), tmp_path_factory.mktemp("model")
    )


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="bfloat16", block_size=4, num_threads=1, **options)


def answers(llm: LLM) -> list[Any]:
    return [
        (one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, found.prompt_logprobs)
        for found in llm.generate(PROMPTS, PARAMS)
        for one in found.outputs
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with engine(folder) as llm:
        return answers(llm)


def by_request(answers: list[Any]) -> dict[Key, list[int]]:
    return drafts.outputs_of(PARAMS, PROMPTS, [answer[0] for answer in answers])


@pytest.fixture(scope="module")
def outputs(expected: list[Any]) -> dict[Key, list[int]]:
    return by_request(expected)


CASES = [(ACCEPTED, "plain"), (REJECTED, "chunks"), (RANDOM, "preempted"), (RANDOM, "no overlap")]
REST = [full(*case) for case in product(KINDS, OPTIONS) if case not in CASES]


@pytest.mark.parametrize(("kind", "options"), [*CASES, *REST])
def test_drafts_change_nothing_that_a_caller_sees(
    folder: Path,
    expected: list[Any],
    outputs: dict[Key, list[int]],
    kind: str,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(kind, outputs))
    with engine(folder, **OPTIONS[options]) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # The second run reads the prefix cache.
        free_all(llm)
        stats = llm.stats()
    assert stats.cached_prompt_tokens > 0
    assert options != "preempted" or stats.preemption_count > 0
    assert stats.num_drafts > 100
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert rate == 0.0 if kind == REJECTED else rate > (0.9 if kind == ACCEPTED else 0.2)
    assert kind != RANDOM or rate < 0.7


@pytest.mark.parametrize(
    ("has_graphs", "options"),
    [
        (True, "preempted"),
        (False, "chunks"),
        *(full(True, options) for options in ("plain", "chunks")),
        *(full(False, options) for options in ("plain", "preempted")),
    ],
)
def test_no_launch_waits_for_the_drafts_of_the_step_before(
    folder: Path, has_graphs: bool, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = graph_support.RepeatedSteps() if has_graphs else None
    graph_support.install(monkeypatch, graph_support.runtime(pool, is_asynchronous=True))
    reads = graph_support.watch_reads(monkeypatch)
    # No captured step is larger than all rows together.
    sizes = {"max_num_seqs": len(PROMPTS), "max_num_batched_tokens": sum(map(len, PROMPTS))}
    sizes |= OPTIONS[options]
    with engine(folder, **sizes) as llm:
        expected = answers(llm)
    assert reads == []
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(RANDOM, by_request(expected)))
    with engine(folder, **sizes) as llm:
        assert answers(llm) == expected
        requests = llm._loop.executor._worker.runner.requests  # type: ignore[attr-defined]
        assert llm.stats().num_accepted_tokens > 50
        assert options != "preempted" or llm.stats().preemption_count > 0
    # A step reads only the accepted count of two steps ago, which the host already has.
    assert len(reads) > 20 and {launch - made_by for launch, made_by in reads} == {2}
    bounds = torch.from_numpy(requests.num_computed_bound)
    assert (requests.num_computed <= bounds).all()
    assert (bounds - requests.num_computed <= 2 * NUM_DRAFT_TOKENS).all()


def test_a_prompt_whose_last_token_is_a_chunk_of_its_own(
    folder: Path, outputs: dict[Key, list[int]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    params = [SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)] * 2
    prompts = [PROMPTS[0][:2], PROMPTS[1][:12]]  # A step takes at most 13 tokens.
    found = []
    for options in ({}, {"max_num_batched_tokens": 13}):
        with engine(folder, **options) as llm:
            found.append(generate_tokens(llm, prompts, params))
        drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(RANDOM, outputs))
    assert found[0] == found[1]
    assert "failed" not in caplog.text


def test_accepted_drafts_take_fewer_steps(
    folder: Path, outputs: dict[Key, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    for kind in (REJECTED, ACCEPTED):
        drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(kind, outputs))
        with engine(folder) as llm:
            llm.generate([PROMPTS[0]], PARAMS[0])
            steps.append(llm.stats().step_count)
    assert steps[0] >= 40 and steps[1] <= 40 / (1 + NUM_DRAFT_TOKENS) + 4


def test_texts_end_where_they_do_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=40, logprobs=0)
    budget = SamplingParams(temperature=0.0, seed=0, max_tokens=30, thinking_token_budget=4)
    chat: Any = [[{"role": "user", "content": "What is 12 + 34? Think about it."}]]

    def answers(llm: LLM, stop: tuple[str, ...]) -> list[Any]:
        stream = llm.stream("Once upon", plain)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        return [
            *llm.generate(["Once upon"], plain),
            *llm.chat(chat, budget),
            *llm.generate(["Once upon"], msgspec.structs.replace(plain, stop=stop)),
        ]

    def describe(generations: list[Any]) -> list[Any]:
        return [
            (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
            for generation in generations
            for one in generation.outputs
        ]

    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 256}
    with LLM("nano", **options) as llm:
        first, second = llm.generate(["Once upon"], plain)[0].outputs
        stop = (first.text[9:13], second.text[20:25])
        expected = answers(llm, stop)
    assert [one.finish_reason for one in expected[2].outputs] == ["stop", "stop"]
    known: dict[Key, list[int]] = {
        (seed + index, tuple(generation.prompt_token_ids)): output.token_ids
        for generation, seed in zip(expected[:2], (5, 0), strict=True)
        for index, output in enumerate(generation.outputs)
    }
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(ACCEPTED, known))
    with LLM("nano", **options) as llm:
        assert describe(answers(llm, stop)) == describe(expected)
        free_all(llm)
        assert llm.stats().num_accepted_tokens > 50


def test_a_step_that_raises_is_repeated_row_by_row_with_its_drafts(
    folder: Path,
    expected: list[Any],
    outputs: dict[Key, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from negamax.models.decoder import Decoder

    forward, calls = Decoder.forward, []

    def failing(self: Decoder, token_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(len(token_ids))
        if len(calls) % 5 == 0:
            raise RuntimeError("once in a while")
        return forward(self, token_ids, *args, **options)

    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(RANDOM, outputs))
    monkeypatch.setattr(Decoder, "forward", failing)
    with engine(folder, max_num_seqs=3) as llm:
        tokens = generate_tokens(llm, PROMPTS[:2], PARAMS[:2])
    assert tokens == [answer[0] for answer in expected[:2]]


@pytest.mark.parametrize(
    ("sampled", "wanted"),
    [
        ([5, 6, 7, 8, 1, 9, 9], [3, 0, 1]),
        ([5, 6, 0, 8, 1, 9, 9], [2, 0, 1]),
        ([0, 6, 7, 8, 1, 2, 9], [0, 0, 0]),
        ([-1, -1, -1, -1, -1, -1, -1], [0, 0, 0]),  # Non-finite logits are no missing draft token.
    ],
)
def test_drafts_are_accepted_until_one_is_rejected(sampled: list[int], wanted: list[int]) -> None:
    proposed = torch.tensor([[5, 6, 7], [1, 1, 1], [9, -1, -1]])
    firsts, num_drafts = torch.tensor([0, 4, 5]), torch.tensor([3, 0, 1])
    accepted = count_accepted(torch.tensor(sampled), proposed, firsts, num_drafts)
    assert accepted.tolist() == wanted
    none, one = torch.tensor([[-1]]), torch.tensor([1])
    assert count_accepted(torch.tensor([-1, 4]), none, one - 1, one).tolist() == [0]


@pytest.mark.parametrize("of_gpu", [1e-6, 7.0])
def test_a_step_takes_as_long_as_the_slower_of_gpu_and_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of_gpu: float
) -> None:
    """If the host is slower than the GPU, drafts gain nothing."""
    taken: list[float] = []
    monkeypatch.setattr(
        FixedDraftLength, "record", lambda self, plan, result, seconds: taken.append(seconds)
    )
    drafts.install(monkeypatch.setattr, drafts.ScriptedProposer(RANDOM, {}))
    with engine(folder) as llm:
        executor = llm._loop.executor
        launch = executor.launch

        def launched(plans: list[StepPlan]) -> Any:
            results = launch(plans)()
            time.sleep(0.01)  # the host
            timed = [msgspec.structs.replace(one, device_seconds=of_gpu) for one in results]
            return lambda: timed

        monkeypatch.setattr(executor, "launch", launched)
        llm.generate([prompt(1)], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(taken) >= 8
    assert all(seconds >= max(0.01, of_gpu) for seconds in taken[1:-1])
    assert max(taken) == of_gpu or of_gpu < 1


def test_requests_with_consecutive_seeds_differ_in_accepted_drafts() -> None:
    """64 of 129 tokens must have the mean of many draws, not of one draw."""
    rates = (0.8, 0.45, 0.25)
    schedule = SyntheticAcceptance(rates)
    for first in range(0, 2000, 100):
        lengths, end, total, rows = torch.full((64,), 1000), 1129, 0, 0
        while (runs := lengths < end).any():
            seeds = first + torch.arange(64)[runs]
            accepted = schedule.count(torch.full_like(seeds, 3), seeds, lengths[runs])
            lengths[runs] += accepted + 1
            total, rows = total + int(accepted.sum()), rows + len(seeds)
        assert total / rows == pytest.approx(sum(rates), abs=0.08)


@pytest.mark.parametrize("is_captured", [True, False])
def test_mean_length_is_as_requested(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_captured:
        graph_support.install(monkeypatch, graph_support.runtime(graph_support.RepeatedSteps()))
    config: dict[str, Any] = {
        "method": "ngram", "num_speculative_tokens": 3, "adaptive": False,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5,
    }  # fmt: skip
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM("nano", speculative_config=config, **options) as llm:
        llm.generate([[5, 6, 7]] * 4, params)
        stats = llm.stats()
        assert llm.info.speculation is not None
        assert llm.info.speculation.synthetic_acceptance_length == 2.5
        assert "SYNTHETIC ACCEPTANCE of 2.50" in llm._loop.executor.ready.load_summary
    assert stats.num_drafts > 50
    shares = [count / stats.num_drafts for count in stats.accepted_per_position]
    # At the end of a request, a row has fewer draft tokens.
    assert shares == pytest.approx([1.0, 0.5, 0.0], abs=0.15)
    assert shares[2] == 0.0
