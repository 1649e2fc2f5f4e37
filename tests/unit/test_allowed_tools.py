from typing import Any

import pytest

from negamax.api.dialects.chat.schema import ChatRequest
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import InvalidRequestError

HELLO = [{"role": "user", "content": "Hello"}]
NAMES = ("first", "second", "third")


def chat_choice(
    choice: dict[str, Any], **fields: Any
) -> tuple[list[dict[str, Any]] | None, CallChoice]:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    request = ChatRequest.parse(
        {"messages": HELLO, "tools": tools, "tool_choice": choice, **fields}
    )
    offered = request.offered_tools
    return offered, request.call_choice(offered)


def responses_choice(
    choice: dict[str, Any], **fields: Any
) -> tuple[list[dict[str, Any]] | None, CallChoice]:
    tools = [
        *({"type": "function", "name": name} for name in NAMES),
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "home", "tools": [{"type": "function", "name": "lamp"}]},
        {"type": "web_search"},
    ]
    return ResponsesRequest.parse(
        {"input": "Hello", "tools": tools, "tool_choice": choice, **fields}
    ).choice()


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
def test_the_model_is_shown_all_tools_and_may_call_some(
    shape: dict[str, Any], mode: str, parallel: bool
) -> None:
    (shape.get("allowed_tools") or shape)["mode"] = mode
    for made in (chat_choice, responses_choice):
        tools, choice = made(shape, parallel_tool_calls=parallel)
        assert tools is not None and [tool["function"]["name"] for tool in tools][:3] == list(NAMES)
        assert choice == CallChoice(mode, parallel=parallel, allowed=("first", "third"))
        allowed = choice.callable_tools(tools)
        assert allowed is not None and [tool["function"]["name"] for tool in allowed] == [
            "first",
            "third",
        ]
        assert choice.is_forced == (mode == "required")


def test_without_such_a_choice_every_tool_can_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    assert CallChoice("required").callable_tools(tools) is tools
    assert CallChoice("none").callable_tools(None) is None


def test_responses_know_custom_tools_namespaces_and_what_runs_elsewhere() -> None:
    shape = of_responses(
        flat("patch", "custom"), flat("lamp"), {"type": "web_search"}, flat("home.lamp")
    )
    assert responses_choice(shape)[1].allowed == ("patch", "home.lamp")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (
            of_chats(function("first"), function("secnd")),
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (of_responses(flat("fourth")), "tool_choice.tools[0].name"),
        (
            of_chats(function("first"), function(7)),
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (
            of_chats({"type": "function", "function": "first"}),
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        (of_chats("first"), "tool_choice.allowed_tools.tools[0]"),
        (of_chats(function("first"), mode="none"), "tool_choice.allowed_tools.mode"),
        (of_responses(flat("first"), mode="sometimes"), "tool_choice.mode"),
        (of_chats(), "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": ["first"]}, "tool_choice.allowed_tools"),
        (of_responses(*[flat("first")] * 2000), "tool_choice.tools"),
        (of_responses(flat("first"), {"type": 3}), "tool_choice.tools[1].type"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(choice: dict[str, Any], param: str) -> None:
    for made in (chat_choice, responses_choice):
        with pytest.raises(InvalidRequestError) as caught:
            made(choice)
        assert (caught.value.param, caught.value.http_status) == (param, 400)
        assert len(str(caught.value)) < 300


def test_a_slip_in_a_name_is_told() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"'secnd' is not a declared tool\. Did you mean 'second'"
    ):
        chat_choice(of_chats(function("secnd")))


def test_a_tool_that_runs_elsewhere_cannot_be_the_only_one_and_chats_have_none() -> None:
    with pytest.raises(InvalidRequestError, match="no tool that can be called here"):
        responses_choice(of_responses({"type": "web_search"}))
    with pytest.raises(InvalidRequestError, match="allowed: 'function'"):
        chat_choice(of_chats({"type": "web_search"}))


def test_no_tools_means_no_allowed_ones() -> None:
    for mode in ("auto", "required"):
        request = ChatRequest.parse(
            {"messages": HELLO, "tool_choice": of_chats(function("first"), mode=mode)}
        )
        with pytest.raises(InvalidRequestError, match="'first' is not a declared tool"):
            request.call_choice(request.offered_tools)
