from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError, ContextLengthError, InvalidRequestError, ResourceError
from negamax.kernels.attention.metadata import AttentionMetadata
from tests import tiny

SIZES = {
    "vocab_size": 331,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.make_model(7, **SIZES), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", block_size=4, num_threads=1) as engine:
        yield engine


def prompt(seed: int, length: int = 30) -> list[int]:
    return torch.randint(3, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [generation.outputs[0].token_ids for generation in llm.generate(prompts, params)]


def all_blocks_free(llm: LLM) -> bool:
    while llm._loop.has_work:
        llm._loop.step()
    stats = llm.stats()
    return (
        stats.num_running == stats.num_waiting == 0
        and stats.num_free_kv_blocks == stats.num_kv_blocks
    )


def test_a_repeated_prompt_is_taken_from_the_cache_and_gives_the_same_text(llm: LLM) -> None:
    first, second = (llm.generate([prompt(1)], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 28  # full blocks of 4 within the first 29 of 30 tokens
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_following_turn_reuses_generated_tokens_too(llm: LLM) -> None:
    first = llm.generate([prompt(2)], GREEDY)[0]
    longer = prompt(2) + first.outputs[0].token_ids + prompt(3, 5)
    assert llm.generate([longer], GREEDY)[0].num_cached_tokens >= 44


def test_without_prefix_caching_nothing_is_cached_and_the_text_is_the_same(
    folder: Path, llm: LLM
) -> None:
    with LLM(
        str(folder), dtype="float32", block_size=4, enable_prefix_caching=False, num_threads=1
    ) as plain:
        generations = [plain.generate([prompt(1)], GREEDY)[0] for _ in range(2)]
    assert [generation.num_cached_tokens for generation in generations] == [0, 0]
    assert generations[1].outputs[0].token_ids == tokens(llm, [prompt(1)], GREEDY)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_cache_preempts_and_keeps_the_texts(folder: Path, llm: LLM, overlap: bool) -> None:
    prompts = [prompt(seed, 40) for seed in range(10, 18)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(
        str(folder),
        dtype="float32",
        block_size=4,
        num_kv_blocks=64,
        enable_overlap=overlap,
        num_threads=1,
    ) as small:
        assert tokens(small, prompts, params) == tokens(llm, prompts, params)
        assert small.stats().preemption_count > 0
        assert all_blocks_free(small)


def test_preemption_and_chunking_are_bit_identical_in_bfloat16(folder: Path) -> None:
    """A token's kernels depend on whether it is prompt or output, not on its step."""
    prompts = [prompt(seed, 30 + seed) for seed in range(8)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True, logprobs=0)
        for i in range(8)
    ]
    texts = []
    for options in ({}, {"num_kv_blocks": 64, "max_num_batched_tokens": 13}):
        with LLM(str(folder), dtype="bfloat16", block_size=4, num_threads=1, **options) as engine:
            completions = [generation.outputs[0] for generation in engine.generate(prompts, params)]
            texts.append(
                [
                    [(entry.token_id, entry.logprob) for entry in c.logprobs or []]
                    for c in completions
                ]
            )
            preempted = engine.stats().preemption_count
    assert preempted > 0
    assert texts[0] == texts[1]


def test_same_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    seeded = SamplingParams(
        temperature=1.0, top_k=40, top_p=0.95, seed=5, max_tokens=30, ignore_eos=True
    )
    alone = tokens(llm, [prompt(20)], seeded)[0]
    others = [
        SamplingParams(temperature=1.5, top_k=0, seed=i, max_tokens=10 + i, ignore_eos=True)
        for i in range(6)
    ]
    mixed = llm.generate([prompt(21 + i) for i in range(6)] + [prompt(20)], [*others, seeded])
    assert mixed[-1].outputs[0].token_ids == alone
    assert tokens(
        llm,
        [prompt(20)],
        SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=6, max_tokens=30),
    ) != [alone]


def test_n_choices_differ_and_the_first_is_the_single_one(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, n=4)
    choices = [choice.token_ids for choice in llm.generate([prompt(30)], params)[0].outputs]
    assert len({tuple(choice) for choice in choices}) == 4
    single = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    assert choices[0] == tokens(llm, [prompt(30)], single)[0]


def test_the_choices_of_a_prompt_compute_it_once(llm: LLM) -> None:
    before = llm.stats()
    llm.generate(
        [prompt(31), prompt(32)],
        SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=3),
    )
    after = llm.stats()
    assert after.prompt_tokens - before.prompt_tokens == 6 * 30
    # full blocks of 4, plus two choices each
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 4 * 28


def test_stop_token_ends_the_text_before_it_and_min_tokens_holds_it_back(llm: LLM) -> None:
    free = tokens(llm, [prompt(40)], GREEDY)[0]
    stop_id = free[5]
    stopped = llm.generate(
        [prompt(40)], SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(stop_id,))
    )[0].outputs[0]
    cut = free.index(stop_id) + 1
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (
        free[:cut],
        "stop",
        stop_id,
    )
    assert stopped.text == llm.tokenizer.decode(free[: cut - 1])
    held = SamplingParams(
        temperature=0.0, max_tokens=20, min_tokens=12, stop_token_ids=(stop_id,), ignore_eos=True
    )
    longer = llm.generate([prompt(40)], held)[0].outputs[0].token_ids
    assert len(longer) >= 12
    assert stop_id not in longer[:12]


def test_stop_string_truncates_the_text_and_frees_the_sequence(llm: LLM) -> None:
    free = llm.generate([prompt(41)], GREEDY)[0].outputs[0]
    middle = free.text[len(free.text) // 2 :][:4]
    stopped = llm.generate(
        [prompt(41)], SamplingParams(temperature=0.0, max_tokens=20, stop=(middle,))
    )[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == middle
    assert stopped.text == free.text[: free.text.index(middle)]
    assert all_blocks_free(llm)


def test_max_tokens_and_the_context_length_end_with_length(llm: LLM) -> None:
    short = llm.generate(
        [prompt(42)], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    )[0].outputs[0]
    assert (len(short.token_ids), short.finish_reason) == (3, "length")
    full = llm.generate(
        [prompt(43, 250)], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    )[0].outputs[0]
    assert (len(full.token_ids), full.finish_reason) == (6, "length")


def test_penalties_and_bias_change_the_tokens(llm: LLM) -> None:
    free = tokens(llm, [prompt(44)], GREEDY)[0]
    banned = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={free[0]: -100.0}
    )
    assert tokens(llm, [prompt(44)], banned)[0][0] != free[0]
    forced = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias={9: 100.0})
    assert tokens(llm, [prompt(44)], forced)[0] == [9] * 5
    allowed = SamplingParams(
        temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, allowed_token_ids=(9, 11, 12)
    )
    assert set(tokens(llm, [prompt(44)], allowed)[0]) <= {9, 11, 12} and free[0] not in (9, 11, 12)
    both = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0
    )
    repeats = [
        len(ids) - len(set(ids))
        for ids in (tokens(llm, [prompt(44)], both)[0], tokens(llm, [prompt(44)], forced)[0])
    ]
    assert repeats[0] < 40 - 15
    assert repeats[1] == 4


def test_closing_a_stream_frees_its_blocks_within_one_step(llm: LLM) -> None:
    stream = llm.stream(
        prompt(50), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    )
    for _ in range(5):
        next(stream)
    assert llm.stats().num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().num_running == 0
    assert llm.stats().num_free_kv_blocks == llm.stats().num_kv_blocks
    assert all_blocks_free(llm)


def test_stream_and_generate_give_the_same_text(llm: LLM) -> None:
    outputs = list(llm.stream(prompt(51), GREEDY))
    whole = llm.generate([prompt(51)], GREEDY)[0].outputs[0]
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert outputs[-1].num_output_tokens == 20


def test_streams_read_in_turns_lose_nothing(llm: LLM) -> None:
    prompts = [prompt(52), prompt(53), prompt(54)]
    alone = [tokens(llm, [one], GREEDY)[0] for one in prompts]
    streams = [llm.stream(one, GREEDY) for one in prompts[:2]]
    read = [[token for _ in range(3) for token in next(stream).token_ids] for stream in streams]
    assert tokens(llm, prompts[2:], GREEDY) == alone[2:]  # while both are open
    for output, stream in zip(read, streams, strict=True):
        output += [token for rest in stream for token in rest.token_ids]
    assert read == alone[:2]


def test_a_request_with_nan_fails_alone(folder: Path) -> None:
    with LLM(
        str(folder), dtype="float32", block_size=4, num_threads=1, enable_overlap=False
    ) as engine:
        clean = tokens(engine, [prompt(61)], GREEDY)[0]
        bad = engine._admit([prompt(60)], GREEDY)
        good = engine._admit([prompt(61)], GREEDY)
        requests = [
            group[0][1] for group in engine._sequences([prompt(60), prompt(61)], [*bad, *good])
        ]
        for request in requests:
            engine._loop.add(request)
        collected: dict[str, list[int]] = {request.request_id: [] for request in requests}
        reasons: dict[str, str | None] = {}
        poisoned = False
        while engine._loop.has_work:
            for update in engine._loop.step():
                collected[update.request_id] += update.token_ids
                reasons[update.request_id] = update.finish_reason
            if not poisoned:
                worker = engine._loop.executor._worker  # type: ignore[attr-defined]
                block = int(worker.runner.requests.block_tables[0, 0])
                with torch.inference_mode():
                    worker.runner.caches[0]["k"][block] = float("nan")
                poisoned = True
        assert reasons[requests[0].request_id] == "error"
        assert reasons[requests[1].request_id] == "length"
        assert collected[requests[1].request_id] == clean


def test_a_step_that_raises_is_repeated_row_by_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(folder), dtype="float32", block_size=4, num_threads=1) as engine:
        expected = tokens(engine, [prompt(62)], GREEDY)[0]
        params = engine._admit(
            [prompt(63), prompt(62)], [SamplingParams(logit_bias={1: 1.0}, max_tokens=20), GREEDY]
        )
        requests = [group[0][1] for group in engine._sequences([prompt(63), prompt(62)], params)]
        for request in requests:
            engine._loop.add(request)
        collected: dict[str, list[int]] = {request.request_id: [] for request in requests}
        reasons: dict[str, str | None] = {}
        steps = 0
        while engine._loop.has_work:
            for update in engine._loop.step():
                collected[update.request_id] += update.token_ids
                reasons[update.request_id] = update.finish_reason
            steps += 1
            if steps == 3:
                worker = engine._loop.executor._worker  # type: ignore[attr-defined]
                forward = worker.runner.model.forward

                def raising(
                    token_ids: torch.Tensor,
                    metadata: AttentionMetadata,
                    *args: Any,
                    forward: Callable[..., Any] = forward,
                    **options: Any,
                ) -> Any:
                    if 0 in metadata.token_slots:
                        raise RuntimeError("the model cannot run the first row")
                    return forward(token_ids, metadata, *args, **options)

                monkeypatch.setattr(worker.runner.model, "forward", raising)
        assert reasons == {requests[0].request_id: "error", requests[1].request_id: "length"}
        assert collected[requests[1].request_id] == expected


def test_a_request_that_cannot_be_queued_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (params,) = llm._admit([prompt(64)], [GREEDY])
    (request,) = next(llm._sequences([prompt(64)], [params]))[0][1:2]

    def broken(_request: object) -> None:
        raise OverflowError("a number too large")

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop._scheduler, "add", broken)
        llm._loop.add(request)
    (update,) = llm._loop.step()
    assert (update.finish_reason, update.error) == (
        "error",
        "OverflowError while this request was queued",
    )
    assert len(tokens(llm, [prompt(65)], GREEDY)[0]) == 20


def test_bad_prompts_and_parameters_are_refused_before_anything_runs(llm: LLM) -> None:
    for bad, error in (
        ([], InvalidRequestError),
        ([331], InvalidRequestError),
        ([-1], InvalidRequestError),
    ):
        with pytest.raises(error):
            llm.generate([prompt(1), bad], GREEDY)
    with pytest.raises(ContextLengthError, match="256"):
        llm.generate([prompt(1, 256)], GREEDY)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate([prompt(1)], SamplingParams(temperature=9.0))
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1"):
        llm.generate([prompt(1)], [GREEDY, GREEDY])
    assert all_blocks_free(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 257}, "257"),
        ({"tensor_parallel_size": 3}, "heads"),
        ({"dtype": "int8"}, "int8"),
        ({"block_size": 0}, "block-size"),
        ({"kv_cache_memory": 1000}, "KV cache"),
    ],
)
def test_options_that_cannot_work_are_refused_with_numbers(
    folder: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), **options)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"dtype": "float", "load_format": "dummy"},
            {"dtype": "float32", "load_format": "synthetic"},
        ),
        (
            {"dtype": "half", "load_format": "hf"},
            {"dtype": "float16", "load_format": "safetensors"},
        ),
        ({"dtype": "bf16", "quantization": "None"}, {"dtype": "bfloat16"}),
    ],
)
def test_values_may_have_vllm_names(
    folder: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    outputs = []
    for options in (theirs, ours):
        with LLM(str(folder), num_kv_blocks=8, block_size=4, num_threads=1, **options) as engine:
            (made,) = engine.generate([prompt(1)], GREEDY)
            outputs.append(made.outputs[0].token_ids)
    assert outputs[0] == outputs[1] != []


def test_a_model_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ResourceError, match="GiB"):
        LLM("minimax-m2", load_format="synthetic", max_model_len=128)


def test_a_small_cache_lowers_the_context_length(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", block_size=4, num_kv_blocks=8, num_threads=1) as engine:
        with pytest.raises(ContextLengthError, match="33"):
            engine.generate([prompt(1, 60)], GREEDY)
        longest = engine.generate(
            [prompt(1, 20)], SamplingParams(temperature=0.0, ignore_eos=True)
        )[0].outputs[0]
        assert (len(longest.token_ids), longest.finish_reason) == (13, "length")
