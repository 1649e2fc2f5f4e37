from typing import Any

import pytest

from negamax.api.common.history import History
from negamax.api.common.thought_signature import HiddenThoughts, ThoughtSigner
from negamax.api.dialects.responses.history import build_history
from negamax.base.errors import InvalidRequestError
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY
from negamax.text.messages import normalize_messages

SIGNER = ThoughtSigner("nano")


def thoughts(*, window: int = 100, shows_earlier: bool = False) -> HiddenThoughts:
    return HiddenThoughts(SIGNER, context_length=window, shows_earlier=shows_earlier)


def history(*items: dict[str, Any], instructions: str | None = None) -> History:
    placed = [(f"input[{index}]", item) for index, item in enumerate(items)]
    return build_history(placed, instructions=instructions, thoughts=thoughts())


def test_images_are_refused_for_a_model_that_could_see_them() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [image]}
    for items, place in (
        ([{"role": "user", "content": [image]}], "messages[0].content[0]"),
        ([call(1), output], "messages[1].content[0]"),
        ([{"role": "assistant", "content": [image]}], "input[0].content[0]"),
    ):
        placed = [(f"input[{index}]", item) for index, item in enumerate(items)]
        with pytest.raises(InvalidRequestError, match="MiniMax-M3 supports it") as caught:
            made = build_history(
                placed, instructions=None, thoughts=thoughts(), family=MINIMAX_M3_FAMILY
            )
            normalize_messages(made.messages, family=MINIMAX_M3_FAMILY)
        assert caught.value.param == place
        normalize_messages(history(*items).messages)


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], **fields}


def call(number: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": f"call_{number}",
        "name": "read",
        "arguments": '{"n": 1}',
        **more,
    }


def result(number: int, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }


USER = {"role": "user", "content": [{"type": "input_text", "text": "Go"}]}


def test_items_of_one_answer_are_one_message() -> None:
    thought = [{"type": "reasoning_text", "text": "First a look."}]
    made = history(
        USER,
        reasoning(content=thought),
        said("I look."),
        call(1),
        call(2),
        result(2, "b"),
        result(1, "a"),
    )
    message = made.messages[1]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "First a look.")
    assert [entry["id"] for entry in message["tool_calls"]] == ["call_1", "call_2"]
    assert [entry["role"] for entry in made.messages] == ["user", "assistant", "tool", "tool"]
    assert [entry["content"] for entry in normalize_messages(made.messages)[2:]] == ["a", "b"]
    assert made.places == ["input[0]", "input[1]", "input[5]", "input[6]"]


def test_text_is_never_thinking_where_a_response_has_items_for_that() -> None:
    words = "A line with\n</think>\nalone ends it."
    message = normalize_messages(history(USER, said(words), USER).messages)[1]
    # otherwise the template would cut it
    assert (message["content"], message["reasoning_content"]) == (words, "")


def test_loops_of_calls_keep_their_order() -> None:
    made = history(USER, call(1), result(1), call(2), result(2), said("Done."), said("Really."))
    assert [message["role"] for message in made.messages] == [
        "user",
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    assert made.messages[-1]["content"] == "Done.\n\nReally."


@pytest.mark.parametrize(
    "fields",
    [
        {
            "content": [{"type": "reasoning_text", "text": "A thought."}],
            "summary": [{"type": "summary_text", "text": "Other."}],
        },
        {"content": None, "encrypted_content": SIGNER.signature("A thought.", is_hidden=True)},
        {
            "encrypted_content": "of another server",
            "summary": [{"type": "summary_text", "text": "A thought."}],
        },
    ],
    ids=["content", "encrypted", "summary"],
)
def test_reasoning_comes_back_in_any_form(fields: dict[str, Any]) -> None:
    made = history(USER, reasoning(**fields), call(1), result(1))
    assert made.messages[1]["reasoning_content"] == "A thought."


def test_instructions_namespaces_and_custom_tools() -> None:
    custom = {
        "type": "custom_tool_call",
        "call_id": "call_2",
        "name": "patch",
        "input": "*** Begin",
    }
    made = history(
        USER,
        call(1, namespace="home"),
        custom,
        result(1),
        {**result(2), "type": "custom_tool_call_output"},
        instructions="Be",
    )
    assert made.messages[0] == {"role": "system", "content": "Be"}
    functions = [entry["function"] for entry in made.messages[2]["tool_calls"]]
    assert functions[0]["name"] == "home.read" and functions[1] == {
        "name": "patch",
        "arguments": {"input": "*** Begin"},
    }


def test_a_call_that_was_cut_is_left_out_unless_it_has_a_result() -> None:
    cut = call(1, status="incomplete", arguments='{"n": ')
    assert history(USER, said("Let me see."), cut, USER).messages[1].get("tool_calls") is None
    assert (
        history(USER, cut, result(1, "not JSON"), USER).messages[1]["tool_calls"][0]["id"]
        == "call_1"
    )


@pytest.mark.parametrize(
    "kinds",
    [
        ("web_search_call",),
        ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        ("tool_search_call", "tool_search_output"),
        ("computer_call", "computer_call_output"),
        ("program", "program_output"),
        ("compaction",),
        ("context_compaction",),
    ],
    ids=" ".join,
)
def test_calls_that_ran_elsewhere_are_passed_over(kinds: tuple[str, ...]) -> None:
    made = history(USER, *({"type": kind, "id": kind} for kind in kinds), said("Found."))
    assert [message["role"] for message in made.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "magic"}, "input[0].type"),
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"role": "assistant", "content": [{"type": "magic"}]}, "input[0].content[0]"),
        ({"role": "assistant", "content": 3}, "input[0].content[0]"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_named_by_its_place(item: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        history(item)
    assert error.value.param == place
