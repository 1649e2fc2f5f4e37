"""Make models and requests that compare layouts of ranks, and replace rank processes."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.config.grammar import Grammar
from negamax.engine.llm import Generation
from tests import tiny, tiny_m3
from tests.loop_driver import token_ids

# In bfloat16 the order of sums over ranks would decide near ties.
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
# a long prompt among short ones, and more prompts than ranks
PROMPTS = [
    list(range(40, 120)), list(range(30, 60)), list(range(31, 61)), list(range(32, 62)),
    list(range(33, 60)), [77], list(range(40, 240, 4)),
]  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, grammar=NAME),
    SamplingParams(temperature=1.0, seed=1, max_tokens=16, grammar=NAME, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, top_k=40, max_tokens=14, logprobs=1),
    SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.8, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=5, top_p=0.8, max_tokens=7, prompt_logprobs=0),
]

SHARED = [[*range(3, 40), 40 + at] for at in range(16)]
SHORT = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def make_sizes(**sizes: int) -> dict[str, int]:
    return {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 512} | sizes  # fmt: skip


def save_m2(folder: Path, *, vocab_size: int = 4160, num_layers: int = 4) -> str:
    """Save an M2 model. A vocabulary of 4160 fits the tokenizer, so that grammars work."""
    sizes = make_sizes(vocab_size=vocab_size, num_hidden_layers=num_layers)
    return str(tiny.save(tiny.make_model(5, **sizes), folder))


def save_m3(folder: Path) -> str:
    sizes = tiny_m3.random_sizes(
        5, num_hidden_layers=3, vocab_size=96, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32,
        num_local_experts=8, index_n_heads=2, mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", *["minimax_m3_sparse"] * 2],
    )  # fmt: skip
    return str(tiny.save(tiny_m3.make_model(5, **sizes), folder))


def read_logprobs(made: list[Generation]) -> list[float]:
    return [
        entry.logprob
        for each in made
        for entry in [*(each.outputs[0].logprobs or []), *(each.prompt_logprobs or [])]
    ]


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    assert token_ids(found) == token_ids(expected)
    assert read_logprobs(found) == pytest.approx(read_logprobs(expected), abs=1e-3)


def replace_ranks(patch: pytest.MonkeyPatch, kind: str, *more: str) -> None:
    """Start `kind` of `tests.dist.ranks` with arguments `more` in place of each rank process."""
    spawn = supervision.spawn

    def replaced(started: str, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        if started != "negamax.worker.rank_process":
            return spawn(started, *args, **options)
        return spawn("tests.dist.ranks", kind, *args, *more)

    patch.setattr(supervision, "spawn", replaced)


def read_exit_codes(llm: LLM) -> list[int | None]:
    return [child.exit_code for child in llm._loop.executor._processes]  # type: ignore[attr-defined]
