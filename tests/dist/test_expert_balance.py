import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano.suites import tool_calls
from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core import executor, expert_balancer
from negamax.engine.wire import ExpertDump
from negamax.worker.config import WorkerReady
from tests import tiny, tiny_draft
from tests.cpu import graph_support
from tests.dist.engines import COMMON, make_sizes, read_exit_codes, replace_ranks, save_m2
from tests.e2e.conftest import STUB, eventually, serving
from tests.layouts import full, parallel
from tests.loop_driver import admitted, drive, generate_tokens, read_tokens

OFTEN = {"step_interval": 8, "window_size": 8}
SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
NUM_EXPERTS, TOP_K = 8, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, top_k=20, max_tokens=32, ignore_eos=True)
PROMPTS = [[*range(3 + at, 30 + 2 * at)] for at in range(8)]
PARAMS = [GREEDY, DRAWN] * 4
OneRank = tuple[list[list[int]], ExpertDump]  # tokens of one rank, and its recorded experts
NOTICED_SECONDS = 3.0  # from a rank's end to the end of its requests, on a busy machine


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make most tokens select experts 2 to 4, which start on one of two ranks."""
    sizes = {"num_hidden_layers": 5, "max_position_embeddings": 128}
    model = tiny.make_model(5, **make_sizes(**sizes))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.tensor([0.0, 0.0, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0]))
    return tiny.save(model, tmp_path_factory.mktemp("skewed"))


def balancing(folder: Path | str, *, copies: int, **options: Any) -> LLM:
    config = {**OFTEN, "num_redundant_experts": copies}
    return LLM(str(folder), **COMMON, **SIZES | options, enable_eplb=True, eplb_config=config)


@pytest.fixture(scope="module")
def of_one_rank(skewed: Path) -> OneRank:
    counted = {"expert_distribution_recorder_mode": "stat", **SIZES}
    with LLM(str(skewed), **COMMON, **counted) as llm:
        llm._loop.record_experts("start")
        text = generate_tokens(llm, PROMPTS, PARAMS)
        llm._loop.record_experts("stop")
        llm.generate(PROMPTS[:1], GREEDY)  # This request is not recorded.
        dump = llm._loop.record_experts("dump")
    assert dump is not None
    return text, dump


def test_every_selection_is_counted_once(of_one_rank: OneRank) -> None:
    text, dump = of_one_rank
    # All prompt tokens count, and all generated tokens except the last ones.
    num_tokens = sum(map(len, PROMPTS)) + sum(len(tokens) - 1 for tokens in text)
    assert [sum(layer) for layer in dump.logical_count] == [TOP_K * num_tokens] * 5
    assert dump.balancedness == 1.0  # A single rank is balanced.
    for layer in dump.logical_count:
        assert sum(layer[2:5]) > 0.6 * TOP_K * num_tokens


@pytest.fixture(scope="module")
def two_ranks(skewed: Path) -> Iterator[LLM]:
    with balancing(skewed, copies=2, tensor_parallel_size=2, enable_expert_parallel=True) as llm:
        yield llm


def test_loads_become_even_and_the_text_stays(two_ranks: LLM, of_one_rank: OneRank) -> None:
    loop, (text, counts) = two_ranks._loop, of_one_rank
    loop.record_experts("start")
    before = loop.record_experts("dump")
    assert before is not None and before.balancedness == 1.0
    assert not sum(map(sum, before.logical_count))
    assert before.physical_to_logical_map == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]] * 5
    assert generate_tokens(two_ranks, PROMPTS, PARAMS) == text
    experts = loop.stats().experts
    assert experts is not None and experts.num_rebalances >= 2 and experts.num_moved >= 8
    after = loop.record_experts("dump")
    assert after is not None
    # Moves do not change the recorder's counts.
    assert after.logical_count == counts.logical_count
    for slots in after.physical_to_logical_map:
        copies = Counter(slots)
        assert set(copies) == set(range(NUM_EXPERTS)) and max(copies.values()) <= 2
    at_start = balancedness(after.logical_count, before.physical_to_logical_map)
    found = balancedness(after.logical_count, after.physical_to_logical_map)
    assert found == pytest.approx(after.balancedness)
    assert at_start < 0.8 and after.balancedness > 0.9
    # The text is the same after the experts have moved.
    assert generate_tokens(two_ranks, PROMPTS, PARAMS) == text


def balancedness(counts: list[list[int]], slots: list[list[int]]) -> float:
    mean = most = 0.0
    for layer, table in zip(counts, slots, strict=True):
        copies, half = Counter(table), len(table) // 2
        loads = [
            sum(layer[expert] / copies[expert] for expert in part)
            for part in (table[:half], table[half:])
        ]
        mean, most = mean + sum(loads) / 2, most + max(loads)
    return mean / most


@pytest.mark.parametrize(
    ("copies", "layout"),
    [
        (2, parallel(dp=2, ep=True)),
        full(4, parallel(dp=4, ep=True)),
        full(0, parallel(tp=4, ep=2)),
        full(2, parallel(dp=2, tp=2, ep=2)),
        full(2, parallel(pcp=2, ep=True)),
        full(4, parallel(dp=2, pcp=2, ep=True)),
        full(2, parallel(dp=2, ep=True, all2all_backend="one_sided")),
        full(8, parallel(tp=4, ep=True)),
        full(2, parallel(tp=2, pp=2, ep=True)),
    ],
)
def test_every_layout_gives_the_text_of_one_rank(
    copies: int, layout: dict[str, Any], skewed: Path, of_one_rank: OneRank
) -> None:
    text, counts = of_one_rank
    with balancing(skewed, copies=copies, **layout) as llm:
        llm._loop.record_experts("start")
        assert generate_tokens(llm, PROMPTS, PARAMS) == text
        experts, dump = llm.stats().experts, llm._loop.record_experts("dump")
    assert experts is not None and experts.num_moved >= 5
    assert dump is not None and dump.logical_count == counts.logical_count


@pytest.mark.full
def test_drafts_and_captured_steps_find_the_experts(
    skewed: Path, of_one_rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_ranks(monkeypatch, "captured")
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    with balancing(skewed, copies=2, **parallel(tp=2, ep=True), speculative_config=drafts) as llm:
        assert generate_tokens(llm, PROMPTS, PARAMS) == of_one_rank[0]
        experts = llm.stats().experts
    assert experts is not None and experts.num_moved >= 5
    assert read_exit_codes(llm) == [0, 0]  # The ranks replayed steps, too.


@pytest.mark.full
def test_nano_m3_gives_the_same_text_while_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move experts of a model with a shared expert, where selections are almost even."""
    monkeypatch.setattr(expert_balancer, "LEAST_GAIN", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM("nano-m3", **COMMON) as llm:
        problems = tool_calls.problems(3, 5)
        prompts = [llm.render(list(each.messages), tools=list(each.tools)) for each in problems]
        text = generate_tokens(llm, prompts, params)
    ranks = parallel(tp=2, ep=True)
    with balancing("nano-m3", copies=2, max_num_batched_tokens=256, **ranks) as llm:
        assert generate_tokens(llm, prompts, params) == text
        experts = llm.stats().experts
    assert experts is not None and experts.num_moved > 0


@pytest.mark.full
def test_experts_start_as_dumped(skewed: Path, of_one_rank: OneRank) -> None:
    """Place experts by recorded counts, with copies, on data-parallel ranks."""
    text, counts = of_one_rank
    located: dict[str, Any] = {
        "init_expert_location": json.dumps({"logical_count": counts.logical_count}),
        "eplb_config": {"num_redundant_experts": 2},
        "expert_distribution_recorder_mode": "stat",
    }
    with LLM(str(skewed), **COMMON, **SIZES, **located, **parallel(dp=2, ep=True)) as llm:
        llm._loop.record_experts("start")
        assert generate_tokens(llm, PROMPTS, PARAMS) == text
        dump = llm._loop.record_experts("dump")
    assert dump is not None and dump.logical_count == counts.logical_count
    assert dump.balancedness > 0.93


def test_a_rank_killed_during_a_move_ends_only_open_requests(
    skewed: Path, of_one_rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies while rank 0 waits for one of its experts. The group restarts."""
    mark, located = tmp_path / "mark", tmp_path / "location.json"
    monkeypatch.setenv("ENGINE_MODULE", "tests.dist.killed_in_move")
    monkeypatch.setenv("KILLED_IN_MOVE", str(mark))
    located.write_text(json.dumps({"physical_to_logical_map": [[2, 3, 4, 1, 5, 6, 7, 0]] * 5}))
    options = (
        "--device", "cpu", "--dtype", "float32", "-tp", "2", "--enable-expert-parallel",
        "--enable-eplb", "--eplb-config", json.dumps(OFTEN),
        "--init-expert-location", str(located),
    )  # fmt: skip
    body = {
        "input_ids": PROMPTS[::2],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 36, "ignore_eos": True},
    }
    log_file = tmp_path / "log"
    mark.touch()
    with (
        serving(*options, model=str(skewed), log_file=log_file, program=STUB) as server,
        server.http() as http,
    ):
        lost = http.post("/generate", json=body)
        answered = time.time()
        assert lost.status_code == 503, lost.text
        assert answered - float(mark.read_text()) < NOTICED_SECONDS
        assert eventually(lambda: http.get("/readyz").status_code == 200)
        assert http.post("/start_expert_distribution_record").status_code == 200
        dump = http.post("/dump_expert_distribution_record").json()
        assert dump["engines"][0]["physical_to_logical_map"][0] == [2, 3, 4, 1, 5, 6, 7, 0]
        answers = http.post("/generate", json=body).json()
        assert [each["output_ids"] for each in answers] == of_one_rank[0][::2]
        assert server.gauge("negamax:experts_moved_total") > 0
        assert server.gauge("negamax:engine_restarts_total") == 1
    assert "rank 1 ended with exit code -9" in log_file.read_text()


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
STEP_PROMPTS = [[5, 6, 7, 8, 9] * 6, [5, 6, 7, 8, 9] * 3, [11, 12, 13] * 4]
GREEDY_STEPS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


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
        expected, of_one = generate_tokens(llm, STEP_PROMPTS, GREEDY_STEPS), llm.stats()
    with LLM(m2, **COMMON, **options, **layout) as llm:
        assert generate_tokens(llm, STEP_PROMPTS, GREEDY_STEPS) == expected
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
        GREEDY_STEPS,
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, top_k=5, max_tokens=16, logprobs=1),
    ]
    options = {**COMMON, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    with pytest.MonkeyPatch.context() as patch:
        graph_support.capture(patch)
        with LLM(m2, **options) as llm:
            expected = generate_tokens(llm, STEP_PROMPTS, params)
    if method is not None:
        options["speculative_config"] = drafts[method]
    replace_ranks(monkeypatch, "captured")
    with LLM(m2, **options, **layout) as llm:
        assert generate_tokens(llm, STEP_PROMPTS, params) == expected
        time.sleep(0.3)  # The ranks wait without a plan.
        assert generate_tokens(llm, STEP_PROMPTS[1:2], params[1:2]) == expected[1:2]
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
