from typing import Any

import pytest
from request_support import chat

from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import InvalidRequestError

NAMES = ("first", "second", "third")


Choice = tuple[list[dict[str, Any]] | None, CallChoice]


def chat_choice(choice: dict[str, Any], *, names: tuple[str, ...] = NAMES, **fields: Any) -> Choice:
    request = chat(tools=[function(name) for name in names], tool_choice=choice, **fields)
    offered = request.offered_tools
    return offered, request.call_choice(offered)


def responses_choice(choice: dict[str, Any], **fields: Any) -> Choice:
    home = {"type": "namespace", "name": "home", "tools": [flat("lamp")]}
    tools = [*map(flat, NAMES), flat("patch", "custom"), home, {"type": "web_search"}]
    body = {"input": "Hello", "tools": tools, "tool_choice": choice, **fields}
    return ResponsesRequest.parse(body).choice()


def of_chats(*tools: object, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def of_responses(*tools: object, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def function(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def flat(name: object, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, "name": name}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "shape",
    [of_chats(function("first"), function("third")), of_responses(flat("first"), flat("third"))],
)
def test_some_shown_tools_may_be_called(shape: dict[str, Any], mode: str, parallel: bool) -> None:
    (shape.get("allowed_tools") or shape)["mode"] = mode
    for made in (chat_choice, responses_choice):
        tools, choice = made(shape, parallel_tool_calls=parallel)
        assert [tool["function"]["name"] for tool in tools or ()][:3] == list(NAMES)
        assert choice == CallChoice(mode, parallel=parallel, allowed=("first", "third"))
        allowed = choice.callable_tools(tools) or []
        assert [tool["function"]["name"] for tool in allowed] == ["first", "third"]
        assert choice.is_forced == (mode == "required")


def test_choices_without_names_and_of_other_tools() -> None:
    tools = [function(name) for name in NAMES]
    assert CallChoice("required").callable_tools(tools) is tools
    assert CallChoice("none").callable_tools(None) is None
    tools = flat("patch", "custom"), flat("lamp"), {"type": "web_search"}, flat("home.lamp")
    assert responses_choice(of_responses(*tools))[1].allowed == ("patch", "home.lamp")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (of_chats(function("first"), function("secnd")), ".allowed_tools.tools[1].function.name"),
        (of_responses(flat("fourth")), ".tools[0].name"),
        (of_chats(function("first"), function(7)), ".allowed_tools.tools[1].function.name"),
        (of_chats(flat("first") | {"function": 1}), ".allowed_tools.tools[0].function.name"),
        (of_chats("first"), ".allowed_tools.tools[0]"),
        (of_chats(function("first"), mode="none"), ".allowed_tools.mode"),
        (of_responses(flat("first"), mode="sometimes"), ".mode"),
        (of_chats(), ".allowed_tools.tools"),
        ({"type": "allowed_tools"}, ".tools"),
        ({"type": "allowed_tools", "allowed_tools": ["first"]}, ".allowed_tools"),
        (of_responses(*[flat("first")] * 2000), ".tools"),
        (of_responses(flat("first"), {"type": 3}), ".tools[1].type"),
    ],
)
def test_refuses_wrong_choices_by_their_place(choice: dict[str, Any], param: str) -> None:
    for made in (chat_choice, responses_choice):
        with pytest.raises(InvalidRequestError) as caught:
            made(choice)
        assert (caught.value.param, caught.value.http_status) == (f"tool_choice{param}", 400)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("build", "choice", "words"),
    [
        (chat_choice, of_chats(function("secnd")), r"not a declared tool\. Did you mean 'second'"),
        (responses_choice, of_responses({"type": "web_search"}), "no tool that can be called here"),
        (chat_choice, of_chats({"type": "web_search"}), "send 'function'"),
    ],
    ids=["misspelt", "all run elsewhere", "chats have functions only"],
)
def test_refusal_names_the_remedy(build: Any, choice: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        build(choice)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_no_tools_means_no_allowed_ones(mode: str) -> None:
    with pytest.raises(InvalidRequestError, match="'first' is not a declared tool"):
        chat_choice(of_chats(function("first"), mode=mode), names=())
