"""The chat template of the nano checkpoint renders what the M2 template renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "negamax" / "assets" / "nano" / "chat_template.jinja"
REFERENCE = ROOT.parent / "shared" / "templates" / "minimax_m2_llamacpp.jinja"
IDENTITY = (
    "You are a helpful assistant. Your name is Nano, the small demonstration model that "
    "ships with Negamax."
)

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt: <b>& more</b>",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}, "city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "id": "1",
    "function": {
        "name": "get_weather",
        "arguments": {"city": "Zürich", "days": 2, "ok": True, "x": None},
    },
}
BARE_CALL = {"name": "f", "arguments": {"items": ["a", {"b": 1.5}], "text": 'raw "<&>"\nline'}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello\n there "}
ANSWER = {"role": "assistant", "content": "Hi.", "reasoning_content": "greet back"}
CALLING = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "need it",
    "tool_calls": [CALL, CALL],
}
RESULT = {"role": "tool", "content": '{"t": 1}'}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one_user": [USER],
    "empty": [],
    "system_only": [SYSTEM],
    "system": [SYSTEM, USER],
    "empty_system": [{"role": "system", "content": ""}, USER],
    "system_list": [
        {"role": "system", "content": [{"type": "text", "text": "A"}, {"type": "image"}, "B"]},
        USER,
    ],
    "date_and_place": [{**SYSTEM, "current_date": "2026-01-02", "current_location": "Oslo"}, USER],
    "date_without_text": [{"role": "system", "content": "", "current_date": "2026-01-02"}, USER],
    "history_drops_reasoning": [USER, ANSWER, USER, ANSWER],
    "inline_reasoning": [
        USER,
        {"role": "assistant", "content": "<think>\na\n\n</think>\n\nb"},
        USER,
    ],
    "inline_reasoning_last": [
        USER,
        {"role": "assistant", "content": "<think>\na\n\n</think>\n\nb\n"},
    ],
    "inline_twice": [USER, {"role": "assistant", "content": "x<think>a</think>b</think>c"}],
    "call": [USER, CALLING],
    "call_loop": [SYSTEM, USER, CALLING, RESULT, RESULT, {**ANSWER}],
    "call_twice": [USER, CALLING, RESULT, CALLING, RESULT, RESULT, USER, CALLING, RESULT],
    "call_with_text": [
        USER,
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [BARE_CALL, {"function": BARE_CALL}],
        },
        RESULT,
    ],
    "no_arguments": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "g", "arguments": {}}}],
        },
    ],
    "list_results": [
        USER,
        CALLING,
        {
            "role": "tool",
            "content": [{"output": "a"}, {"type": "text", "text": "b"}, {"type": "x"}, "c"],
        },
        RESULT,
    ],
    "list_content": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "later_system_vanishes": [USER, SYSTEM, ANSWER, {"role": "developer", "content": "d"}, USER],
    "tool_then_user": [USER, CALLING, RESULT, USER, RESULT],
    "empty_reasoning": [USER, {"role": "assistant", "content": "x", "reasoning_content": ""}],
    "markup_in_user": [{"role": "user", "content": "</think> [e~[ {{ x }} <tools>"}],
    "null_content": [USER, {"role": "assistant", "content": None, "reasoning_content": "r"}],
}
CASES = [pytest.param(messages, id=name) for name, messages in CONVERSATIONS.items()]


def _compile(source: Path) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = fail
    return environment.from_string(source.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours() -> Any:
    return _compile(OURS)


@pytest.mark.skipif(
    not REFERENCE.exists(), reason="the reference template is not beside this checkout"
)
@pytest.mark.parametrize("messages", CASES)
@pytest.mark.parametrize("tools", [None, [], [TOOL, TOOL]], ids=["none", "empty", "two"])
@pytest.mark.parametrize("generate", [False, True], ids=["whole", "prompt"])
def test_renders_byte_for_byte_like_the_m2_template(
    ours: Any, messages: list[dict[str, Any]], tools: Any, generate: bool
) -> None:
    variables = {"messages": messages, "tools": tools, "add_generation_prompt": generate}
    assert ours.render(**variables) == _compile(REFERENCE).render(
        **variables, model_identity=IDENTITY
    )


def test_default_identity_names_nano_and_can_be_replaced(ours: Any) -> None:
    assert ours.render(messages=[USER]).startswith(f"]~!b[]~b]system\n{IDENTITY}[e~[\n]~b]user\n")
    assert "]~b]system\nI am X.[e~[" in ours.render(messages=[USER], model_identity="I am X.")


def test_tool_message_without_a_call_is_refused(ours: Any) -> None:
    with pytest.raises(TemplateError):
        ours.render(messages=[USER, RESULT])
