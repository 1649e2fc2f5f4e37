import json
import time
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core import executor
from negamax.worker.config import WorkerReady
from tests import tiny_draft
from tests.cpu import graph_support
from tests.dist.engines import COMMON, read_exit_codes, replace_ranks, save_m2
from tests.layouts import full, parallel
from tests.loop_driver import admitted, drive, generate_tokens, read_tokens

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
PROMPTS = [[5, 6, 7, 8, 9] * 6, [5, 6, 7, 8, 9] * 3, [11, 12, 13] * 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_m2(tmp_path_factory.mktemp("m2"), vocab_size=96, num_layers=5)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, dict[str, Any]]:
    """Return speculative configurations by method: drafts of residual streams, and n-grams."""
    sizes, found = {"vocab_size": 96, "hidden_size": 32}, dict[str | None, dict[str, Any]]()
    common = {"num_speculative_tokens": 3, "adaptive": False}
    for method, variant in (("eagle3", "biases, two layers"), ("dspark", "dspark")):
        folder = tmp_path_factory.mktemp("draft") / "draft"
        _, _, draft = tiny_draft.make(variant, folder, ids=[1, 2, 3], **sizes)
        found[method] = {"method": method, "model": draft} | common
    return found | {"ngram": NGRAM}


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("eagle3", parallel(pcp=2)),
        full("dspark", parallel(pcp=2)),
        full("dspark", parallel(dp=2)),
        ("ngram", parallel(pp=2)),
        full("eagle3", parallel(dp=2)),
        full("eagle3", parallel(pcp=2, dp=2)),
        full("eagle3", parallel(pcp=2, pp=2)),
        full("ngram", parallel(dp=2)),
        full("ngram", parallel(pcp=2)),
        full("ngram", parallel(pcp=2, dp=2)),
    ],
    ids=str,
)
def test_drafts_keep_text(
    method: str, layout: dict[str, Any], m2: str, drafts: dict[str | None, dict[str, Any]]
) -> None:
    options = {"block_size": 4, "max_num_batched_tokens": 20, "speculative_config": drafts[method]}
    with LLM(m2, **COMMON, **options) as llm:
        expected, of_one = generate_tokens(llm, PROMPTS, GREEDY), llm.stats()
    with LLM(m2, **COMMON, **options, **layout) as llm:
        assert generate_tokens(llm, PROMPTS, GREEDY) == expected
        stats = llm.stats()
    assert stats.num_draft_tokens == of_one.num_draft_tokens > 20
    assert stats.num_accepted_tokens == of_one.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "layout",
    [parallel(pp=3), full(parallel(pp=2, dp=2, tp=2)), full(parallel(pp=2, enable_overlap=False))],
    ids=str,
)
def test_stages_receive_accepted_counts(
    layout: dict[str, Any], m2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Propose accepted, rejected and no tokens at random."""
    prompts = [[5, 6, 7] * length for length in (1, 6, 14, 20)]
    params = [
        SamplingParams(temperature=seed % 2, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(4)
    ]
    # With these limits prompts run in chunks, and running requests are preempted.
    limits = {**COMMON, "max_num_batched_tokens": 32, "num_kv_blocks": 13, "block_size": 8}
    limits["max_model_len"] = 96
    with LLM(m2, **limits) as one:
        expected = generate_tokens(one, prompts, params)
    known, drafts = zip(params, prompts, expected, strict=True), tmp_path / "known.json"
    drafts.write_text(json.dumps([[p.seed, prompt, tokens] for p, prompt, tokens in known]))
    replace_ranks(monkeypatch, "with drafts", str(drafts))
    with LLM(m2, **limits, **layout) as llm:
        assert generate_tokens(llm, prompts, params) == expected
        aborted = admitted(llm, prompts[2:], params[2:])
        drive(llm, aborted, num_steps=7)
        llm._loop.abort([request.request_id for request in aborted])
        updates = drive(llm, requests := admitted(llm, prompts, params))
        assert [read_tokens(updates[request.request_id]) for request in requests] == expected
        stats = llm.stats()
    assert stats.num_accepted_tokens > 40
    assert stats.preemption_count or layout.get("data_parallel_size")


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (parallel(pcp=2), None),
        (parallel(pp=2), "eagle3"),
        full(parallel(pp=2), "dspark"),
        full(parallel(pp=2, tp=2), None),
        full(parallel(pcp=2, dp=2), None),
        full(parallel(dp=2), None),
        full(parallel(dp=2, pp=2), None),
        full(parallel(pp=2), "ngram"),
    ],
    ids=str,
)
def test_captured_steps_keep_the_text(
    layout: dict[str, Any],
    method: str | None,
    m2: str,
    drafts: dict[str | None, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host learns the length of a row with draft tokens later than the device."""
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, top_k=5, max_tokens=16, logprobs=1),
    ]
    options = {**COMMON, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    with pytest.MonkeyPatch.context() as patch:
        graph_support.capture(patch)
        with LLM(m2, **options) as llm:
            expected = generate_tokens(llm, PROMPTS, params)
    if method is not None:
        options["speculative_config"] = drafts[method]
    replace_ranks(monkeypatch, "captured")
    with LLM(m2, **options, **layout) as llm:
        assert generate_tokens(llm, PROMPTS, params) == expected
        time.sleep(0.3)  # The ranks wait without a plan.
        assert generate_tokens(llm, PROMPTS[1:2], params[1:2]) == expected[1:2]
        stats = llm.stats()
    assert set(read_exit_codes(llm)) == {0}  # Each rank has replayed steps.
    assert method is None or stats.num_accepted_tokens > 0


def test_drafts_keep_the_text_of_tp_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check edited logits, log-probabilities and a grammar."""
    prompts = [list(range(30 + start, 70)) for start in range(4)]
    letters = Grammar(kind="regex", text="[a-z ]{15,20}")
    params = [
        SamplingParams(seed=seed, max_tokens=12, **fields)
        for seed, fields in enumerate((
            {"temperature": 0.0, "ignore_eos": True},
            {"temperature": 1.0, "ignore_eos": True, "top_k": 40, "logprobs": 2},
            {"temperature": 0.9, "ignore_eos": True, "frequency_penalty": 0.8},
            {"temperature": 1.0, "grammar": letters},
        ))
    ]  # fmt: skip

    def answers() -> tuple[list[Any], int]:
        with LLM("nano", **COMMON, tensor_parallel_size=2, max_model_len=128) as llm:
            outputs = [one.outputs[0] for one in llm.generate(prompts, params)]
            accepted = llm.stats().num_accepted_tokens
            return [(output.token_ids, output.logprobs) for output in outputs], accepted

    expected, accepted = answers()
    assert accepted == 0
    known, file = zip(prompts, expected, strict=True), tmp_path / "known.json"
    file.write_text(json.dumps([[seed, p, one[0]] for seed, (p, one) in enumerate(known)]))
    replace_ranks(monkeypatch, "with drafts", str(file))
    found, accepted = answers()
    assert found == expected and accepted > 15


def test_slowest_stage_determines_step_times() -> None:
    """The draft length follows the step times that each rank measured at start."""

    def ready(*seconds: float) -> WorkerReady:
        measured = tuple(zip((1, 1, 8), (0, 2, 0), seconds, strict=False))
        return WorkerReady(9, "float32", "cuda:0", "", "", step_seconds=measured)

    slowest = executor._find_slowest([ready(1.0, 1.2, 2.0), ready(0.9, 1.5, 1.9)])
    assert slowest == ((1, 0, 1.0), (1, 2, 1.5), (8, 0, 2.0))
    assert executor._find_slowest([ready()]) == ()
