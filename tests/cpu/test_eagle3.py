"""EAGLE3 drafts guess what plain PyTorch guesses from the hidden states of transformers' model,
however a prompt and its answer are cut into steps; and answers are those of a run without drafts.
"""

from __future__ import annotations

from operator import ne
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MiniMaxM2ForCausalLM

from negamax import LLM, SamplingParams
from negamax.worker.eagle3 import Eagle3Proposer
from tests import tiny, tiny_draft
from tests.tiny_draft import VARIANTS, Oracle

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
IDS = [1, 2, 3]  # what leaves them, as trainers count
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
}


@pytest.fixture(scope="module")
def target() -> MiniMaxM2ForCausalLM:
    return tiny.make_model(5, **SIZES)


@pytest.fixture(scope="module")
def folder(target: MiniMaxM2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(target, tmp_path_factory.mktemp("model"))


def engine(folder: Path, draft: str | None, **options: Any) -> LLM:
    if draft is not None:
        options["speculative_config"] = {
            "method": "eagle3", "model": draft, "num_speculative_tokens": NUM_DRAFT_TOKENS,
        }  # fmt: skip
    return LLM(
        str(folder), dtype="float32", block_size=4, num_threads=1, **{"device": "cpu"} | options
    )


def outputs(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with engine(folder, None) as llm:
        return outputs(llm)


def make_draft(variant: str, folder: Path, **fields: Any) -> tuple[dict[str, Any], Any, str]:
    options = VARIANTS[variant]
    parts = ("own_embedding", "own_head", "torchspec")
    own = {name: value for name, value in options.items() if name not in parts}
    config = tiny_draft.config(
        vocab_size=96, target_hidden_size=32, eagle_config={
            "eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True,
        },
    ) | own | fields  # fmt: skip
    made = {name: options[name] for name in ("own_embedding", "own_head") if name in options}
    tensors = tiny_draft.weights(config, 7, **made)
    path = tiny_draft.save(config, tensors, folder / "draft", torchspec="torchspec" in options)
    return config, tensors, path


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Gets what every proposal is made for, and the proposal."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = Eagle3Proposer.propose

    def noting(self: Any, states: Any, slots: Tensor, lengths: Tensor, *args: Any) -> Tensor:
        drafts = propose(self, states, slots, lengths, *args)
        requests = args[1]
        for slot, length, row in zip(slots.tolist(), lengths.tolist(), drafts, strict=True):
            seen.append((requests.tokens[slot, :length].tolist(), row.tolist()))
        return drafts

    monkeypatch.setattr(Eagle3Proposer, "propose", noting)
    return seen


def streams_of(target: MiniMaxM2ForCausalLM, tokens: list[int]) -> list[Tensor]:
    with torch.no_grad():
        found = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # (transformers norms what leaves the last layer, which is none of these)
    return [found[layer][0] for layer in LAYERS]


CASES = [(variant, "plain") for variant in VARIANTS]
CASES += [("plain", options) for options in OPTIONS if options != "plain"]


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
    seen = watch(monkeypatch)
    with engine(folder, draft, **OPTIONS[options]) as llm:
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # from the prefix cache
        while llm._loop.has_work:
            llm._loop.step()
        stats = llm._loop.stats()
    assert stats.cached_prompt_tokens > 0 and stats.num_free_kv_blocks == stats.num_kv_blocks
    assert options != "preempted" or stats.preemption_count > 0
    oracle = Oracle(
        config,
        tensors,
        embedding=target.model.embed_tokens.weight.detach(),
        head=target.lm_head.weight.detach(),
    )
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    streams = {tuple(text): streams_of(target, text) for text in texts}
    wrong, compared = 0, 0
    for known, drafts in seen:
        text = next((text for text in streams if list(text[: len(known)]) == known), None)
        if text is None:
            continue  # a row in flight behind its end
        read = [one[: len(known) - 1] for one in streams[text]]
        guesses = oracle.guess(read, torch.tensor(known), NUM_DRAFT_TOKENS)
        left = min(NUM_DRAFT_TOKENS, len(text) - len(known))  # others are never asked for
        compared += left
        wrong += sum(map(ne, drafts[:left], guesses[:left]))
    assert compared > 100
    assert wrong == 0
