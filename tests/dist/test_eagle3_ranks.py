import json
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from tests import tiny, tiny_draft
from tests.dist.engines import COMMON, replace_ranks
from tests.layouts import full, parallel

SIZES = tiny.small_sizes(num_hidden_layers=5, max_position_embeddings=64)
PROMPTS = [list(range(3 + start, 24)) for start in range(3)]
PARAMS = [
    SamplingParams(seed=seed, temperature=seed / 2, max_tokens=20, ignore_eos=True)
    for seed in range(3)
]


# The first of three stages has none of the layers that the draft reads.
CASES = [
    ("biases, two layers", {"tp": 2}),
    ("dspark", {"tp": 2}),
    full("dflash", {"tp": 2}),
    full("dspark", {"pp": 3}),
    full("dspark, causal", {"pp": 2, "tp": 2}),
    full("borrows embedding and head", {"tp": 2}),
    full("borrows embedding and head", {"pp": 3}),
    full("biases, two layers", {"pp": 2, "pp_layer_partition": "4,1"}),
    full("borrows embedding and head", {"pp": 2, "tp": 2}),
    full("plain", {"pp": 2, "dp": 2}),
]


@pytest.mark.parametrize(("variant", "layout"), CASES, ids=str)
def test_ranks_propose_the_drafts_of_plain_pytorch(
    variant: str, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.make_model(5, **SIZES)
    tiny.save(target, tmp_path / "model")
    sizes = {"vocab_size": 96, "hidden_size": 32}
    config, tensors, draft = tiny_draft.make(variant, tmp_path / "draft", ids=[1, 2, 3], **sizes)
    replace_ranks(monkeypatch, "recording drafts", str(tmp_path))

    def texts(**options: Any) -> list[list[int]]:
        limits = {"block_size": 4, "max_num_batched_tokens": 16}
        with LLM(str(tmp_path / "model"), **COMMON, **limits, **options) as llm:
            outputs = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]
            return [prompt + list(out) for prompt, out in zip(PROMPTS, outputs, strict=True)]

    expected = texts()
    speculative = {"model": draft, "num_speculative_tokens": 3, "adaptive": False}
    assert texts(**parallel(**layout), speculative_config=speculative) == expected
    seen = [json.loads(file.read_text()) for file in tmp_path.glob("rank*")]
    proposed = [of_rank for of_rank in seen if of_rank]  # draft tokens of the last stage
    of_group, num_groups = layout.get("tp", 1), layout.get("dp", 1)
    assert len(proposed) == of_group * num_groups
    assert len(seen) == len(proposed) * layout.get("pp", 1)
    if num_groups == 1:
        assert all(of_rank == proposed[0] for of_rank in proposed)
    args = target, expected, (2, 3, 4), config, tensors
    found = [tiny_draft.count_differing(each, *args) for each in proposed]
    assert sum(compared for _, compared in found) > 100
    assert not any(differing for differing, _ in found)
