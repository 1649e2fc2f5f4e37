"""Send requests that are built from the types of OpenAI's and Anthropic's packages.

Each request tests one field, item, block or tool. The server must accept all requests, except
those that a test names together with the reason for the refusal.
"""

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union

import pytest
import typing_extensions as extensions
from request_support import chat

from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.messages import history as messages_history
from negamax.api.dialects.messages.schema import MessagesRequest
from negamax.api.dialects.responses import history as responses_history
from negamax.api.dialects.responses.item_settings import apply_settings
from negamax.api.dialects.responses.schema import ResponsesRequest
from negamax.api.schemas.tools import CallChoice
from negamax.base.errors import InvalidRequestError
from negamax.text.messages import normalize_messages

THOUGHTS = HiddenThoughts(ThoughtSigner("nano"), context_length=100, shows_earlier=False)
HELLO = {"role": "user", "content": "Hello"}
# calls and results that other items refer to
CALL_OF = {
    "function_call_output": {"type": "function_call", "name": "look", "arguments": "{}"},
    "custom_tool_call_output": {"type": "custom_tool_call", "name": "look", "input": "x"},
    "shell_call_output": {"type": "shell_call", "action": {"commands": ["ls"]}},
    "local_shell_call_output": {"type": "local_shell_call", "id": "item_1", "action": {}},
    "apply_patch_call_output": {"type": "apply_patch_call", "operation": {}},
    "tool_search_output": {"type": "tool_search_call", "arguments": {}},
}


# --- plausible values for the types of the packages ---------------------------------------------

_WRAPPERS = (extensions.Required, extensions.NotRequired, typing.Annotated)
# values of fields that do not accept every text
_NAMED: dict[str, Any] = {
    "id": "item_1", "call_id": "call_1", "tool_use_id": "call_1", "name": "look", "arguments": "{}",
    "parameters": {"type": "object"}, "schema": {"type": "object"},
    "input_schema": {"type": "object"}, "tools": [{"type": "function", "name": "look"}],
}  # fmt: skip
_SCALARS: dict[Any, list[Any]] = {str: ["text"], int: [3], float: [0.5], bool: [True, False]}


def is_object(hint: Any) -> bool:
    return isinstance(hint, type) and extensions.is_typeddict(hint)


def hints_of(kind: Any) -> dict[str, Any]:
    return extensions.get_type_hints(kind, include_extras=True)


def objects_in(hint: Any) -> list[Any]:
    """Return the object types of a union, or of a list of one."""
    if is_object(hint):
        return [hint]
    found = [kind for part in typing.get_args(hint) for kind in objects_in(part)]
    return list(dict.fromkeys(found))


def values_of(hint: Any, *, depth: int = 0) -> list[Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _WRAPPERS:
        return values_of(parts[0], depth=depth)
    if origin in (Union, types.UnionType):
        return [value for part in parts for value in values_of(part, depth=depth)]
    if origin in (Literal, extensions.Literal):
        return list(parts)
    if is_object(hint):
        return [smallest(hint, depth=depth + 1)]
    if origin is not None and "dict" in str(origin).lower():
        return [{"a": "b"}]
    if parts and depth < 6:
        return [[value] for value in values_of(parts[0], depth=depth + 1)]
    return [] if hint is type(None) else _SCALARS.get(hint, [{"a": "b"}])


def smallest(kind: Any, *, depth: int = 0) -> dict[str, Any]:
    return {
        name: _value(name, hint, depth=depth)
        for name, hint in hints_of(kind).items()
        if name in kind.__required_keys__ or typing.get_origin(hint) is extensions.Required
    }


def variants(kind: Any) -> Iterator[dict[str, Any]]:
    """Yield the smallest object, and one object per further field and alternative of its type."""
    least = smallest(kind)
    yield least
    for name, hint in hints_of(kind).items():
        for value in [_NAMED[name]] if name in _NAMED else values_of(hint):
            if name not in least or least[name] != value:
                yield {**least, name: value}


def _value(name: str, hint: Any, *, depth: int) -> Any:
    values = values_of(hint, depth=depth)
    return _NAMED[name] if name in _NAMED and "Literal" not in str(hint) else values[0]


# --- requests ------------------------------------------------------------------------------------


def answer_openai(**fields: Any) -> None:
    params = ResponsesRequest.parse({"input": [HELLO], **fields})
    placed = [(f"input[{index}]", item) for index, item in enumerate(params.input)]
    params = apply_settings(params, placed).params
    made = responses_history.build_history(placed, instructions=None, thoughts=THOUGHTS)
    normalize_messages(made.messages)
    _ = params.choice(), params.thinking_choice, params.grammar


def answer_anthropic(**fields: Any) -> None:
    body = {"model": "nano", "max_tokens": 4, "messages": [HELLO], **fields}
    params = MessagesRequest.parse(body)
    made = messages_history.build_history(params.messages, system=params.system, thoughts=THOUGHTS)
    normalize_messages(made.messages)
    _ = params.call_choice(params.offered_tools), params.thinking_choice, params.grammar


def refused(answer: Callable[..., None], requests: list[tuple[str, dict[str, Any]]]) -> set[str]:
    names = set()
    for name, fields in requests:
        try:
            answer(**fields)
        except InvalidRequestError:
            names.add(name)
    return names


def fields_of(request: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return requests with one field each, including the fields of inner objects."""
    required = ("model", "messages", "input", "max_tokens")
    given = [(name, fields) for fields in variants(request) for name in fields]
    alone = [(name, {name: fields[name]}) for name, fields in given if name not in required]
    inner = [
        (name, {name: value})
        for name, hint in hints_of(request).items()
        if name not in (*required, "tools", "system") and "Iterable" not in str(hint)
        for kind in objects_in(hint)
        for value in variants(kind)
    ]
    return alone + inner


def test_openai_fields_and_tools() -> None:
    from openai.types.responses import response_create_params as openai_request

    # Conversations, prompt templates and a forced call without tools are refused.
    assert refused(answer_openai, fields_of(openai_request.ResponseCreateParamsBase)) == {
        "conversation", "prompt", "tool_choice",
    }  # fmt: skip
    from openai.types.responses import tool_param

    requests = tools_in(tool_param.ToolParam)
    assert len(requests) > 80
    assert refused(answer_openai, requests) == set()


def test_anthropic_fields_and_tools() -> None:
    from anthropic.types.beta import message_create_params as anthropic_request

    # Summaries, other servers, conversations and a forced call without tools are refused.
    assert refused(answer_anthropic, fields_of(anthropic_request.MessageCreateParamsBase)) == {
        "compaction", "mcp_servers", "thread", "tool_choice",
    }  # fmt: skip
    from anthropic.types.beta import beta_tool_union_param

    requests = tools_in(beta_tool_union_param.BetaToolUnionParam)
    assert len(requests) > 150
    assert refused(answer_anthropic, requests) == set()


def test_input_items_of_openai() -> None:
    from openai.types.responses import response_input_item_param

    requests = []
    for kind in objects_in(response_input_item_param.ResponseInputItemParam):
        for item in variants(kind):
            name = item.get("type", "message")
            items = [HELLO, item]
            if name in CALL_OF:
                items.insert(1, {**CALL_OF[name], "call_id": "call_1"})
            elif f"{name}_output" in CALL_OF:
                number = {"id": item.get("id")} if name == "local_shell_call" else {}
                result = {"type": f"{name}_output", "call_id": "call_1", "output": "x"}
                items.append(result | number)
            name = name if "call_id" in item or name != "function_call_output" else "no call_id"
            name = name if "role" in item or "type" in item else "reference"
            requests.append((name, {"input": items}))
    assert len(requests) > 150
    # References need stored items, results must name their call, and summaries are refused.
    assert refused(answer_openai, requests) == {"reference", "no call_id", "compaction_trigger"}


def tools_in(union: Any) -> list[tuple[str, dict[str, Any]]]:
    kinds = objects_in(union)
    return [(kind.__name__, {"tools": [tool]}) for kind in kinds for tool in variants(kind)]


def test_system_messages_of_anthropic() -> None:
    from anthropic.types.beta import beta_system_message_param

    effort = {"role": "system", "output_config": {"effort": "low"}}
    messages = [effort, *variants(beta_system_message_param.BetaSystemMessageParam)]
    names = ["content" if "content" in message else str(message) for message in messages]
    bodies = ({"messages": [HELLO, message]} for message in messages)
    clear = ({"clear_at": when} for when in ("next_user_message", "never"))
    empty = {str({"role": "system", **fields}) for fields in ({}, *clear, {"output_config": {}})}
    assert refused(answer_anthropic, list(zip(names, bodies, strict=True))) == empty


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_blocks_of_anthropic(role: str) -> None:
    from anthropic.types.beta import beta_content_block_param

    requests = []
    for kind in objects_in(beta_content_block_param.BetaContentBlockParam):
        for block in variants(kind):
            name = block["type"]
            named = {**block, "id": "call_1"} if "id" in block else block
            message = {"role": role, "content": [named]}
            call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "call_1", "content": "x"}
            messages = [HELLO, message]
            if name == "tool_result":
                messages.insert(1, {"role": "assistant", "content": [call]})
            elif name == "tool_use":
                messages.append({"role": "user", "content": [result]})
            requests.append((name, {"messages": messages}))
    not_here = refused(answer_anthropic, requests)
    # A user's call becomes a note, so the result of that call has no call to answer.
    assert not_here == ({"tool_use"} if role == "user" else set())


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
