import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import (
    FUNCTION,
    GREEDY,
    MESSAGES,
    MESSAGES_DIALECT,
    QUESTION,
    RESULT_TEXT,
    TOTAL,
    WEATHER_QUESTION,
    events_of,
    join_messages,
    make_block_tool,
    post,
    stream,
)
from tests.e2e.conftest import MODEL, Server

TOOL = make_block_tool(FUNCTION)
COUNT = f"{MESSAGES}/count_tokens"
INVALID = "invalid_request_error"


@pytest.fixture
def claude(server: Server) -> Iterator[Any]:
    import anthropic

    options: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "timeout": 180}
    with anthropic.Anthropic(base_url=server.url, **options) as client:
        yield client


def asked(http: httpx.Client, messages: Any = QUESTION, **fields: Any) -> Any:
    return post(http, MESSAGES, **{**MESSAGES_DIALECT.body(messages), **fields})


def refused(response: httpx.Response, status: int, kind: str = INVALID) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error" and set(body["error"]) - {"details"} == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["x-request-id"] == response.headers["request-id"]
    message: str = body["error"]["message"]
    return message


def kinds_of(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


def result_of(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def test_answer_thinks_signs_and_counts(claude: Any) -> None:
    body = {"model": MODEL, "max_tokens": 300, "messages": QUESTION, "extra_body": GREEDY}
    body["thinking"] = {"type": "adaptive"}
    first, second = (claude.messages.create(**body) for _ in range(2))
    thinking, text = second.content
    assert thinking.type == "thinking" and thinking.thinking
    assert text.type == "text" and "85" in text.text
    assert second.stop_reason == "end_turn" and second._request_id
    assert thinking.signature == first.content[0].signature
    usage = second.usage
    assert usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_sdk_stream_of_a_call_adds_up_and_its_result_is_answered(claude: Any) -> None:
    messages: list[Any] = [*WEATHER_QUESTION]
    options = {"model": MODEL, "max_tokens": 300, "tools": [TOOL], "extra_body": GREEDY}
    with claude.messages.stream(messages=messages, **options) as stream:
        fragments = [event.partial_json for event in stream if event.type == "input_json"]
        answer = stream.get_final_message()
    call = answer.content[-1]
    assert call.type == "tool_use" and call.id.startswith("toolu_")
    assert json.loads("".join(fragments)) == call.input == {"city": "Paris"}
    assert answer.stop_reason == "tool_use"
    replayed = [block.model_dump(exclude_none=True) for block in answer.content]
    result = result_of(call.id, RESULT_TEXT)
    messages += [{"role": "assistant", "content": replayed}, {"role": "user", "content": [result]}]
    after = claude.messages.create(messages=messages, **options)
    assert after.stop_reason == "end_turn" and "19" in after.content[-1].text
    before = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert after.usage.cache_read_input_tokens > before - 32


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("bash_20250124", "bash", marks=pytest.mark.full),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("memory_20250818", "memory"),
    ],
)
def test_tools_without_a_schema_are_run_by_the_client(claude: Any, kind: str, name: str) -> None:
    options = {"model": MODEL, "max_tokens": 400, "thinking": {"type": "disabled"}}
    options |= {"tools": [{"type": kind, "name": name, "strict": True}], "extra_body": GREEDY}
    messages: list[Any] = [{"role": "user", "content": "List the files."}]
    choice = {"type": "tool", "name": name}
    answer = claude.messages.create(messages=messages, tool_choice=choice, **options)
    call = answer.content[-1]
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", name, "tool_use")
    assert isinstance(call.input["command"], str)
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result_of(call.id, "a.txt")]},
    ]
    assert claude.messages.create(messages=messages, **options).usage.input_tokens


def test_forced_calls_forms_and_prefilled_answers(http: httpx.Client) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    forced = asked(http, WEATHER_QUESTION, tools=[TOOL], tool_choice=choice, max_tokens=200)
    assert forced["stop_reason"] == "tool_use" and forced["content"][-1]["name"] == "get_weather"
    assert asked(http, max_tokens=0)["content"] == []
    form = {"format": {"type": "json_schema", "schema": TOTAL}, "effort": "high"}
    text = asked(http, output_config=form)["content"][-1]["text"]
    assert isinstance(json.loads(text)["total"], int)
    begun = {"role": "assistant", "content": "He now has"}
    assert kinds_of(asked(http, [*QUESTION, begun], max_tokens=8)) == ["text"]


def test_thinking_can_be_switched_off_hidden_and_bounded(http: httpx.Client) -> None:
    assert kinds_of(asked(http, thinking={"type": "disabled"}, max_tokens=30)) == ["text"]
    short = asked(http, thinking={"type": "enabled", "budget_tokens": 4})
    # The line break before the closing tag counts, too.
    assert short["usage"]["output_tokens_details"]["thinking_tokens"] <= 5
    shown = asked(http)["content"]
    omitted = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    hidden = asked(http, thinking=omitted)["content"]
    assert hidden[0]["thinking"] == "" and hidden[1] == shown[1]

    def count(block: dict[str, Any]) -> int:
        call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
        loop = [
            *WEATHER_QUESTION,
            {"role": "assistant", "content": [block, call]},
            {"role": "user", "content": [result_of("a", "19")]},
        ]
        num_tokens: int = post(http, COUNT, model=MODEL, messages=loop)["input_tokens"]
        return num_tokens

    assert count(hidden[0]) == count(shown[0]) > count({"type": "redacted_thinking", "data": "x"})


@pytest.mark.parametrize("limit", [1, 2])
def test_a_short_answer_has_no_reason_to_stop_at_its_start(http: httpx.Client, limit: int) -> None:
    answer = join_messages(stream(http, MESSAGES, **MESSAGES_DIALECT.body(limit=limit)))
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == limit


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_refuses_anthropics_threads(http: httpx.Client, path: str, thread: dict[str, str]) -> None:
    response = http.post(path, json=MESSAGES_DIALECT.body(limit=5, thread=thread))
    refused(response, 400)
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_tool_runner_continues_without_a_thread(claude: Any, stream: bool) -> None:
    import anthropic

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        return f"21 C and sunny in {city}"

    options = {"model": MODEL, "max_tokens": 400, "messages": WEATHER_QUESTION, "stream": stream}
    runner = claude.beta.messages.tool_runner(tools=[get_weather], extra_body=GREEDY, **options)
    answers = [turn.get_final_message() if stream else turn for turn in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]


REMOVAL = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Read"}}
CALL = {"type": "tool_use", "id": "a", "name": "x", "input": {}}
ENDLESS = {"timeout": 0.1, "max_tokens": 3900, "ignore_eos": True}
UNANSWERED = [*QUESTION, {"role": "assistant", "content": [CALL]}, *QUESTION]
SYSTEM = {"system": [{"type": "text", "text": "Hi"}]}
NOTHING = {"tool_choice": {"type": "tool", "name": "nothing"}, "tools": [TOOL]}


@pytest.mark.parametrize(
    ("messages", "fields", "status", "kind", "words"),
    [
        (None, {}, 400, INVALID, "messages"),
        ([{"role": "system", "content": [REMOVAL]}], {}, 400, INVALID, "messages is empty"),
        (QUESTION, {"max_tokens": None}, 400, INVALID, "max_tokens"),
        (QUESTION, {"temperature": 5}, 400, INVALID, "temperature"),
        (QUESTION, {"tools": [{"name": "", "input_schema": {}}]}, 400, INVALID, "tools[0].name"),
        (QUESTION, NOTHING, 400, INVALID, "nothing"),
        (UNANSWERED, SYSTEM, 400, INVALID, "messages[1]"),  # The index excludes the system prompt.
        ([{"role": "user", "content": "word " * 9000}], {}, 400, INVALID, "4096"),
        (QUESTION, {"model": "other"}, 404, "not_found_error", "other"),
        (QUESTION, ENDLESS, 408, "timeout_error", "time limit"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_have_anthropics_shape(
    http: httpx.Client, messages: Any, fields: Any, status: int, kind: str, words: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": messages, **fields}
    assert words in refused(http.post(MESSAGES, json=body), status, kind)


def test_errors_of_routes_and_bodies_have_anthropics_shape(claude: Any, http: httpx.Client) -> None:
    import anthropic

    refused(http.get(f"{MESSAGES}/batches"), 404, "not_found_error")
    refused(http.get(MESSAGES), 405)
    refused(http.post(MESSAGES, content=b"{"), 400)
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.messages.create(model="other", max_tokens=5, messages=QUESTION)
    assert error.value.request_id


def test_models_are_listed_for_both_kinds_of_clients(claude: Any, client: Any) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.year > 2000 and model.max_input_tokens in (4096, 8192)
    assert claude.models.retrieve(MODEL).id == client.models.retrieve(MODEL).id == MODEL


def agent_request(history: list[dict[str, Any]], *, number: int) -> dict[str, Any]:
    names = {"Bash": "command", "Read": "file_path", "TodoWrite": "todos"}
    properties = {name: {key: {"type": "string"}} for name, key in names.items()}
    tools = [
        {"name": name, "input_schema": {"type": "object", "properties": fields}}
        for name, fields in properties.items()
    ]
    version = f"cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05};"
    texts = (
        f"x-anthropic-billing-header: {version}",
        "You are a coding agent in a terminal.",
        "\nUse the tools to help with software.\n\n# Environment\nLinux",
    )
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    cached = {"cache_control": {"type": "ephemeral"}}
    return MESSAGES_DIALECT.body(
        history,
        limit=120,
        stream=True,
        system=[{"type": "text", "text": text, **cached} for text in texts],
        tools=[*tools, TOOL, search],
        metadata={"user_id": "user_0_account__session_0"},
        thinking={"type": "adaptive"},
        context_management={"edits": edits},
        output_config={"effort": "high"},
    )


def test_session_of_a_coding_agent_keeps_its_prefix_and_never_breaks(http: httpx.Client) -> None:
    """Check that each prompt begins with the one before, with calls, reminders and notes."""
    words = "<system-reminder>\nThe todo list is empty.\n</system-reminder>"
    reminder = {"type": "text", "text": words}
    question = {"type": "text", "text": "What is the weather in Paris?"}
    history: list[dict[str, Any]] = [{"role": "user", "content": [reminder, question]}]
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    parts = [{"type": "text", "text": text} for text in ("19 degrees", "cloudy")]
    contents: list[Any] = ["19 degrees, cloudy", parts, [{"type": "image", "source": source}]]
    contents += ["<tool_use_error>The service is busy</tool_use_error>", ""]
    headers = {"anthropic-beta": "a,b", "anthropic-version": "2023-06-01"}
    num_before = 0

    def answered(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_before
        response = http.post(f"{MESSAGES}?beta=true", json=request, headers=headers)
        answer = join_messages(events_of(response))
        usage = answer["usage"]
        assert not num_before or usage["cache_read_input_tokens"] > num_before - 32
        num_before = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return answer

    for number, content in enumerate(contents):
        request = agent_request(history, number=number)
        request["tool_choice"] = {"type": "any"}  # The small model would rather answer.
        answer = answered(request)
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert answer["stop_reason"] in ("tool_use", "max_tokens") and calls
        is_error = "error" in str(content)
        results = [result_of(call["id"], content, is_error=is_error) for call in reversed(calls)]
        history.append({"role": "assistant", "content": answer["content"]})
        history.append({"role": "user", "content": [*results, reminder] if number % 2 else results})
        if number == 1:
            history.append({"role": "system", "content": "The user has opened a file."})
    final = answered(agent_request(history, number=99))
    assert final["content"] and final["stop_reason"] in ("end_turn", "tool_use", "max_tokens")
