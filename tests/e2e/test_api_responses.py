from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server, eventually
from tests.e2e.test_api_chat import QUESTION, WEATHER, WEATHER_QUESTION
from tests.e2e.test_api_errors import error_of

if TYPE_CHECKING:
    import openai

TOOL: dict[str, Any] = {"type": "function", "strict": False, **WEATHER["function"]}  # type: ignore[dict-item]
ASK = str(QUESTION[0]["content"])
ASK_WEATHER = str(WEATHER_QUESTION[0]["content"])
PATH = "/v1/responses"


def asked(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(
        PATH,
        json={"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 300, **fields},
    )
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {
        "model": MODEL,
        "input": ASK,
        "temperature": 0,
        "max_output_tokens": 300,
        **fields,
        "stream": True,
    }
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def check_told(events: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == items
    for index, item in enumerate(items):
        about = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in about]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert about[0]["item"]["status"] == "in_progress" and about[0]["item"]["id"] == item["id"]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in about)
        said, delta = {
            "reasoning": (item.get("content"), "reasoning_text.delta"),
            "message": (item.get("content"), "output_text.delta"),
            "function_call": (item.get("arguments"), "function_call_arguments.delta"),
            "custom_tool_call": (item.get("input"), "custom_tool_call_input.delta"),
        }[item["type"]]
        whole = said if isinstance(said, str) else said[0]["text"]
        told = "".join(
            event["delta"] for event, kind in zip(about, kinds, strict=True) if kind == delta
        )
        assert told == whole and told


def kinds_of(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_response_has_items_counts_and_echoes(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input=ASK,
        temperature=0,
        instructions="Be brief.",
        metadata={"run": "7"},
        reasoning={"effort": "high"},
    )
    reasoning, message = response.output
    assert (
        reasoning.type == "reasoning"
        and reasoning.content
        and reasoning.content[0].text
        and reasoning.summary == []
    )
    assert message.type == "message" and "85" in response.output_text
    assert (response.status, response.metadata, response.instructions) == (
        "completed",
        {"run": "7"},
        "Be brief.",
    )
    usage = response.usage
    assert usage and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    again = client.responses.create(model=MODEL, input=ASK, temperature=0, instructions="Be brief.")
    assert again.usage and again.usage.input_tokens_details.cached_tokens > 0
    assert again.temperature == 0 and again.top_p == 0.95  # the checkpoint's


def test_sdk_stream_ends_in_the_whole_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": ASK_WEATHER,
        "tools": [TOOL],
        "temperature": 0,
    }
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert (
        "response.reasoning_text.delta" in kinds
        and "response.function_call_arguments.done" in kinds
    )
    call = response.output[-1]
    assert call.type == "function_call" and call.call_id.startswith("call_")
    assert json.loads(call.arguments) == {"city": "Paris"}
    whole = client.responses.create(**options)
    assert [item.type for item in whole.output] == [item.type for item in response.output]
    assert whole.output[-1].arguments == call.arguments  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "completed"),
        ({"input": ASK_WEATHER, "tools": [TOOL]}, "completed"),
        ({"max_output_tokens": 20}, "incomplete"),
        (
            {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
            "completed",
        ),
        ({"include": ["message.output_text.logprobs"]}, "completed"),
    ],
    ids=["text", "call", "length", "summary", "logprobs"],
)
def test_events_add_up_to_the_response(
    http: httpx.Client, fields: dict[str, Any], status: str
) -> None:
    events = events_of(http, **fields)
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{status}" and response["status"] == status
    check_told(events, response["output"])
    whole = asked(http, **fields)
    assert whole["usage"]["output_tokens"] == response["usage"]["output_tokens"]
    for told, said in zip(response["output"], whole["output"], strict=True):
        assert {**told, "id": "", "call_id": ""} == {**said, "id": "", "call_id": ""}
    if status == "incomplete":
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"
    if "reasoning" in fields:
        reasoning = response["output"][0]
        assert reasoning["summary"][0]["text"] == reasoning["content"][0]["text"]


def test_stored_response_is_fetched_continued_and_deleted(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    import openai

    first = client.responses.create(model=MODEL, input=ASK_WEATHER, tools=[TOOL], temperature=0)  # type: ignore[list-item]
    assert client.responses.retrieve(first.id).output == first.output
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 19}',
    }
    second = client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=first.id,
        tools=[TOOL],
        temperature=0,  # type: ignore[list-item]
    )
    assert "19" in second.output_text and second.previous_response_id == first.id
    assert second.usage and first.usage
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16
    items = client.responses.input_items.list(second.id).data
    assert [item.type for item in items] == ["function_call_output"]
    by_reference = asked(
        http,
        input=[
            {"role": "user", "content": ASK_WEATHER},
            *({"type": "item_reference", "id": item.id} for item in first.output),
            result,
        ],
        tools=[TOOL],
    )
    assert by_reference["usage"]["input_tokens"] == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(
        model=MODEL,
        input="Thanks",
        previous_response_id=second.id,
        max_output_tokens=4,
        tools=[TOOL],
    )
    # a deleted response can still be continued through its successor
    assert third.usage and third.usage.input_tokens > second.usage.input_tokens - 60
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"


def test_input_tokens_equal_those_of_the_response(client: openai.OpenAI) -> None:
    import openai

    question: dict[str, Any] = {
        "model": MODEL,
        "input": ASK_WEATHER,
        "instructions": "Be brief.",
        "tools": [TOOL],
    }
    first = client.responses.create(**question, temperature=0)
    counted = client.responses.input_tokens.count(**question)
    assert first.usage and counted.object == "response.input_tokens"
    assert counted.input_tokens == first.usage.input_tokens
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "19"}
        for item in first.output
        if item.type == "function_call"
    ]
    further: dict[str, Any] = {
        "model": MODEL,
        "input": results,
        "previous_response_id": first.id,
        "tools": [TOOL],
    }
    second = client.responses.create(**further, max_output_tokens=2)
    assert (
        second.usage
        and client.responses.input_tokens.count(**further).input_tokens == second.usage.input_tokens
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**further | {"previous_response_id": "resp_none"})


def test_response_with_store_false_is_not_stored(http: httpx.Client) -> None:
    response = asked(http, store=False, max_output_tokens=4)
    assert response["store"] is False
    error_of(http.get(f"{PATH}/{response['id']}"), 404)


def test_background_response_runs_by_itself_and_can_be_cancelled(
    http: httpx.Client, server: Server
) -> None:
    begun = asked(http, background=True)
    assert begun["status"] == "in_progress" and begun["output"] == []

    def status(response: dict[str, Any]) -> str:
        state: str = http.get(f"{PATH}/{response['id']}").json()["status"]
        return state

    assert eventually(lambda: status(begun) == "completed")
    endless = asked(http, background=True, ignore_eos=True, max_output_tokens=4000)
    error_of(
        http.post(PATH, json={"model": MODEL, "input": "x", "previous_response_id": endless["id"]}),
        400,
    )
    cancelled = http.post(f"{PATH}/{endless['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" == status(endless)
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
    error_of(http.post(f"{PATH}/{asked(http, max_output_tokens=1)['id']}/cancel"), 400)
    error_of(http.post(f"{PATH}/resp_unknown/cancel"), 404)


def test_forms_and_forced_calls(client: openai.OpenAI, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    response = client.responses.create(model=MODEL, input=ASK, temperature=0, text=form)
    assert isinstance(json.loads(response.output_text)["total"], int)
    assert response.text and response.text.format and response.text.format.type == "json_schema"
    weather = {
        "input": ASK_WEATHER,
        "tools": [TOOL, {"type": "web_search"}],
        "parallel_tool_calls": False,
    }
    assert kinds_of(asked(http, **weather, tool_choice="required")).count("function_call") == 1
    named = asked(http, **weather, tool_choice={"type": "function", "name": "get_weather"})
    assert named["output"][-1]["name"] == "get_weather" and named["tools"] == weather["tools"]
    only = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    assert kinds_of(asked(http, **weather, tool_choice=only))[-1] == "function_call"
    assert "function_call" not in kinds_of(
        asked(http, **weather, tool_choice="none", max_output_tokens=60)
    )


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_the_prompt_as_it_is(client: openai.OpenAI, mode: Any) -> None:
    import openai

    clock: Any = {
        "type": "function",
        "name": "get_time",
        "strict": False,
        "parameters": {"type": "object", "properties": {}},
    }
    options: dict[str, Any] = {
        "model": MODEL,
        "input": ASK_WEATHER,
        "tools": [TOOL, clock],
        "temperature": 0,
    }
    free = client.responses.create(**options)
    only: Any = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "get_time"}],
    }
    held = client.responses.create(**options, tool_choice=only, max_output_tokens=400)
    names = {item.name for item in held.output if item.type == "function_call"}
    assert names <= {"get_time"} and (names or mode == "auto")
    assert free.usage and held.usage and held.usage.input_tokens == free.usage.input_tokens
    assert held.usage.input_tokens_details.cached_tokens == free.usage.input_tokens // 16 * 16
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            **options, tool_choice={**only, "tools": [{"type": "function", "name": "get_tim"}]}
        )
    assert caught.value.param == "tool_choice.tools[0].name" and "get_time" in str(caught.value)


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": ASK, "temperature": 0, "top_logprobs": 2}
    options |= {"include": ["message.output_text.logprobs"]}
    with client.responses.stream(**options) as stream:
        events = list(stream)
        response = stream.get_final_response()
    (part,) = response.output[-1].content  # type: ignore[union-attr]
    assert response.top_logprobs == 2 and part.type == "output_text" and part.logprobs  # type: ignore[union-attr]
    for entry in part.logprobs:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the most likely one
        assert bytes(entry.bytes).decode() == entry.token
    told = "".join(entry.token for entry in part.logprobs)
    # a token may begin in the line breaks before
    assert told.strip() == part.text.strip() and len(told) - len(part.text) < 4
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for logprobs in deltas for entry in logprobs] == [
        entry.token for entry in part.logprobs
    ]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in part.logprobs]
    whole = client.responses.create(**options)
    assert whole.output[-1].content[0].logprobs == part.logprobs  # type: ignore[union-attr]
    fetched = client.responses.retrieve(whole.id)
    assert fetched.output[-1].content[0].logprobs == part.logprobs  # type: ignore[union-attr]


def test_logprobs_come_only_where_they_are_included(http: httpx.Client) -> None:
    assert asked(http, top_logprobs=3)["output"][-1]["content"][0]["logprobs"] == []
    (part,) = asked(http, include=["message.output_text.logprobs"])["output"][-1]["content"]
    assert part["logprobs"] and all(entry["top_logprobs"] == [] for entry in part["logprobs"])
    for wrong in (-1, 21, "2"):
        body = {"model": MODEL, "input": "x", "top_logprobs": wrong}
        error_of(http.post(PATH, json=body), 400, param="top_logprobs")


def test_custom_tool_takes_plain_text(http: httpx.Client) -> None:
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "description": "Apply a patch.",
        "format": {"type": "text"},
    }
    fields = {
        "tools": [tool],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 120,
    }
    events = events_of(http, **fields)
    items = events[-1]["response"]["output"]
    assert items[-1]["type"] == "custom_tool_call" and items[-1]["name"] == "apply_patch"
    check_told(events, items)
    replay = [
        {"role": "user", "content": ASK},
        *items,
        {"type": "custom_tool_call_output", "call_id": items[-1]["call_id"], "output": "Done"},
    ]
    assert (
        asked(http, input=replay, tools=[tool], max_output_tokens=4)["usage"]["input_tokens"] > 60
    )


def test_tools_of_a_namespace_are_called_with_it(http: httpx.Client) -> None:
    tools = [{"type": "namespace", "name": "mcp__home", "description": "At home.", "tools": [TOOL]}]
    events = events_of(
        http, input=ASK_WEATHER, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    items = events[-1]["response"]["output"]
    check_told(events, items)
    assert (items[-1]["namespace"], items[-1]["name"]) == ("mcp__home", "get_weather")
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "19"}
    replayed = asked(
        http,
        input=[{"role": "user", "content": ASK_WEATHER}, *items, result],
        tools=tools,
        max_output_tokens=1,
    )
    before = events[-1]["response"]["usage"]["input_tokens"]
    assert replayed["usage"]["input_tokens_details"]["cached_tokens"] > before - 16


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "magic"}]}, 400, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, 400, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "magic"}]}], "instructions": "Hi"},
            400,
            "input[0].content[0]",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            400,
            "input[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 404, "input[0].id"),
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x", "max_tokens": 5}, 400, "max_tokens"),
        ({"input": "x", "temperature": 5}, 400, "temperature"),
        ({"input": "x", "model": "other"}, 404, "model"),
        ({"input": "x", "tools": [{"type": "function"}]}, 400, "tools[0].name"),
        (
            {"input": "x", "tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]},
            400,
            "tool_choice",
        ),
        ({"input": "x", "tool_choice": "function", "tools": [TOOL]}, 400, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"input": "x", "background": True, "stream": True}, 400, "background"),
        ({"input": "x", "conversation": "c"}, 400, "conversation"),
        ({"input": "x", "metadata": {"a": 1}}, 400, "metadata.a"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_request_names_its_field(
    http: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    error_of(http.post(PATH, json=fields), status, param=param)


def test_session_of_codex_replays_its_items(http: httpx.Client) -> None:
    """Each prompt begins with the previous one, though nothing is stored and items are resent."""
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        },
    }
    items: list[dict[str, Any]] = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": ASK_WEATHER}],
        },
    ]
    num_before = 0
    for number in range(4):
        events = events_of(
            http,
            instructions="You are a coding agent in a terminal.",
            input=items,
            tools=[shell, TOOL, {"type": "web_search", "external_web_access": False}],
            tool_choice="required",
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="session",
            text={"verbosity": "low"},
            client_metadata={"x-codex-installation-id": "0"},
            max_output_tokens=150,
        )
        response = events[-1]["response"]
        check_told(events, response["output"])
        usage = response["usage"]
        assert usage["input_tokens"] > num_before
        assert not number or usage["input_tokens_details"]["cached_tokens"] > num_before - 16
        num_before = usage["input_tokens"]
        for item in response["output"]:
            replayed = {key: value for key, value in item.items() if key not in ("id", "status")}
            items.append(replayed | ({"content": None} if item["type"] == "reasoning" else {}))
            if item["type"] == "function_call":
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": item["call_id"],
                        "output": f"19 degrees {number}",
                    }
                )
        assert items[-1]["type"] == "function_call_output"
