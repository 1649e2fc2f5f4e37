import json
import re

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("xgrammar")

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar

NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
POINT_SCHEMA = {
    "type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["x"], "additionalProperties": False,
}  # fmt: skip
POINT = Grammar(kind="json_schema", text=json.dumps(POINT_SCHEMA))
DRAFT: dict[str, object] = {
    "method": "eagle3", "model": "nano-draft", "num_speculative_tokens": 3, "adaptive": False,
}  # fmt: skip
WAYS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},  # The checkpoint's top_k and top_p select the leading tokens.
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 3.0}},
)


@pytest.mark.parametrize("draft", [None, DRAFT], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_all_sampling_follows_grammar(enforce_eager: bool, draft: dict[str, object] | None) -> None:
    ways = list(enumerate(WAYS))
    held = [SamplingParams(seed=i, max_tokens=60, grammar=NAME, **way) for i, way in ways]
    free = [SamplingParams(seed=i, max_tokens=30, ignore_eos=True, **way) for i, way in ways]
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "speculative_config": draft}
    with LLM("nano", device="cuda", enforce_eager=enforce_eager, **sizes) as llm:
        asked = ["Name and age:"] * 12
        done = [found.outputs[0] for found in llm.generate(asked, [*held, *free])]
        spaces = {i: -8.0 for i in range(4096) if llm.tokenizer.token_text(i).isspace()}
        (point,) = llm.generate(
            "A point:", SamplingParams(seed=1, max_tokens=200, grammar=POINT, logit_bias=spaces)
        )
    for completion in done[:6]:
        assert completion.finish_reason == "stop" and re.fullmatch(NAME.text, completion.text)
    assert [len(completion.token_ids) for completion in done[6:]] == [30] * 6
    assert 0 <= json.loads(point.outputs[0].text)["x"] <= 99
