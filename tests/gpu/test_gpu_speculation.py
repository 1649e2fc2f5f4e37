from pathlib import Path
from typing import Any

import pytest
from test_gpu_engine import AGREEMENT, GREEDY, agreement, plain_answers, prompts, skip_without

from negamax import LLM
from tests import tiny_draft

EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3, "adaptive": False}
# options of the engine, and options of the draft
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "always three": ({}, EAGLE3),
    "adaptive": ({}, {**EAGLE3, "adaptive": True}),
    "seven": ({}, {**EAGLE3, "num_speculative_tokens": 7}),
    "eager": ({"enforce_eager": True}, EAGLE3),
    "chunked": ({"max_num_batched_tokens": 48}, EAGLE3),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, EAGLE3),
    "head in fp8": ({}, {**EAGLE3, "draft_lm_head_quantization": "fp8"}),
    "n-grams": ({}, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}),
    "block draft": ({}, {**EAGLE3, "method": "dspark"}),
    "block draft, eager": ({"enforce_eager": True}, {**EAGLE3, "method": "dspark"}),
    "block draft, fp8 cache": ({"kv_cache_dtype": "fp8"}, {**EAGLE3, "method": "dspark"}),
    "two ranks": ({"tensor_parallel_size": 2}, EAGLE3),
}


@pytest.mark.parametrize("model", ["nano", "nano-m3"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_without_drafts(model: str, way: str, tmp_path: Path) -> None:
    options, draft = WAYS[way]
    skip_without(options)
    if draft["method"] == "eagle3":
        draft = {**draft, "model": f"{model}-draft"}
    is_random = draft["method"] == "dspark"
    if is_random:
        sizes = {"vocab_size": 4160, "hidden_size": 256}
        draft = {**draft, "model": tiny_draft.make("dspark", tmp_path, ids=[0, 2, 3], **sizes)[2]}
    with LLM(model, device="cuda", speculative_config=draft, **options) as llm:
        made = [each.outputs[0].token_ids for each in llm.generate(prompts(llm), GREEDY)]
        stats = llm._loop.stats()
    share = agreement(plain_answers(model), made)
    length = 1 + stats.num_accepted_tokens / max(1, stats.num_drafts)
    print(f"agreement of {model}, {way}: {share:.4f}, {length:.2f} tokens per step with drafts")
    assert share >= (0.97 if "kv_cache_dtype" in options else AGREEMENT)
    assert is_random or length > (2.5 if draft.get("adaptive") is False else 1.2)
