from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError, ContextLengthError, InvalidRequestError, ResourceError
from negamax.engine.llm import Completion
from negamax.kernels.attention.metadata import AttentionMetadata
from tests import tiny
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens
from tests.tables import read_table

SIZES = {"vocab_size": 331, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
         "num_local_experts": 6, "num_experts_per_tok": 2,
         "max_position_embeddings": 256}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.make_model(7, **SIZES), tmp_path_factory.mktemp("model"))


def start(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "block_size": 4, "num_threads": 1, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as engine:
        yield engine


def prompt(seed: int, length: int = 30) -> list[int]:
    return torch.randint(3, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def complete(llm: LLM, number: int, length: int = 30, /, **params: Any) -> Completion:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
    return llm.generate([prompt(number, length)], sampling)[0].outputs[0]


def test_repeated_prompts_and_following_turns_are_taken_from_the_cache(llm: LLM) -> None:
    first, second = (llm.generate([prompt(1)], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 28  # Full blocks of the first 29 tokens are cached.
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    first = llm.generate([prompt(2)], GREEDY)[0]
    longer = prompt(2) + first.outputs[0].token_ids + prompt(3, 5)
    assert llm.generate([longer], GREEDY)[0].num_cached_tokens >= 44


def test_without_prefix_caching_the_text_is_the_same(folder: Path, llm: LLM) -> None:
    with start(folder, enable_prefix_caching=False) as plain:
        generations = [plain.generate([prompt(1)], GREEDY)[0] for _ in range(2)]
    assert [generation.num_cached_tokens for generation in generations] == [0, 0]
    assert generations[1].outputs[0].token_ids == generate_tokens(llm, [prompt(1)], GREEDY)[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_cache_preempts_and_keeps_the_texts(folder: Path, llm: LLM, overlap: bool) -> None:
    prompts = [prompt(seed, 40) for seed in range(10, 18)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with start(folder, num_kv_blocks=64, enable_overlap=overlap) as small:
        assert generate_tokens(small, prompts, params) == generate_tokens(llm, prompts, params)
        assert small.stats().preemption_count > 0
        free_all(small)


def test_preemption_and_chunking_are_bit_identical_in_bfloat16(folder: Path) -> None:
    """Check bit-identity: a token's kernels depend on prompt or output, not on its step."""
    prompts = [prompt(seed, 30 + seed) for seed in range(8)]
    drawn = replace(GREEDY, temperature=1.0, max_tokens=60, logprobs=0)
    params = [replace(drawn, seed=seed) for seed in range(8)]
    texts = []
    for options in ({}, {"num_kv_blocks": 64, "max_num_batched_tokens": 13}):
        with start(folder, dtype="bfloat16", **options) as engine:
            completions = [generation.outputs[0] for generation in engine.generate(prompts, params)]
            texts.append([each.logprobs for each in completions])
            preempted = engine.stats().preemption_count
    assert preempted > 0
    assert texts[0] == texts[1]


def test_same_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    drawn = replace(GREEDY, temperature=1.0, seed=5)
    seeded = replace(drawn, top_k=40, top_p=0.95, max_tokens=30)
    alone = generate_tokens(llm, [prompt(20)], seeded)[0]
    others = [replace(drawn, temperature=1.5, top_k=0, seed=i, max_tokens=10 + i) for i in range(6)]
    mixed = llm.generate([prompt(21 + i) for i in range(6)] + [prompt(20)], [*others, seeded])
    assert mixed[-1].outputs[0].token_ids == alone
    assert generate_tokens(llm, [prompt(20)], replace(seeded, seed=6)) != [alone]


def test_n_choices_differ_and_compute_their_prompt_once(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, n=4)
    choices = [choice.token_ids for choice in llm.generate([prompt(30)], params)[0].outputs]
    assert len({tuple(choice) for choice in choices}) == 4
    single = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    assert choices[0] == generate_tokens(llm, [prompt(30)], single)[0]
    before = llm.stats()
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=3)
    llm.generate([prompt(31), prompt(32)], params)
    after = llm.stats()
    assert after.prompt_tokens - before.prompt_tokens == 6 * 30
    # The count covers full blocks of 4, and two choices per prompt.
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 4 * 28


def test_stop_tokens_stop_strings_and_lengths_end_the_text(llm: LLM) -> None:
    free = complete(llm, 40, ignore_eos=True).token_ids
    stop_id = free[5]
    stopped = complete(llm, 40, stop_token_ids=(stop_id,))
    length = free.index(stop_id) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (free[:length], "stop")
    assert stopped.stop_reason == stop_id
    assert stopped.text == llm.tokenizer.decode(free[: length - 1])
    longer = complete(llm, 40, min_tokens=12, stop_token_ids=(stop_id,), ignore_eos=True).token_ids
    assert len(longer) >= 12 and stop_id not in longer[:12]
    free = complete(llm, 41, ignore_eos=True)
    middle = free.text[len(free.text) // 2 :][:4]
    stopped = complete(llm, 41, stop=(middle,))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", middle)
    assert stopped.text == free.text[: free.text.index(middle)]
    free_all(llm)
    for length, max_tokens, found in ((30, 3, 3), (250, 100, 6)):
        made = complete(llm, 42, length, max_tokens=max_tokens, ignore_eos=True)
        assert (len(made.token_ids), made.finish_reason) == (found, "length")


def test_penalties_and_bias_change_the_tokens(llm: LLM) -> None:
    def found(**params: Any) -> list[int]:
        return complete(llm, 44, ignore_eos=True, **params).token_ids

    free = found()
    assert found(logit_bias={free[0]: -100.0})[0] != free[0]
    assert found(max_tokens=5, logit_bias={9: 100.0}) == [9] * 5
    allowed = found(temperature=1.0, seed=3, allowed_token_ids=(9, 11, 12))
    assert set(allowed) <= {9, 11, 12} and free[0] not in (9, 11, 12)
    penalized = found(max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(penalized) - len(set(penalized)) < 40 - 15


def test_streams_give_the_text_of_generate_and_free_their_blocks(llm: LLM) -> None:
    outputs = list(llm.stream(prompt(51), GREEDY))
    whole = llm.generate([prompt(51)], GREEDY)[0].outputs[0]
    assert "".join(output.text for output in outputs) == whole.text
    assert [token for output in outputs for token in output.token_ids] == whole.token_ids
    assert outputs[-1].num_output_tokens == 20
    prompts = [prompt(52), prompt(53), prompt(54)]
    alone = [generate_tokens(llm, [one], GREEDY)[0] for one in prompts]
    streams = [llm.stream(one, GREEDY) for one in prompts[:2]]
    read = [[token for _ in range(3) for token in next(stream).token_ids] for stream in streams]
    assert generate_tokens(llm, prompts[2:], GREEDY) == alone[2:]  # Both streams are open.
    for output, stream in zip(read, streams, strict=True):
        output += [token for rest in stream for token in rest.token_ids]
    assert read == alone[:2]
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    stream = llm.stream(prompt(50), long)
    for _ in range(5):
        next(stream)
    assert llm.stats().num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().num_running == 0
    assert llm.stats().num_free_kv_blocks == llm.stats().num_kv_blocks
    free_all(llm)


def test_request_with_nan_fails_alone(folder: Path) -> None:
    with start(folder, enable_overlap=False) as engine:
        clean = generate_tokens(engine, [prompt(61)], GREEDY)[0]
        requests = admitted(engine, [prompt(60), prompt(61)], [GREEDY, GREEDY])
        bad, good = (request.request_id for request in requests)
        first = drive(engine, requests, num_steps=1)
        runner = engine._loop.executor._worker.runner  # type: ignore[attr-defined]
        block = int(runner.requests.block_tables[0, 0])
        with torch.inference_mode():
            runner.caches[0]["k"][block] = float("nan")
        updates = drive(engine, ())
    assert updates[bad][-1].finish_reason == "error"
    assert updates[good][-1].finish_reason == "length"
    assert read_tokens([*first[good], *updates[good]]) == clean


def test_failed_step_is_repeated_row_by_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(folder) as engine:
        expected = generate_tokens(engine, [prompt(62)], GREEDY)[0]
        biased = SamplingParams(logit_bias={1: 1.0}, max_tokens=20)
        requests = admitted(engine, [prompt(63), prompt(62)], [biased, GREEDY])
        bad, good = (request.request_id for request in requests)
        first = drive(engine, requests, num_steps=3)
        model = engine._loop.executor._worker.runner.model  # type: ignore[attr-defined]
        forward = model.forward

        def raising(token_ids: Any, metadata: AttentionMetadata, *args: Any, **named: Any) -> Any:
            if 0 in metadata.token_slots:
                raise RuntimeError("the model cannot run the first row")
            return forward(token_ids, metadata, *args, **named)

        monkeypatch.setattr(model, "forward", raising)
        updates = drive(engine, ())
    assert updates[bad][-1].finish_reason == "error"
    assert updates[good][-1].finish_reason == "length"
    assert read_tokens([*first[good], *updates[good]]) == expected


def test_request_that_is_not_queued_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = admitted(llm, [prompt(64)], [GREEDY])

    def broken(_request: object) -> None:
        raise OverflowError("a number too large")

    with monkeypatch.context() as patch:
        patch.setattr(llm._loop._scheduler, "add", broken)
        llm._loop.add(request)
    (update,) = llm._loop.step()
    error = "OverflowError while this request was queued"
    assert (update.finish_reason, update.error) == ("error", error)
    assert len(generate_tokens(llm, [prompt(65)], GREEDY)[0]) == 20


def test_bad_prompts_and_parameters_are_refused_before_anything_runs(llm: LLM) -> None:
    for bad in ([], [331], [-1]):
        with pytest.raises(InvalidRequestError):
            llm.generate([prompt(1), bad], GREEDY)
    with pytest.raises(ContextLengthError, match="256"):
        llm.generate([prompt(1, 256)], GREEDY)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate([prompt(1)], SamplingParams(temperature=9.0))
    with pytest.raises(InvalidRequestError, match="2 sampling parameters do not fit 1 prompts"):
        llm.generate([prompt(1)], [GREEDY, GREEDY])
    free_all(llm)


@pytest.mark.parametrize(
    ("option", "value", "words"), read_table("engine.refuses_impossible_options")
)
def test_refuses_impossible_options(folder: Path, option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), **{option: value})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dtype=float load_format=dummy", "dtype=float32 load_format=synthetic"),
        ("dtype=half load_format=hf", "dtype=float16 load_format=safetensors"),
        ("dtype=bf16 quantization=None", "dtype=bfloat16"),
    ],
)
def test_values_may_have_vllm_names(folder: Path, theirs: str, ours: str) -> None:
    outputs = []
    for words in (theirs, ours):
        options = dict(word.split("=") for word in words.split())
        with start(folder, num_kv_blocks=8, **options) as engine:
            outputs.append(generate_tokens(engine, [prompt(1)], GREEDY))
    assert outputs[0] == outputs[1] != [[]]


def test_small_caches_lower_the_context_length_and_large_models_are_refused(folder: Path) -> None:
    with start(folder, num_kv_blocks=8) as engine:
        with pytest.raises(ContextLengthError, match="33"):
            engine.generate([prompt(1, 60)], GREEDY)
        longest = complete(engine, 1, 20, max_tokens=None, ignore_eos=True)
        assert (len(longest.token_ids), longest.finish_reason) == (13, "length")
    with pytest.raises(ResourceError, match="GiB"):
        LLM("minimax-m2", load_format="synthetic", max_model_len=128)
