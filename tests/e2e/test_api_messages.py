from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.e2e.test_api_chat import QUESTION, WEATHER, WEATHER_QUESTION

if TYPE_CHECKING:
    import anthropic
    import openai

TOOL = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],  # type: ignore[index]
    "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
}
GREEDY = {"temperature": 0}


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(
        base_url=server.url, api_key="unused", max_retries=0, timeout=180
    ) as client:
        yield client


def asked(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(
        "/v1/messages",
        json={"model": MODEL, "max_tokens": 300, "messages": QUESTION, **GREEDY, **fields},
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def told(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join a stream's events into an answer as clients do, and check their order."""
    answer: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for event in events:
        match event["type"]:
            case "message_start":
                assert (
                    not answer
                    and event["message"]["stop_reason"] is event["message"]["stop_sequence"] is None
                )
                answer = event["message"]
            case "content_block_start":
                assert open_index is None and event["index"] == len(blocks)
                open_index = event["index"]
                blocks.append({**event["content_block"], "_json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = blocks[-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        block["_json"] += delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case "message_delta":
                answer |= event["delta"] | {"usage": event["usage"]}
            case "message_stop":
                assert event is events[-1] and open_index is None
            case kind:
                assert kind == "ping"
    for block in blocks:
        collected = block.pop("_json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(collected)
            except ValueError:  # the call is truncated
                assert answer["stop_reason"] == "max_tokens"
                block["input"] = collected
    return answer | {"content": blocks}


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    content = [
        {key: value for key, value in block.items() if key != "id"} for block in answer["content"]
    ]
    usage = answer["usage"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {
        "content": content,
        "stop": (answer["stop_reason"], answer["stop_sequence"]),
        "tokens": (prompt_tokens, usage["output_tokens"], usage["output_tokens_details"]),
    }


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error" and set(body["error"]) - {"details"} == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    message: str = body["error"]["message"]
    return message


def test_answer_thinks_signs_and_counts(claude: anthropic.Anthropic) -> None:
    messages: Any = QUESTION
    answers = [
        claude.messages.create(
            model=MODEL,
            max_tokens=300,
            messages=messages,
            extra_body=GREEDY,
            thinking={"type": "adaptive"},
        )
        for _ in range(2)
    ]
    thinking, text = answers[1].content
    assert thinking.type == "thinking" and thinking.thinking and "<think>" not in thinking.thinking
    assert text.type == "text" and "85" in text.text
    assert answers[1].stop_reason == "end_turn"
    assert thinking.signature == answers[0].content[0].signature  # type: ignore[union-attr]
    usage = answers[1].usage
    assert usage.cache_read_input_tokens and usage.output_tokens_details
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
    assert answers[1]._request_id
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_sdk_stream_of_a_call_adds_up_and_its_result_is_answered(
    claude: anthropic.Anthropic,
) -> None:
    messages: list[Any] = [*WEATHER_QUESTION]
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "tools": [TOOL],
        "extra_body": GREEDY,
    }
    with claude.messages.stream(messages=messages, **options) as stream:
        fragments = [event.partial_json for event in stream if event.type == "input_json"]
        answer = stream.get_final_message()
    call = answer.content[-1]
    assert (
        call.type == "tool_use" and call.id.startswith("toolu_") and call.input == {"city": "Paris"}
    )
    assert json.loads("".join(fragments)) == call.input
    assert answer.stop_reason == "tool_use"
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": '{"temperature": 19, "condition": "cloudy"}',
    }
    replayed = [block.model_dump(exclude_none=True) for block in answer.content]
    messages += [{"role": "assistant", "content": replayed}, {"role": "user", "content": [result]}]
    after = claude.messages.create(messages=messages, **options)
    assert after.stop_reason == "end_turn"
    assert "19" in after.content[-1].text  # type: ignore[union-attr]
    assert (
        after.usage.cache_read_input_tokens
        > answer.usage.input_tokens + answer.usage.cache_read_input_tokens - 32
    )


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ],
    ids=lambda tool: tool["name"],
)
def test_tools_without_a_schema_are_called_and_run_by_the_client(
    claude: anthropic.Anthropic, tool: Any
) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 400,
        "tools": [{**tool, "strict": True}],
        "tool_choice": {"type": "tool", "name": tool["name"]},
        "thinking": {"type": "disabled"},
        "extra_body": GREEDY,
    }
    messages: list[Any] = [{"role": "user", "content": "List the files."}]
    answer = claude.messages.create(messages=messages, **options)
    call = answer.content[-1]
    assert call.type == "tool_use" and call.name == tool["name"]
    assert answer.stop_reason == "tool_use" and isinstance(call.input["command"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    options["tool_choice"] = {"type": "auto"}
    assert claude.messages.create(messages=messages, **options).usage.input_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": WEATHER_QUESTION, "tools": [TOOL]},
        {
            "messages": WEATHER_QUESTION,
            "tools": [TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
        {"max_tokens": 20},
        {"stop_sequences": ["85"]},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ],
    ids=["text", "call", "forced call", "length", "stop", "omitted"],
)
def test_stream_adds_up_to_the_whole_answer(http: httpx.Client, fields: dict[str, Any]) -> None:
    whole = asked(http, **fields)
    body = {
        "model": MODEL,
        "max_tokens": 300,
        "messages": QUESTION,
        **GREEDY,
        **fields,
        "stream": True,
    }
    events = events_of(http.post("/v1/messages", json=body))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    usage = start["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == comparable(whole)["tokens"][0]
    )
    assert comparable(told(events)) == comparable(whole)


def test_reasons_to_stop(http: httpx.Client) -> None:
    cut = asked(http, max_tokens=20)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 20)
    # it occurs in the thinking, too, where it stops nothing
    stopped = asked(http, stop_sequences=["never", "85"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "85")
    assert "85" in stopped["content"][0]["thinking"]
    forced = asked(
        http,
        messages=WEATHER_QUESTION,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_tokens=200,
    )
    assert forced["stop_reason"] == "tool_use" and forced["content"][-1]["name"] == "get_weather"
    assert asked(http, max_tokens=0)["content"] == []


def test_thinking_can_be_switched_off_hidden_and_bounded(http: httpx.Client) -> None:
    off = asked(http, thinking={"type": "disabled"}, max_tokens=30)
    assert [block["type"] for block in off["content"]] == ["text"]
    short = asked(http, thinking={"type": "enabled", "budget_tokens": 4})
    # the line break before the closing tag counts
    assert short["usage"]["output_tokens_details"]["thinking_tokens"] <= 5
    shown = asked(http)
    hidden = asked(http, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert hidden["content"][0]["thinking"] == "" and hidden["content"][1] == shown["content"][1]

    def tokens(block: dict[str, Any]) -> int:
        loop = [
            *WEATHER_QUESTION,
            {
                "role": "assistant",
                "content": [
                    block,
                    {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "19"}],
            },
        ]
        count = http.post(
            "/v1/messages/count_tokens", json={"model": MODEL, "messages": loop}
        ).json()["input_tokens"]
        assert isinstance(count, int)
        return count

    assert (
        tokens(hidden["content"][0])
        == tokens(shown["content"][0])
        > tokens({"type": "redacted_thinking", "data": "x"})
    )


def test_form_and_prefilled_answer(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    assert isinstance(
        json.loads(asked(http, output_config=form)["content"][-1]["text"])["total"], int
    )
    begun = asked(
        http, messages=[*QUESTION, {"role": "assistant", "content": "He now has"}], max_tokens=8
    )
    assert [block["type"] for block in begun["content"]] == ["text"]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_short_answer_has_no_reason_to_stop_at_its_start(http: httpx.Client, limit: int) -> None:
    body = {"model": MODEL, "max_tokens": limit, "messages": QUESTION, "stream": True, **GREEDY}
    answer = told(events_of(http.post("/v1/messages", json=body)))
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == limit


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_a_thread_is_refused_as_anthropics_clients_know_it(
    http: httpx.Client, path: str, thread: dict[str, str]
) -> None:
    refused = http.post(
        path, json={"model": MODEL, "max_tokens": 5, "messages": QUESTION, "thread": thread}
    )
    error_of(refused, 400, "invalid_request_error")
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_continues_without_a_thread(claude: anthropic.Anthropic, stream: bool) -> None:
    import anthropic

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        return f"21 C and sunny in {city}"

    runner: Any = claude.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=400,
        messages=WEATHER_QUESTION,  # type: ignore[arg-type]
        tools=[get_weather],
        stream=stream,  # type: ignore[arg-type]
        extra_body=GREEDY,
    )
    answers = [turn.get_final_message() if stream else turn for turn in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]


def test_errors_have_anthropics_shape(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    import anthropic

    def refused(status: int, kind: str, **fields: Any) -> str:
        return error_of(
            http.post("/v1/messages", json={"model": MODEL, "max_tokens": 5} | fields), status, kind
        )

    invalid = "invalid_request_error"
    assert "messages" in refused(400, invalid)
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Read"}}
    only_changes = [{"role": "system", "content": [removal]}]
    assert "messages is empty" in refused(400, invalid, messages=only_changes)
    assert "max_tokens" in error_of(
        http.post("/v1/messages", json={"model": MODEL, "messages": QUESTION}), 400, invalid
    )
    assert "temperature" in refused(400, invalid, messages=QUESTION, temperature=5)
    assert "tools[0].name" in refused(
        400, invalid, messages=QUESTION, tools=[{"name": "", "input_schema": {}}]
    )
    assert "nothing" in refused(
        400,
        invalid,
        messages=QUESTION,
        tool_choice={"type": "tool", "name": "nothing"},
        tools=[TOOL],
    )
    call = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "x", "input": {}}],
    }
    unanswered = refused(
        400, invalid, messages=[*QUESTION, call, *QUESTION], system=[{"type": "text", "text": "Hi"}]
    )
    assert unanswered.startswith("messages[1]")  # not counting the system prompt
    long = refused(400, invalid, messages=[{"role": "user", "content": "word " * 9000}])
    assert "4096" in long
    refused(404, "not_found_error", model="other", messages=QUESTION)
    assert "in time" in refused(
        408, "timeout_error", messages=QUESTION, timeout=0.1, max_tokens=3900, ignore_eos=True
    )
    error_of(http.get("/v1/messages/batches"), 404, "not_found_error")
    error_of(http.get("/v1/messages"), 405, invalid)
    error_of(http.post("/v1/messages", content=b"{"), 400, invalid)
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.messages.create(
            model="other", max_tokens=5, messages=[{"role": "user", "content": "Hi"}]
        )
    assert error.value.request_id


def test_models_are_listed_for_both_kinds_of_clients(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.display_name) == (
        MODEL,
        "model",
        MODEL,
    ) and model.created_at.year > 2000
    assert model.max_input_tokens == 4096
    assert claude.models.retrieve(MODEL).id == client.models.retrieve(MODEL).id == MODEL


def agent_request(history: list[dict[str, Any]], *, number: int) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}}
    object_of = {
        "type": "object",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "additionalProperties": False,
    }
    tools = [
        {
            "name": name,
            "description": f"{name} things.",
            "input_schema": {**object_of, "properties": {key: {"type": "string"}}},
        }
        for name, key in (("Bash", "command"), ("Read", "file_path"), ("TodoWrite", "todos"))
    ]
    billing = (
        f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05};"
    )
    return {
        "model": MODEL,
        "max_tokens": 120,
        "stream": True,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are a coding agent in a terminal.", **cached},
            {
                "type": "text",
                "text": "\nUse the tools to help with software.\n\n# Environment\nLinux",
                **cached,
            },
        ],
        "messages": history,
        "tools": [
            *tools,
            TOOL,
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_0_account__session_0"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        **GREEDY,
    }


def test_session_of_a_coding_agent_keeps_its_prefix_and_never_breaks(http: httpx.Client) -> None:
    """Each turn's prompt begins with the previous one, for calls, results, reminders and notes."""
    reminder = {
        "type": "text",
        "text": "<system-reminder>\nThe todo list is empty.\n</system-reminder>",
    }
    history: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [reminder, {"type": "text", "text": "What is the weather in Paris?"}],
        }
    ]
    contents: list[Any] = [
        "19 degrees, cloudy",
        [{"type": "text", "text": "19 degrees"}, {"type": "text", "text": "cloudy"}],
        [
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
            }
        ],
        "<tool_use_error>The service is busy</tool_use_error>",
        "",
    ]
    num_before = 0
    for number, content in enumerate(contents):
        request = agent_request(history, number=number)
        request["tool_choice"] = {"type": "any"}  # the small model would rather answer
        response = http.post(
            "/v1/messages?beta=true",
            json=request,
            headers={"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"},
        )
        answer = told(events_of(response))
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert answer["stop_reason"] in ("tool_use", "max_tokens") and calls
        usage = answer["usage"]
        if number:
            assert usage["cache_read_input_tokens"] > num_before - 32
        num_before = usage["input_tokens"] + usage["cache_read_input_tokens"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": content,
                "is_error": "error" in str(content),
            }
            for call in reversed(calls)
        ]
        history.append({"role": "assistant", "content": answer["content"]})
        history.append({"role": "user", "content": [*results, reminder] if number % 2 else results})
        if number == 1:
            history.append({"role": "system", "content": "The user has opened a file."})
    final = told(
        events_of(http.post("/v1/messages?beta=true", json=agent_request(history, number=99)))
    )
    assert final["content"] and final["stop_reason"] in ("end_turn", "tool_use", "max_tokens")
    assert final["usage"]["cache_read_input_tokens"] > num_before - 32
