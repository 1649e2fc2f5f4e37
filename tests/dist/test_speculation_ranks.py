import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.config.grammar import Grammar

LETTERS = Grammar(kind="regex", text="[a-z ]{15,20}")
PARAMS = [
    SamplingParams(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=1, temperature=1.0, top_k=40, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(seed=2, temperature=0.9, frequency_penalty=0.8, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, temperature=1.0, max_tokens=12, grammar=LETTERS),
]
PROMPTS = [list(range(30 + start, 70)) for start in range(4)]


def test_two_ranks_with_drafts_give_the_text_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(**options: Any) -> tuple[list[tuple[object, object]], list[list[int]], int]:
        with LLM(
            "nano", device="cpu", tensor_parallel_size=2, num_threads=1, max_model_len=128,
            **options,
        ) as llm:  # fmt: skip
            outputs = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS)]
            tokens = [output.token_ids for output in outputs]
            accepted = llm.stats().num_accepted_tokens
            return [(output.token_ids, output.logprobs) for output in outputs], tokens, accepted

    expected, tokens, accepted = answers()
    assert accepted == 0
    file = tmp_path / "known.json"
    file.write_text(
        json.dumps([[seed, *each] for seed, each in enumerate(zip(PROMPTS, tokens, strict=True))])
    )
    spawn = supervision.spawn

    def drafting(module: str, *args: str) -> subprocess.Popen[bytes]:
        if not module.endswith("rank_process"):
            return spawn(module, *args)
        return spawn("tests.dist.ranks", "with drafts", *args, str(file))

    monkeypatch.setattr(supervision, "spawn", drafting)
    found, _, accepted = answers()
    assert found == expected
    assert accepted > 15
