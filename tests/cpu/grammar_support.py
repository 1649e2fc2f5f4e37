"""Requests with grammars on the embedded model, and checks that they leave no state."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import negamax
from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar, Marker, Reasoning
from negamax.engine.llm import Completion
from negamax.scheduler.step import SequenceUpdate
from negamax.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["mood", "age", "name"],
    "additionalProperties": False,
}


TOKENIZER = Tokenizer.from_folder(Path(negamax.__file__).parent / "assets" / "nano")


SPACES = {i: -8.0 for i in range(4096) if TOKENIZER.token_text(i).isspace()}


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def reasoning(llm: LLM, state: str = "open", *, by_id: bool = True) -> Reasoning:
    closing = (
        "</mm:think>" if not by_id else "</think>" if state == "optional" else "\n</think>\n\n"
    )

    def tag(text: str) -> Marker:
        return Marker(text, llm.tokenizer.token_id(text) if by_id else None)

    return Reasoning(
        state="open" if state == "open" else "optional",
        opener=tag("<think>"),
        closer=tag("</think>" if by_id else "</mm:think>"),
        call_opener=tag("<minimax:tool_call>"),
        closing_ids=tuple(llm.tokenizer.encode(closing)),
        max_newlines=3,
    )


def seeded(seed: int, **fields: Any) -> SamplingParams:
    """Sample at temperature 1, with a bias against the embedded model's habit of white space."""
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 400, "logit_bias": SPACES, **fields}
    )


def outputs(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Completion]:
    return [generation.outputs[0] for generation in llm.generate(list(prompts), list(params))]


def run_out(llm: LLM) -> None:
    while llm._loop.has_work:
        llm._loop.step()
    stats = llm.stats()
    assert (
        stats.num_running == stats.num_waiting == 0
        and stats.num_free_kv_blocks == stats.num_kv_blocks
    )
    assert not llm._loop._grammars._rules and not llm._loop._grammars._by_key


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value)[:3] == ["mood", "age", "name"] and set(value) <= set(PERSON["properties"])  # type: ignore[call-overload]
    assert value["mood"] in ("good", "bad") and 0 <= value["age"] <= 130 and len(value["name"]) <= 8
    return set(value.get("tags", ())) <= {"a", "b"}


def admitted(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Any]:
    tokens = [llm.tokenizer.encode(prompt) for prompt in prompts]
    return [group[0][1] for group in llm._sequences(tokens, llm._admit(tokens, list(params)))]


def drive(llm: LLM, requests: Sequence[Any]) -> dict[str, list[SequenceUpdate]]:
    updates: dict[str, list[SequenceUpdate]] = {request.request_id: [] for request in requests}
    for request in requests:
        llm._loop.add(request)
    while llm._loop.has_work:
        for update in llm._loop.step():
            updates[update.request_id].append(update)
    return updates
