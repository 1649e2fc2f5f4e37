import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from test_data_parallel_engine import (
    COMMON,
    LONGER,
    PARAMS,
    PROMPTS,
    SHARED,
    Answer,
    assert_same,
    nano,
    said,
    tokens_of,
)

from nano.suites import retrieval
from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.options.nodes import KEY_VARIABLE
from tests import tiny, tiny_draft, tiny_m3
from tests.dist.machines import Agent, NoMachinesError, machines
from tests.layouts import full, parallel


@pytest.fixture(scope="module")
def of_one_rank() -> list[Answer]:
    with nano() as llm:
        return said(llm.generate(PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counted")


@pytest.fixture(
    scope="module", params=[parallel(pcp=2), parallel(pcp=2, dp=2)], ids=["pcp2", "dp2-pcp2"]
)
def ranks(counted: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    spawn = supervision.spawn

    def counting(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "counting", *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTED_TOKENS", str(counted))
        patch.setattr(supervision, "spawn", counting)
        llm = nano(**request.param)
    with llm:
        yield llm


def test_ranks_give_the_text_of_one(ranks: LLM, of_one_rank: list[Answer]) -> None:
    for expected_cached in (0, 300):
        made = ranks.generate(PROMPTS, PARAMS)
        assert_same(said(made), of_one_rank)
        assert made[0].num_cached_tokens >= expected_cached
    assert [len(logprobs) for _, logprobs in of_one_rank] != [0] * len(PROMPTS)
    assert all(rank.generated_tokens for rank in ranks._loop._scheduler.ranks)
    # alone, and beside a data-parallel rank with no token or one
    assert_same(said(ranks.generate(PROMPTS[:1], PARAMS[:1])), of_one_rank[:1])
    assert_same(said(ranks.generate(PROMPTS[5:], PARAMS[5:])), of_one_rank[5:])


def test_aborts_do_not_change_other_requests(ranks: LLM, of_one_rank: list[Answer]) -> None:
    loop, found = ranks._loop, dict[str, list[int]]()
    loop._scheduler.reset_prefix_cache()
    admitted = ranks._admit(PROMPTS, PARAMS)
    requests = [choices[0][1] for choices in ranks._sequences(PROMPTS, admitted)]
    for request in requests:
        loop.add(request)
    aborted = {requests[at].request_id for at in (0, 3)}
    for number in range(500):
        if number == 2:
            loop.abort(list(aborted))
        for update in loop.step() if loop.has_work else []:
            found.setdefault(update.request_id, []).extend(update.token_ids)
    assert not loop.has_work
    for request, (tokens, *_) in zip(requests, of_one_rank, strict=True):
        assert request.request_id in aborted or found[request.request_id] == tokens


def test_each_rank_computes_half_of_a_prompt(ranks: LLM, counted: Path) -> None:
    """This must be the last test of these ranks."""
    ranks._loop._scheduler.reset_prefix_cache()
    ranks.generate([PROMPTS[0]] * 3, [SamplingParams(temperature=0.0, max_tokens=1)] * 3)
    prompts = [
        rank.prompt_tokens - rank.cached_prompt_tokens for rank in ranks._loop._scheduler.ranks
    ]
    ranks.shutdown()
    for rank in range(2 * len(prompts)):
        steps = map(int, (counted / str(rank)).read_text().split())
        # both ranks run generated tokens and pieces too short for two ranks
        computed = sum(tokens for tokens in steps if tokens > len(PROMPTS))
        assert 0.4 * prompts[rank // 2] < computed < 0.6 * prompts[rank // 2]


@pytest.fixture(scope="module")
def tiny_m2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 5,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
             "num_local_experts": 8, "num_experts_per_tok": 2,
             "max_position_embeddings": 128}  # fmt: skip
    return tiny.save(tiny.make_model(5, **sizes), tmp_path_factory.mktemp("m2"))


@pytest.fixture(scope="module")
def preempted(tiny_m2: Path) -> list[list[int]]:
    return tokens_of(tiny_m2, SHARED[:6], SHORT, **LIMITS)[0]


LIMITS = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    "ranks",
    [
        parallel(pcp=2, tp=2, ep=2),
        full(parallel(pcp=2, dp=2, ep=2)),
        full(
            parallel(
                pcp=2,
                dp=2,
                ep=True,
                enable_eplb=True,
                eplb_config={"num_redundant_experts": 4, "step_interval": 10, "window_size": 10},
            )
        ),
        full(parallel(pcp=2, dp=2, pp=2)),
        full(parallel(pcp=2, pp=2)),
        full(parallel(pcp=4, ep=True)),
        full(
            parallel(
                pcp=2,
                ep=True,
                enable_eplb=True,
                eplb_config={"num_redundant_experts": 2, "step_interval": 10, "window_size": 10},
            )
        ),
    ],
    ids=str,
)
def test_preemption_and_prefixes_keep_the_text(
    tiny_m2: Path, preempted: list[list[int]], ranks: dict[str, Any]
) -> None:
    replicas = ranks.get("data_parallel_size", 1)
    num_blocks = 28 // replicas + 6 * (replicas - 1)  # 20 blocks do not hold three requests
    options = {**LIMITS, "num_kv_blocks": num_blocks, **ranks}
    found, stats, cached = tokens_of(tiny_m2, SHARED[:6], SHORT, **options)
    assert found == preempted
    assert stats.preemption_count > 0 and cached >= 32
    assert stats.num_kv_blocks == num_blocks * replicas


@pytest.mark.parametrize(
    ("method", "stages", "replicas"),
    [
        ("eagle3", 1, 1),
        full("eagle3", 1, 2),
        full("eagle3", 2, 1),
        full("ngram", 1, 1),
        full("ngram", 1, 2),
    ],
)
def test_draft_tokens_keep_the_text(
    method: str, stages: int, replicas: int, tiny_m2: Path, tmp_path: Path
) -> None:
    """The draft model reads residual streams of all tokens."""
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    if method == "eagle3":
        _, _, draft = tiny_draft.make(
            "biases, two layers", tmp_path / "draft", ids=[1, 2, 3], vocab_size=96, hidden_size=32
        )
        config = {"method": "eagle3", "model": draft, "adaptive": False}
    prompts = [[5, 6, 7, 8, 9] * 6, [5, 6, 7, 8, 9] * 3, [11, 12, 13] * 4]
    options = {"speculative_config": config, "max_num_batched_tokens": 20}
    expected, of_one, _ = tokens_of(tiny_m2, prompts, LONGER, **options)
    ranks = parallel(pcp=2, pp=stages, dp=replicas)
    found, stats, _ = tokens_of(tiny_m2, prompts, LONGER, **options, **ranks)
    assert found == expected
    assert stats.num_draft_tokens == of_one.num_draft_tokens > 20
    assert stats.num_accepted_tokens == of_one.num_accepted_tokens > 0


@pytest.mark.parametrize("replicas", [1, full(2)])
def test_captured_steps_run_all_tokens_on_every_rank(
    replicas: int, tiny_m2: Path, preempted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = supervision.spawn

    def captured(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "captured", *args)

    monkeypatch.setattr(supervision, "spawn", captured)
    ranks = parallel(pcp=2, dp=replicas)
    options = {"max_num_batched_tokens": 80, "max_num_seqs": 5, **ranks}
    assert tokens_of(tiny_m2, SHARED[:6], SHORT, **options)[0] == preempted


@pytest.mark.parametrize(
    "ranks",
    [
        parallel(pcp=2),  # the shared expert is among the others
        full(parallel(pcp=2, tp=2, ep=True)),
    ],
    ids=str,
)
def test_nano_m3_gives_the_same_text(
    ranks: dict[str, Any], nano_m3: tuple[list[int], list[list[int]]]
) -> None:
    prompt, expected = nano_m3
    assert answers_of_m3(prompt, **ranks) == expected


@pytest.fixture(scope="module")
def nano_m3() -> tuple[list[int], list[list[int]]]:
    (long,) = retrieval.problems("2k", 1, 5)
    with LLM("nano-m3", **COMMON, script="agents") as llm:
        text = llm.render(list(long.messages), tools=list(long.tools) or None)
        prompt = llm.tokenizer.encode(text)
    return prompt, answers_of_m3(prompt)


def answers_of_m3(prompt: list[int], **ranks: Any) -> list[list[int]]:
    options = {"max_num_batched_tokens": 600, "index_cache_dtype": "fp8"}
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM("nano-m3", **COMMON, **options, **ranks) as llm:
        first = llm.generate([prompt, prompt[-45:]], params)
        again = llm.generate([[*prompt, prompt[-1]]], params)
        assert again[0].num_cached_tokens > 1000
        return [each.outputs[0].token_ids for each in (*first, *again)]


@pytest.mark.parametrize("ranks", [{}, full(parallel(ep=True, index_cache_dtype="fp8"))], ids=str)
def test_a_tiny_m3_gives_the_same_text_on_data_parallel_ranks_of_two(
    ranks: dict[str, Any], tmp_path: Path
) -> None:
    sizes = tiny_m3.random_sizes(
        5, num_hidden_layers=3, vocab_size=96, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32,
        num_local_experts=8, index_n_heads=2, mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", *["minimax_m3_sparse"] * 2],
    )  # fmt: skip
    folder = tiny.save(tiny_m3.make_model(5, **sizes), tmp_path)
    prompts = [[5 + at, 6, 7] * length for at, length in enumerate((1, 24, 6, 14, 20, 3, 24))]
    prompts.append([*prompts[1], 9])
    options = {"block_size": 32, "max_num_batched_tokens": 48, "max_model_len": 160}
    index = {"index_cache_dtype": ranks.get("index_cache_dtype", "auto")}
    expected, *_ = tokens_of(folder, prompts, LONGER, **options, **index)
    split = parallel(pcp=2, dp=2, num_kv_blocks=7)
    found, stats, cached = tokens_of(folder, prompts, LONGER, **options, **split, **ranks)
    assert found == expected
    assert stats.preemption_count > 0 and cached >= 32


def test_two_machines_split_prompts(
    of_one_rank: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine is a network namespace with one group."""
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")
    of_nano = ("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "96")
    try:
        with machines(2) as network, ExitStack() as stack:
            agent = Agent(network, 1, "-pcp", "2", "--nnodes", "2", *of_nano)
            stack.callback(agent.kill)

            def is_late(*_: object) -> None:  # node 0 waits indefinitely for an agent
                raise TimeoutError(agent.log)

            signal.signal(signal.SIGALRM, is_late)
            stack.callback(signal.alarm, 0)
            signal.alarm(120)
            address = network.address(0)
            with nano(nnodes=2, master_addr=address, prefill_context_parallel_size=2) as llm:
                assert_same(said(llm.generate(PROMPTS, PARAMS)), of_one_rank)
    except NoMachinesError as error:
        pytest.skip(str(error))
