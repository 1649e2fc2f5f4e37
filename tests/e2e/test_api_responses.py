import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import (
    ASK,
    ASK_WEATHER,
    FUNCTION,
    GREEDY,
    QUESTION,
    RESPONSES,
    RESPONSES_DIALECT,
    TOTAL,
    WEATHER_QUESTION,
    error_of,
    join_responses,
    post,
    stream,
)
from tests.e2e.conftest import MODEL, Server, eventually
from tests.tables import read_table

TOOL = RESPONSES_DIALECT.make_tool(FUNCTION)
LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.fixture
def strict(server: Server) -> Iterator[Any]:
    import openai

    url = f"{server.url}/v1"
    options: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "timeout": 180}
    with openai.OpenAI(base_url=url, _strict_response_validation=True, **options) as client:
        yield client


def asked(http: httpx.Client, input: Any = ASK, *, limit: int = 300, **fields: Any) -> Any:
    return post(http, RESPONSES, **RESPONSES_DIALECT.body(input, limit=limit, **fields))


def streamed(http: httpx.Client, input: Any = ASK, *, limit: int = 300, **fields: Any) -> Any:
    body = RESPONSES_DIALECT.body(input, limit=limit, **fields)
    return join_responses(stream(http, RESPONSES, **body))


def kinds_of(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def output_of(call: dict[str, Any], output: Any) -> dict[str, Any]:
    kind = call["type"].removesuffix("_call")
    kind = {"function": "function_call", "custom_tool": "custom_tool_call"}[kind]
    return {"type": f"{kind}_output", "call_id": call["call_id"], "output": output}


def test_response_has_items_counts_and_echoes(client: Any) -> None:
    options = {"model": MODEL, "input": ASK, "temperature": 0, "instructions": "Be brief."}
    effort = {"effort": "high"}
    response = client.responses.create(metadata={"run": "7"}, reasoning=effort, **options)
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text and reasoning.summary == []
    assert message.type == "message" and "85" in response.output_text
    assert (response.status, response.metadata) == ("completed", {"run": "7"})
    assert response.instructions == "Be brief."
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = client.responses.create(**options)
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.temperature == 0 and again.top_p == 0.95  # the checkpoint's


def test_sdk_stream_ends_in_the_whole_response(client: Any) -> None:
    options = {"model": MODEL, "input": ASK_WEATHER, "tools": [TOOL], "temperature": 0}
    with client.responses.stream(**options) as events:
        kinds = {event.type for event in events}
        response = events.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    call = response.output[-1]
    assert call.type == "function_call" and call.call_id.startswith("call_")
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_summaries_and_logprobs_come_where_they_are_asked_for(http: httpx.Client) -> None:
    reasoning = streamed(http, reasoning={"summary": "auto"})["output"][0]
    assert reasoning["summary"][0]["text"] == reasoning["content"][0]["text"]
    assert "encrypted_content" not in reasoning
    assert asked(http, top_logprobs=3)["output"][-1]["content"][0]["logprobs"] == []
    (part,) = asked(http, **LOGPROBS)["output"][-1]["content"]
    assert part["logprobs"] and all(entry["top_logprobs"] == [] for entry in part["logprobs"])


def test_stored_response_is_fetched_continued_and_deleted(client: Any, http: httpx.Client) -> None:
    import openai

    options = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    first = client.responses.create(input=ASK_WEATHER, **options)
    assert client.responses.retrieve(first.id).output == first.output
    result = output_of(first.output[-1].model_dump(), '{"temperature": 19}')
    second = client.responses.create(input=[result], previous_response_id=first.id, **options)
    assert "19" in second.output_text and second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16
    items = client.responses.input_items.list(second.id).data
    assert [item.type for item in items] == ["function_call_output"]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = asked(http, [*WEATHER_QUESTION, *references, result], tools=[TOOL])
    assert by_reference["usage"]["input_tokens"] == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    # A request can continue a deleted response through a later response.
    options |= {"max_output_tokens": 4}
    third = client.responses.create(input="Thanks", previous_response_id=second.id, **options)
    assert third.usage.input_tokens > second.usage.input_tokens - 60
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(input="Hi", previous_response_id=first.id, **options)
    assert error.value.code == "previous_response_not_found"


def test_input_tokens_equal_those_of_the_response_stored_or_not(http: httpx.Client) -> None:
    count = f"{RESPONSES}/input_tokens"
    question = {"model": MODEL, "input": ASK_WEATHER, "instructions": "Be brief.", "tools": [TOOL]}
    first = post(http, RESPONSES, **question, temperature=0)
    counted = post(http, count, **question)
    tokens = first["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": tokens}
    results = [output_of(item, "19") for item in first["output"] if "call_id" in item]
    further = {**question, "input": results, "previous_response_id": first["id"]}
    second = post(http, RESPONSES, **further, max_output_tokens=2)
    assert post(http, count, **further)["input_tokens"] == second["usage"]["input_tokens"]
    error_of(http.post(count, json=further | {"previous_response_id": "resp_none"}), 404)
    response = asked(http, store=False, limit=4)
    assert response["store"] is False
    error_of(http.get(f"{RESPONSES}/{response['id']}"), 404)


def test_background_response_runs_and_can_be_cancelled(http: httpx.Client, server: Server) -> None:
    begun = asked(http, background=True)
    assert begun["status"] == "in_progress" and begun["output"] == []

    def status(response: dict[str, Any]) -> str:
        state: str = http.get(f"{RESPONSES}/{response['id']}").json()["status"]
        return state

    assert eventually(lambda: status(begun) == "completed")
    endless = asked(http, background=True, ignore_eos=True, limit=4000)
    body = {"model": MODEL, "input": "x", "previous_response_id": endless["id"]}
    error_of(http.post(RESPONSES, json=body), 400)
    cancelled = http.post(f"{RESPONSES}/{endless['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" == status(endless)
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
    error_of(http.post(f"{RESPONSES}/{asked(http, limit=1)['id']}/cancel"), 400)
    error_of(http.post(f"{RESPONSES}/resp_unknown/cancel"), 404)


def test_form_is_followed(client: Any) -> None:
    form = {"format": {"type": "json_schema", "name": "sum", "schema": TOTAL, "strict": True}}
    response = client.responses.create(model=MODEL, input=ASK, temperature=0, text=form)
    assert isinstance(json.loads(response.output_text)["total"], int)
    assert response.text.format.type == "json_schema"


def test_forced_calls_are_made(http: httpx.Client) -> None:
    tools = [TOOL, {"type": "web_search"}]

    def called(choice: Any, **fields: Any) -> Any:
        fields |= {"tools": tools, "parallel_tool_calls": False, "tool_choice": choice}
        return asked(http, ASK_WEATHER, **fields)

    assert kinds_of(called("required")).count("function_call") == 1
    named = called({"type": "function", "name": "get_weather"})
    assert named["output"][-1]["name"] == "get_weather" and named["tools"] == tools
    assert "function_call" not in kinds_of(called("none", limit=60))


def test_logprobs_are_those_of_the_text(client: Any) -> None:
    options = {"model": MODEL, "input": ASK, "temperature": 0, "top_logprobs": 2, **LOGPROBS}
    with client.responses.stream(**options) as stream:
        events = list(stream)
        response = stream.get_final_response()
    (part,) = response.output[-1].content
    assert response.top_logprobs == 2 and part.type == "output_text"
    for entry in part.logprobs:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token  # Greedy takes the likeliest token.
        assert bytes(entry.bytes).decode() == entry.token
    text = "".join(entry.token for entry in part.logprobs)
    # A token may begin in the line breaks before the text.
    assert text.strip() == part.text.strip() and len(text) - len(part.text) < 4
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    tokens = [entry.token for logprobs in deltas for entry in logprobs]
    assert tokens == [entry.token for entry in part.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in part.logprobs]
    assert client.responses.retrieve(response.id).output[-1].content[0].logprobs == part.logprobs


def test_custom_tool_takes_plain_text(http: httpx.Client) -> None:
    tool = {"type": "custom", "name": "apply_patch", "description": "Apply a patch."}
    tool |= {"format": {"type": "text"}}
    choice = {"type": "custom", "name": "apply_patch"}
    items = streamed(http, tools=[tool], tool_choice=choice, limit=120)["output"]
    assert (items[-1]["type"], items[-1]["name"]) == ("custom_tool_call", "apply_patch")
    replay = [*QUESTION, *items, output_of(items[-1], "Done")]
    assert asked(http, replay, tools=[tool], limit=4)["usage"]["input_tokens"] > 60


def test_tools_of_a_namespace_are_called_with_it(http: httpx.Client) -> None:
    tools = [{"type": "namespace", "name": "mcp__home", "description": "At home.", "tools": [TOOL]}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    first = streamed(http, ASK_WEATHER, tools=tools, **forced)
    items = first["output"]
    assert (items[-1]["namespace"], items[-1]["name"]) == ("mcp__home", "get_weather")
    replay = [*WEATHER_QUESTION, *items, output_of(items[-1], "19")]
    usage = asked(http, replay, tools=tools, limit=1)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"] - 16


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    read_table("api_responses.bad_field_is_named"),
    ids=lambda value: str(value)[:40],
)
def test_bad_field(http: httpx.Client, fields: dict[str, Any], status: int, param: str) -> None:
    error_of(http.post(RESPONSES, json={"input": "x", **fields}), status, param=param)


def test_session_of_codex_replays_its_items(http: httpx.Client) -> None:
    """Each prompt begins with the previous one, although the server stores nothing."""
    command = {"type": "array", "items": {"type": "string"}}
    parameters = {"type": "object", "properties": {"command": command}}
    shell = {"type": "function", "name": "shell", "strict": False, "parameters": parameters}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "<permissions>all</permissions>"), ("user", ASK_WEATHER))
    ]
    num_before = 0
    for number in range(3):
        response = streamed(
            http,
            items,
            limit=150,
            instructions="You are a coding agent in a terminal.",
            tools=[shell, TOOL, {"type": "web_search", "external_web_access": False}],
            tool_choice="required",
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="session",
            text={"verbosity": "low"},
            client_metadata={"x-codex-installation-id": "0"},
        )
        usage = response["usage"]
        assert usage["input_tokens"] > num_before
        assert not number or usage["input_tokens_details"]["cached_tokens"] > num_before - 16
        num_before = usage["input_tokens"]
        for item in response["output"]:
            replayed = {key: value for key, value in item.items() if key not in ("id", "status")}
            items.append(replayed | ({"content": None} if item["type"] == "reasoning" else {}))
        items.append(output_of(response["output"][-1], f"19 degrees {number}"))


PRINTED = {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}


@pytest.mark.parametrize(("kind", "result"), [("shell", [PRINTED]), ("local_shell", "a.txt")])
def test_shell_calls_are_run_by_the_client(strict: Any, kind: str, result: Any) -> None:
    options = {**GREEDY, "tools": [{"type": kind}]}
    question = {"input": "List the files.", "tool_choice": "required", "max_output_tokens": 400}
    with strict.responses.stream(**options, **question) as stream:
        events = list(stream)
        response = stream.get_final_response()
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{moment}"]
        for moment in ("added", "done")
    )
    call = response.output[-1]
    assert call.type == f"{kind}_call" and call.status == "completed"
    assert all(isinstance(text, str) for text in getattr(call.action, "commands", ()))
    assert done == response.output and [item.id for item in added] == [item.id for item in done]
    output = {"type": f"{kind}_call_output", "output": result, "status": "completed"}
    output |= {"id": call.call_id} if kind == "local_shell" else {"call_id": call.call_id}
    further = {"input": [output], "max_output_tokens": 8, "previous_response_id": response.id}
    after = strict.responses.create(**options, **further)
    (item,) = strict.responses.input_items.list(after.id).data
    assert item.type == f"{kind}_call_output"
    assert after.usage.input_tokens > response.usage.total_tokens


def test_items_change_the_settings_after_them(strict: Any) -> None:
    schema = {**TOTAL, "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "n", "schema": schema}
    items = [
        *QUESTION,
        {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
        {"type": "configuration_update", "text": {"format": form}},
    ]
    off = {"reasoning": {"effort": "none"}, "tool_choice": "none"}
    first = strict.responses.create(model=MODEL, input=items, **off)
    assert json.loads(first.output_text) == {"n": 7}
    choice = {"type": "function", "name": TOOL["name"]}
    further = {"previous_response_id": first.id, "tool_choice": choice}
    second = strict.responses.create(model=MODEL, input=ASK_WEATHER, **further)
    assert second.output[-1].type == "function_call"


def test_input_items_hold_in_strict_clients(strict: Any) -> None:
    output = [{"type": "input_text", "text": "a"}]
    sent = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "A call."}]},
        {"role": "assistant", "content": "One moment."},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": output},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "b"},
    ]
    kinds = [item.get("type", "message") for item in sent]
    response = strict.responses.create(model=MODEL, input=sent, max_output_tokens=4)
    assert strict.responses.retrieve(response.id) == response
    items = list(strict.responses.input_items.list(response.id, order="asc", limit=3))
    assert [item.type for item in items] == kinds
    again = list(strict.responses.input_items.list(response.id))
    assert [item.id for item in again] == [item.id for item in reversed(items)]
