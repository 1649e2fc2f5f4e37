"""Make requests with grammars for the tokenizer of the built-in model."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import negamax
from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar, Marker, Reasoning
from negamax.engine.grammar.client import GrammarClient
from negamax.engine.llm import Completion
from negamax.models.minimax_m2.chat import MINIMAX_M2, M2Calls
from negamax.text.grammar.tool_calls import tool_grammar
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
TAGGED = {
    "type": "tag",
    "begin": "<p>",
    "content": {"type": "json_schema", "json_schema": PERSON},
    "end": "</p>",
}
TOKENIZER = Tokenizer.from_folder(Path(negamax.__file__).parent / "assets" / "nano")
SPACES = {i: -8.0 for i in range(4096) if TOKENIZER.token_text(i).isspace()}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Declare a tool whose properties are required."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters |= {"required": list(properties)} if properties else {}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(value: Any, *, strict: bool = True) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value), strict=strict)


def reasoning(state: str = "open", *, by_id: bool = True) -> Reasoning:
    """Return reasoning tags that are single tokens, or several tokens each if not `by_id`."""
    closer = "</think>" if by_id else "</mm:think>"
    closing = f"\n{closer}\n\n" if by_id and state == "open" else closer

    def tag(text: str) -> Marker:
        return Marker(text, TOKENIZER.token_id(text) if by_id else None)

    return Reasoning(
        state="open" if state == "open" else "optional",
        opener=tag("<think>" if by_id else "<mm:think>"),
        closer=tag(closer),
        call_opener=tag("<minimax:tool_call>"),
        closing_ids=tuple(TOKENIZER.encode(closing)),
        max_newlines=3,
    )


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def ebnf(text: str) -> Grammar:
    return Grammar(kind="ebnf", text=text)


def choice(*texts: str) -> Grammar:
    return Grammar(kind="choice", text=json.dumps(texts))


def require_call(tools: Sequence[Any], name: str | None = None) -> Grammar:
    """Return the grammar of a required call of tool `name`, or of any tool, in M2's format."""
    style = M2Calls(MINIMAX_M2.tag_ids(TOKENIZER))
    grammar = tool_grammar(tools, style, choice="function" if name else "required", name=name)
    assert grammar is not None
    return grammar


def seeded(seed: int, **fields: Any) -> SamplingParams:
    """Sample at temperature 1, with a bias against white space, which nano prefers."""
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 400, "logit_bias": SPACES, **fields}
    )


def outputs(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Completion]:
    return [generation.outputs[0] for generation in llm.generate(list(prompts), list(params))]


def kill(client: GrammarClient | None, number: int = signal.SIGKILL) -> None:
    assert client is not None and client.pid is not None
    os.kill(client.pid, number)


def says(llm: LLM, word: str) -> bool:
    """Return whether `llm` answers `word` under a grammar; the request starts a grammar process."""
    return outputs(llm, ["?"], [seeded(1, grammar=choice(word))])[0].text == word


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value)[:3] == ["mood", "age", "name"] and set(value) <= set(PERSON["properties"])  # type: ignore[call-overload]
    assert value["mood"] in ("good", "bad") and 0 <= value["age"] <= 130 and len(value["name"]) <= 8
    return set(value.get("tags", ())) <= {"a", "b"}
