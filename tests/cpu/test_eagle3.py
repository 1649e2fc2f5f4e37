"""EAGLE3 drafts equal plain PyTorch on transformers' hidden states, for any chunking.

The answers equal those of a run without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graph_support
import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.base import env
from negamax.base.errors import CheckpointError, ResourceError
from negamax.models.eagle3.config import FAMILY, read_spec
from negamax.models.memory import draft_bytes, weight_bytes
from negamax.scheduler.draft_length import FixedDraftLength
from negamax.worker import kv_cache
from tests import tiny, tiny_draft, tiny_m3
from tests.tiny_draft import VARIANTS, Guess

if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
IDS = [1, 2, 3]  # counted by layer outputs, as trainers do
LAYERS = (2, 3, 4)
NUM_DRAFT_TOKENS = 3
PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 17, 21, 30)
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 1.0, 0.0, 1.0))
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 3},
    "preempted": {"num_kv_blocks": 30},
    "rests in between": {},
}


@pytest.fixture(scope="module")
def target() -> MiniMaxM2ForCausalLM:
    return tiny.make_model(5, **SIZES)


@pytest.fixture(scope="module")
def folder(target: MiniMaxM2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(target, tmp_path_factory.mktemp("model"))


def engine(
    folder: Path, draft: str | None, more: dict[str, Any] | None = None, **options: Any
) -> LLM:
    if draft is not None:
        options["speculative_config"] = {
            "method": "eagle3", "model": draft, "num_speculative_tokens": NUM_DRAFT_TOKENS,
            "adaptive": False, **(more or {}),
        }  # fmt: skip
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    return LLM(str(folder), **fixed | {"block_size": 4} | options)


def outputs(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with engine(folder, None) as llm:
        return outputs(llm)


def make_draft(variant: str, folder: Path) -> tuple[dict[str, Any], Any, str]:
    return tiny_draft.make(variant, folder / "draft", vocab_size=96, hidden_size=32, ids=IDS)


def count_wrong(
    seen: list[Guess],
    target: MiniMaxM2ForCausalLM,
    outputs: list[list[int]],
    config: dict[str, Any],
    tensors: tiny_draft.Weights,
) -> int:
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    wrong, compared = tiny_draft.count_wrong(seen, target, texts, LAYERS, config, tensors)
    assert compared > 100
    return wrong


CASES = [(variant, "plain") for variant in VARIANTS]
CASES += [("plain", options) for options in OPTIONS if options != "plain"]
CASES += [("biases, two layers", "chunks")]


class Resting(FixedDraftLength):
    """Drafts in two of five steps; the caches must hold the other steps' streams."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFT_TOKENS)
        self.turns = cycle([0, 0, 0, NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS])

    def choose(self, num_rows: int) -> int:
        return next(self.turns)


@pytest.mark.parametrize(("variant", "options"), CASES)
def test_drafts_are_those_of_plain_pytorch_and_change_no_answer(
    folder: Path,
    target: MiniMaxM2ForCausalLM,
    expected: list[list[int]],
    tmp_path: Path,
    variant: str,
    options: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors, draft = make_draft(variant, tmp_path)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft, **OPTIONS[options]) as llm:
        if options == "rests in between":
            (scheduler,) = llm._loop._scheduler.ranks
            scheduler._draft_length = Resting()
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # from the prefix cache
        while llm._loop.has_work:
            llm._loop.step()
        stats = llm.stats()
    assert stats.cached_prompt_tokens > 0 and stats.num_free_kv_blocks == stats.num_kv_blocks
    assert options != "preempted" or stats.preemption_count > 0
    assert count_wrong(seen, target, expected, config, tensors) == 0


def test_layers_that_are_off_by_one_are_seen(
    folder: Path,
    target: MiniMaxM2ForCausalLM,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors, draft = make_draft("plain", tmp_path)
    layers = {"eagle_aux_hidden_state_layer_ids": IDS}  # layer inputs: one layer too early
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft, more=layers) as llm:
        assert outputs(llm) == expected
    assert count_wrong(seen, target, expected, config, tensors) > 50


def test_captured_steps_guess_the_same(
    folder: Path, target: MiniMaxM2ForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, draft = make_draft("plain", tmp_path)
    pool = graph_support.RepeatedSteps()
    graph_support.install(monkeypatch, graph_support.runtime(pool, is_asynchronous=True))
    graph_support.watch_reads(monkeypatch)  # keeps the values to read from being overwritten
    sizes = {"max_num_seqs": len(PROMPTS), "max_num_batched_tokens": sum(map(len, PROMPTS))}
    with engine(folder, None, **sizes) as llm:
        without = outputs(llm)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft, **sizes) as llm:
        assert outputs(llm) == without
    assert count_wrong(seen, target, without, config, tensors) == 0
    assert pool.num_replays > 0


def test_a_head_in_fp8_guesses_nearly_the_same(
    folder: Path,
    target: MiniMaxM2ForCausalLM,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors, draft = make_draft("plain", tmp_path)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft, {"draft_lm_head_quantization": "fp8"}) as llm:
        assert outputs(llm) == expected
        # (a CPU dequantizes it)
        worker = llm._loop.executor._worker  # type: ignore[attr-defined]
        held = worker.runner.config.draft.spec.quantization
    assert held.fields == {"format": "fp8_per_channel", "only": "lm_head"}
    assert 0 < count_wrong(seen, target, expected, config, tensors) < 40


def test_drafts_that_are_drawn_change_no_answer_either(
    folder: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, draft = make_draft("plain", tmp_path)
    found = []
    for method in ("greedy", "probabilistic"):
        with monkeypatch.context() as patch:
            seen = tiny_draft.watch(patch.setattr)
            with engine(folder, draft, {"draft_sample_method": method}) as llm:
                assert outputs(llm) == expected
        found.append({tuple(known): drafts for known, drafts in seen})
    greedy = [tuple(PROMPTS[row] + expected[row][:5]) for row in (0, 2)]
    drawn = [tuple(PROMPTS[row] + expected[row][:n]) for row in (1, 3) for n in range(1, 9)]
    assert all(found[0][known] == found[1][known] for known in greedy)
    assert sum(found[0][known] != found[1][known] for known in drawn) > 8


@pytest.mark.parametrize("name", ["folder", "bundled"])
def test_a_draft_without_weights_is_drawn(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For benchmarks: the answers are those of synthetic weights without a draft."""
    _, _, draft = make_draft("plain", tmp_path)
    if name == "bundled":
        spec = read_spec(json.loads((Path(draft) / "config.json").read_text()))
        monkeypatch.setitem(FAMILY.bundled, "tiny-draft", spec)  # type: ignore[index]
        draft = "tiny-draft"
    with engine(folder, None, load_format="synthetic") as llm:
        without = outputs(llm)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft, load_format="synthetic") as llm:
        assert outputs(llm) == without
    guessed = {token for _, drafts in seen for token in drafts}
    assert len(guessed) > 10 and all(0 <= token < 96 for token in guessed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("midlayer.self_attn.q_proj.weight"),
            "missing from the checkpoint: layers.0.self_attn.q_proj.weight",
        ),
        (lambda t: t.pop("d2t"), "1 tensor is missing from the checkpoint: d2t"),
        (lambda t: t.pop("lm_head.weight"), "missing from the checkpoint: lm_head.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "1 tensor is not part of this model: extra"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), "fc.weight has shape [32, 64]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t has dtype F32; supported: I64, I32"),
        (lambda t: t.update(d2t=t["d2t"].int() + 60), "tensor d2t gives 40 tokens"),
        (lambda t: t.update(d2t=t["d2t"] + 60), "tensor d2t gives 40 tokens"),
        (lambda t: t["t2d"].logical_not_(), "tensor t2d marks 56 tokens of the model, and d2t"),
        (lambda t: t.update(t2d=t["t2d"][1:]), "t2d has shape [95]"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "NaN or infinite: norm.weight"),
        (
            lambda t: t.update({"layers.1.x": torch.ones(2)}),
            "num_hidden_layers in config.json is 1",
        ),
    ],
)
def test_files_of_a_draft_are_checked_as_those_of_a_model(
    folder: Path, tmp_path: Path, change: Callable[[tiny_draft.Weights], None], words: str
) -> None:
    config, tensors, draft = make_draft("plain", tmp_path)
    change(tensors)
    tiny_draft.save(config, tensors, Path(draft))
    with pytest.raises(CheckpointError) as caught:
        engine(folder, draft)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"draft {draft}: ")


def test_offsets_of_32_bits_are_read_as_those_of_64(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, draft = make_draft("plain", tmp_path)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft) as llm:
        outputs(llm)
    guesses = seen[:]
    seen.clear()
    tiny_draft.save(config, tensors | {"d2t": tensors["d2t"].int()}, Path(draft))
    with engine(folder, draft) as llm:
        outputs(llm)
    assert seen == guesses != []


def test_memory_that_a_draft_takes_is_counted_and_refused_with_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors, draft = make_draft("plain", tmp_path)
    with engine(folder, None) as llm:
        config = llm._loop.executor._worker.runner.config  # type: ignore[attr-defined]
        alone = sum(one.heads * one.width * 4 for layer in config.kv_caches for one in layer)
    with engine(folder, draft) as llm:
        config = llm._loop.executor._worker.runner.config  # type: ignore[attr-defined]
        both = sum(one.heads * one.width * 4 for layer in config.kv_caches for one in layer)
        held = draft_bytes(config.draft.spec, dtype="float32")
    assert both - alone == 2 * 2 * 8 * 4
    of_draft = sum(one.nbytes for name, one in tensors.items() if name != "t2d")
    assert held == of_draft
    monkeypatch.setattr(kv_cache, "GIB", 1)
    room = weight_bytes(config.spec, dtype="float32") + of_draft
    monkeypatch.setattr(env, "available_memory", lambda: room - 1)
    with pytest.raises(ResourceError, match=f"{of_draft}.0 GiB of them are the draft's"):
        engine(folder, draft)


def test_a_draft_of_minimax_m3_reads_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover sparse attention, whose last blocks are verified in part, and Gemma's norms."""
    sizes = tiny_m3.random_sizes(
        3, vocab_size=96, hidden_size=32, num_hidden_layers=5, index_block_size=16,
        mlp_layer_types=["dense", *["sparse"] * 4], index_topk_blocks=2, index_local_blocks=1,
        layer_types=["full_attention", *["minimax_m3_sparse"] * 4],
    )  # fmt: skip
    target = tiny_m3.make_model(3, **sizes)
    tiny.save(target, tmp_path / "model")
    config, tensors, draft = make_draft("full vocabulary, norms", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [PROMPTS[1] * 4, PROMPTS[3]]

    def texts(draft: str | None) -> list[list[int]]:
        with engine(tmp_path / "model", draft, block_size=16, max_model_len=128) as llm:
            outputs = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
            return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

    expected = texts(None)
    seen = tiny_draft.watch(monkeypatch.setattr)
    assert texts(draft) == expected
    wrong, compared = tiny_draft.count_wrong(seen, target, expected, LAYERS, config, tensors)
    assert compared > 100
    assert wrong == 0
