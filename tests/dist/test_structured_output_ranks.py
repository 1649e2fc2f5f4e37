import json
import re
import time
from collections.abc import Iterator

import pytest

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.core import executor

NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
POINT_SCHEMA = {
    "type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["x"],
}  # fmt: skip
POINT = Grammar(kind="json_schema", text=json.dumps(POINT_SCHEMA))


def nano(ranks: int) -> LLM:
    sizes = {"tensor_parallel_size": ranks, "max_model_len": 256}
    return LLM("nano", dtype="float32", num_threads=1, **sizes)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    with nano(2) as llm:
        yield llm


def texts(llm: LLM) -> list[str]:
    spaces = {198: -20.0, 220: -20.0, 257: -20.0}
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, grammar=NAME),
        SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=NAME, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=100, grammar=POINT, logit_bias=spaces),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    ]
    return [found.outputs[0].text for found in llm.generate(["Name and age:"] * 4, params)]


def test_two_ranks_follow_a_grammar_as_one_does(two_ranks: LLM) -> None:
    with nano(1) as one:
        single = texts(one)
    assert texts(two_ranks) == single
    assert all(re.fullmatch(NAME.text, text) for text in single[:2])
    assert 0 <= json.loads(single[2])["x"] <= 99


def test_ranks_that_wait_for_masks_can_be_stopped(
    two_ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This must be the last test of these two ranks."""
    monkeypatch.setattr(executor, "SHUTDOWN_SECONDS", 120.0)
    llm = two_ranks
    params = SamplingParams(max_tokens=40, grammar=NAME, seed=1, temperature=1.0)
    prompt = llm.tokenizer.encode("Name:")
    (request,) = next(llm._sequences([prompt], llm._admit([prompt], params)))[0][1:2]
    llm._loop._scheduler.add(request)
    plans = llm._loop._scheduler.plan()
    assert plans is not None and plans[0].grammar_rows == [0]
    ranks = llm._loop.executor
    ranks.launch(plans)  # no masks are ever sent
    time.sleep(0.3)
    llm.shutdown()
    assert all(child.exit_code in (0, 1) for child in ranks._processes)  # type: ignore[attr-defined]  # nobody was killed
