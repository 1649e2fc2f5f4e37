import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.api_support import (
    CHAT,
    CHAT_DIALECT,
    COMPLETIONS,
    DIALECTS,
    FUNCTION,
    GREEDY,
    JSON,
    MESSAGES,
    MESSAGES_DIALECT,
    QUESTION,
    RESPONSES,
    RESPONSES_DIALECT,
    WEATHER,
    WEATHER_QUESTION,
    Dialect,
    Said,
    deltas_of,
    error_of,
    every_dialect,
    every_way,
    post,
    stream,
    whole_and_streamed,
)
from tests.e2e.conftest import MODEL, Server, eventually, serving

THOUGHT_STOP = "\n"  # This text is in the thinking, but not in the content.
LAST_TOKENS = range(16, 0, -5)  # limits that leave out 1 to 16 of the last tokens
CLOCK = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}


@every_dialect
def test_answer_thinks_and_counts_its_tokens(http: httpx.Client, dialect: Dialect) -> None:
    said = dialect.ask(http, dialect.body())
    assert said.reason == "stop" and "85" in said.content
    assert said.reasoning and "<think>" not in said.reasoning + said.content
    assert 0 < said.tokens[2] < said.tokens[1]


WEATHER_CALL = {"messages": WEATHER_QUESTION, "functions": (FUNCTION,)}
CASES: list[tuple[str, Dialect, dict[str, Any], str]] = [
    (f"{name}-{case}", dialect, body, reason)
    for name, dialect in DIALECTS.items()
    for case, body, reason in (
        ("text", {}, "stop"),
        ("call", WEATHER_CALL, "tool_calls"),
        ("length", {"limit": 20}, "length"),
        ("stop", {"stop": ["never", "85"]}, "stop"),
    )
]
ONE_CALL = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
OMITTED = {"thinking": {"type": "adaptive", "display": "omitted"}}
SUMMARY = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
CASES += [
    ("messages-forced", MESSAGES_DIALECT, {**WEATHER_CALL, **ONE_CALL}, "tool_calls"),
    ("messages-omitted", MESSAGES_DIALECT, OMITTED, "stop"),
    ("responses-summary", RESPONSES_DIALECT, SUMMARY, "stop"),
    ("responses-logprobs", RESPONSES_DIALECT, LOGPROBS, "stop"),
]


FULL = ("chat-stop", "messages-length", "responses-stop")


@pytest.mark.parametrize(
    ("dialect", "fields", "reason"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.full] if name in FULL else [])
        for name, *case in CASES
    ],
)
def test_stream_adds_up_to_the_whole_answer(
    http: httpx.Client, dialect: Dialect, fields: dict[str, Any], reason: str
) -> None:
    body = dialect.body(**fields)
    whole = dialect.ask(http, body)
    assert dialect.ask(http, body, is_streamed=True) == whole
    assert whole.reason == reason
    if reason == "length":
        assert whole.tokens[1] == 20


@pytest.fixture(scope="module")
def plain(server: Any) -> Said:
    with server.http() as http:
        return CHAT_DIALECT.ask(http, CHAT_DIALECT.body())


@every_way("chat-stream", "messages-whole", "responses-stream")
def test_stop_strings_end_content_but_not_thinking(
    http: httpx.Client, plain: Said, dialect: Dialect, is_streamed: bool
) -> None:
    def said(*stop: str) -> Said:
        return dialect.ask(http, dialect.body(stop=list(stop)), is_streamed=is_streamed)

    assert THOUGHT_STOP in plain.reasoning and THOUGHT_STOP not in plain.content
    whole = said(THOUGHT_STOP)
    assert (whole.reasoning, whole.content) == (plain.reasoning, plain.content)
    word = plain.content.split()[-1][-3:]  # The word may also be in the thinking.
    truncated = said(word, THOUGHT_STOP)
    assert truncated.reasoning == plain.reasoning
    assert truncated.content == plain.content.partition(word)[0]
    assert truncated.stop == (None if dialect is RESPONSES_DIALECT else word)


@whole_and_streamed
def test_stop_string_is_kept_on_request(http: httpx.Client, plain: Said, is_streamed: bool) -> None:
    word = plain.content.split()[-1][-3:]
    body = CHAT_DIALECT.body(stop=[word], include_stop_str_in_output=True)
    said = CHAT_DIALECT.ask(http, body, is_streamed=is_streamed)
    assert said.content == plain.content.partition(word)[0] + word


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_answers_without_thinking_end_at_once(http: httpx.Client, thinking: str) -> None:
    body = CHAT_DIALECT.body(thinking={"type": thinking}, stream_interval=50, n=2)
    text = post(http, CHAT, **body)["choices"][0]["message"]["content"]
    word = text.split()[1]
    for choice in post(http, CHAT, **body, stop=[word])["choices"]:
        assert choice["message"]["content"] == text.partition(word)[0]
        assert choice["finish_reason"] == "stop"


def test_completions_stop_within_thinking_text(http: httpx.Client, plain: Said) -> None:
    prompt = post(http, f"{CHAT}/render", messages=QUESTION)["prompt"]
    body = {**GREEDY, "prompt": prompt, "max_tokens": 200, "stop": THOUGHT_STOP}
    (choice,) = post(http, COMPLETIONS, **body)["choices"]
    assert choice["text"] == plain.reasoning.partition(THOUGHT_STOP)[0]
    assert choice["stop_reason"] == THOUGHT_STOP


@every_way("chat-whole", "messages-whole", "messages-stream", "responses-stream")
def test_truncated_call_is_open(http: httpx.Client, dialect: Dialect, is_streamed: bool) -> None:
    """A whole message of Anthropic's API omits a truncated call, since clients run every call."""
    whole = dialect.ask(http, dialect.body(**WEATHER_CALL))
    ((_, arguments),) = whole.calls
    omits = dialect is MESSAGES_DIALECT and not is_streamed
    num_truncated = 0
    for num_missing in LAST_TOKENS:
        body = dialect.body(**WEATHER_CALL, limit=whole.tokens[1] - num_missing)
        said = dialect.ask(http, body, is_streamed=is_streamed)
        assert said.reason == "length"
        if omits:
            assert all(made == arguments for _, made in said.calls)
            num_truncated += not said.calls
        elif said.calls:
            ((_, made),) = said.calls
            if dialect is RESPONSES_DIALECT:
                status = "completed" if made == arguments else "incomplete"
                assert said.parts[-1]["status"] == status
            if made != arguments:
                num_truncated += 1
                assert arguments.startswith(made)
                with pytest.raises(json.JSONDecodeError):
                    json.loads(made)
    assert num_truncated >= 2


def test_response_continues_after_a_truncated_call(http: httpx.Client) -> None:
    dialect = RESPONSES_DIALECT
    limit = dialect.ask(http, dialect.body(**WEATHER_CALL)).tokens[1] - 12
    truncated = post(http, dialect.path, **dialect.body(**WEATHER_CALL, limit=limit))
    call = truncated["output"][-1]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    body = dialect.body("Please try again.", functions=(FUNCTION,), limit=4)
    assert dialect.ask(http, body | {"previous_response_id": truncated["id"]}).tokens[1] == 4


@every_way("chat-whole", "messages-stream", "responses-stream")
def test_hang_up_frees_the_sequence(server: Server, dialect: Dialect, is_streamed: bool) -> None:
    body = dialect.body(limit=100_000) | {"ignore_eos": True, "stream": is_streamed}
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
    aborted = server.num_aborted

    def ask_and_hang_up() -> bool:
        """Return whether sequences were aborted. On a busy machine none may have started."""
        with (
            contextlib.suppress(httpx.ReadTimeout),
            server.http() as other,
            other.stream("POST", dialect.path, json=body, timeout=1) as response,
        ):
            next(response.iter_lines())
        assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
        return server.num_aborted > aborted

    assert any(ask_and_hang_up() for _ in range(20))
    assert eventually(lambda: server.gauge("vllm:kv_cache_usage_perc") == 0)


@every_dialect
def test_text_like_a_call_is_content_without_tools(http: httpx.Client, dialect: Dialect) -> None:
    opener = "<minimax:tool_call>"
    bias = {str(Tokenizer.from_folder(EMBEDDED["nano"]).token_id(opener)): 100}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert dialect.ask(http, dialect.body(limit=3, logit_bias=bias, **off)).content == opener * 3


@pytest.mark.parametrize(
    ("dialect", "mode"),
    [
        pytest.param(CHAT_DIALECT, "auto", marks=pytest.mark.full),
        (CHAT_DIALECT, "required"),
        (RESPONSES_DIALECT, "auto"),
        pytest.param(RESPONSES_DIALECT, "required", marks=pytest.mark.full),
    ],
    ids=["chat-auto", "chat-required", "responses-auto", "responses-required"],
)
def test_all_tools_are_shown_some_called(http: httpx.Client, dialect: Dialect, mode: str) -> None:
    body = dialect.body(WEATHER_QUESTION, functions=(FUNCTION, CLOCK), limit=400)
    free = dialect.ask(http, body)
    assert [name for name, _ in free.calls] == ["get_weather"]
    tools = [{"type": "function", "name": "get_time"}]
    only = {"type": "allowed_tools", "mode": mode, "tools": tools}
    held = dialect.ask(http, body | {"tool_choice": only})
    assert {name for name, _ in held.calls} <= {"get_time"} and (held.calls or mode == "auto")
    streamed = dialect.ask(http, body | {"tool_choice": only}, is_streamed=True)
    assert streamed.calls == held.calls
    assert held.tokens[0] == free.tokens[0]
    assert held.cached_tokens == free.tokens[0] // 16 * 16
    misspelt = only | {"tools": [{"type": "function", "name": "get_tim"}]}
    refused = http.post(dialect.path, json=body | {"tool_choice": misspelt})
    assert "get_time" in error_of(refused, 400, param="tool_choice.tools[0].name")["message"]


RENDER = f"{CHAT}/render"
NOTE = "[an image, which this model cannot see]"
PIXEL = "data:image/png;base64,AAAA"
TRUNCATED = '{"path": "a", "content": "abc'
WRITE = {"name": "write", "description": "Write a file.", "parameters": {"type": "object"}}
RAW_SMILE = rb"half \ud83d of \ude00 a \ud83d\ude00"


def chat_history(arguments: str = TRUNCATED) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    content = [{"type": "text", "text": "half SMILE"}, image]
    return [
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
    ]


def messages_history() -> list[dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    content = [image, {"type": "text", "text": "half SMILE"}]
    call = {"type": "tool_use", "id": "t1", "name": "write", "input": TRUNCATED}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    return [
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, image]},
    ]


def responses_history() -> list[dict[str, Any]]:
    image = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    output = [{"type": "input_text", "text": "half SMILE"}, image]
    return [
        {"role": "user", "content": [{"type": "input_text", "text": "Look:"}, image]},
        {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": TRUNCATED},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]


HISTORIES = [chat_history(), messages_history(), responses_history()]


@pytest.mark.parametrize(("name", "history"), [*zip(DIALECTS, HISTORIES, strict=True)])
@whole_and_streamed
def test_images_truncated_calls_and_lone_surrogates_in_a_history_are_accepted(
    http: httpx.Client, name: str, history: list[dict[str, Any]], is_streamed: bool
) -> None:
    dialect = DIALECTS[name]
    body = dialect.body(history, functions=(WRITE,), limit=2, stream=is_streamed)
    content = json.dumps(body).encode().replace(b"half SMILE", RAW_SMILE)
    assert b"\\ud83d of" in content
    answer = http.post(dialect.path, content=content, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text or '"error":null' in answer.text


def test_prompt_has_notes_raw_arguments_and_replacement_characters(http: httpx.Client) -> None:
    content = json.dumps({"messages": chat_history()}).encode().replace(b"half SMILE", RAW_SMILE)
    prompt = http.post(RENDER, content=content, headers=JSON).json()["prompt"]
    assert f"Look:\n{NOTE}" in prompt
    assert f'<parameter name="arguments">{TRUNCATED}</parameter>' in prompt
    said = "half \ufffd of \ufffd a \U0001f600"
    assert f"<response>{said}\n</response>\n<response>{NOTE}\n</response>" in prompt


@pytest.mark.parametrize("arguments", ["null", "", "{}"])
def test_call_without_arguments_has_none_in_the_prompt(http: httpx.Client, arguments: str) -> None:
    prompt = post(http, RENDER, messages=chat_history(arguments))["prompt"]
    _, opener, after = prompt.rpartition('<invoke name="write">')
    assert opener and "<parameter" not in after


def test_the_second_time_the_prompt_comes_from_the_cache(http: httpx.Client) -> None:
    text = "A shop has 12 pens and sells 5 of them in the morning. How many are left?"
    body = CHAT_DIALECT.body([{"role": "user", "content": text}])
    first, second = (CHAT_DIALECT.ask(http, body) for _ in range(2))
    assert second.cached_tokens > first.cached_tokens
    assert first.content == second.content


def test_usage_is_streamed_when_asked_and_no_call_without_a_choice(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 2}
    assert all("usage" not in event for event in stream(http, CHAT, **body))
    events = stream(http, CHAT, **body, stream_options={"continuous_usage_stats": True})
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(totals) and totals[-1] == 2
    body = CHAT_DIALECT.body(WEATHER_QUESTION, limit=200)
    hidden = CHAT_DIALECT.ask(http, body | {"tools": [WEATHER], "tool_choice": "none"})
    assert hidden.calls == []
    assert hidden.tokens[0] == CHAT_DIALECT.ask(http, body).tokens[0]


def test_invoke_without_its_block_is_text_where_its_tool_is_not_allowed(http: httpx.Client) -> None:
    """Force an invoke tag by a schema; without a block it must stay text."""
    invoke = '<invoke name="get_weather">\n</invoke>'
    texts = ("<minimax:tool_call>", invoke)
    opener, first = (str(post(http, "/tokenize", prompt=text)["tokens"][0]) for text in texts)
    clock = {"type": "function", "function": {"name": "get_time"}}
    body = CHAT_DIALECT.body(WEATHER_QUESTION, thinking_token_budget=0, tools=[WEATHER, clock])
    body |= {"regex": invoke, "logit_bias": {opener: -100, first: 100}}
    assert CHAT_DIALECT.ask(http, body).calls[0][0] == "get_weather"
    only = {"type": "allowed_tools", "mode": "auto", "tools": [clock]}
    held = CHAT_DIALECT.ask(http, body | {"tool_choice": only})
    assert held.content == invoke and held.calls == []


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled(http: httpx.Client, temperature: float) -> None:
    allowed = post(http, "/tokenize", prompt="apples and 85")["tokens"]
    body = {"messages": QUESTION, "max_tokens": 12, "temperature": temperature, "seed": 4}
    answer = post(http, CHAT, **body, allowed_token_ids=allowed, return_token_ids=True)
    token_ids = answer["choices"][0]["token_ids"]
    assert len(token_ids) == 12 and set(token_ids) <= set(allowed)
    for wrong in ([], [-1], [10**6]):
        refused = http.post(CHAT, json={**body, "allowed_token_ids": wrong})
        error_of(refused, 400, param="allowed_token_ids")
    both = {**body, "allowed_token_ids": allowed, "regex": "a+", "stream": True}
    assert "remove allowed_token_ids" in error_of(http.post(CHAT, json=both), 400)["message"]


def test_logprobs_of_content_and_prompt_are_returned_on_request(http: httpx.Client) -> None:
    body = CHAT_DIALECT.body(logprobs=True, top_logprobs=3)
    (choice,) = post(http, CHAT, **body)["choices"]
    content, message = choice["logprobs"]["content"], choice["message"]
    assert message["reasoning_content"]
    assert "".join(token["token"] for token in content) == message["content"]
    for token in content:
        assert len(token["top_logprobs"]) == 3 and token["logprob"] <= 0
        assert token["top_logprobs"][0]["token"] == token["token"]  # Greedy takes the likeliest.
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]
    events = [event["choices"][0]["logprobs"] for event in stream(http, CHAT, **body)]
    streamed = [entry["token"] for logprobs in events if logprobs for entry in logprobs["content"]]
    assert streamed == [entry["token"] for entry in content]
    body = {"messages": QUESTION, "max_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True}
    answer = post(http, CHAT, **body)
    (first, *scores), (_, *ids) = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert first is None and len(ids) + 1 == answer["usage"]["prompt_tokens"]
    for token_id, entry in zip(ids, scores, strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_last_message_can_be_continued(http: httpx.Client) -> None:
    begun = {"role": "assistant", "reasoning_content": "47 + 38 = 85", "content": "He has"}
    body = CHAT_DIALECT.body([*QUESTION, begun], limit=16, return_token_ids=True)
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    answer = post(http, CHAT, **body)
    message = answer["choices"][0]["message"]
    assert message["content"] and message["reasoning"] is None  # The content is continued.
    echo = post(http, COMPLETIONS, prompt=[answer["prompt_token_ids"]], echo=True, max_tokens=0)
    assert echo["choices"][0]["text"].endswith("85\n</think>\n\nHe has")


@whole_and_streamed
def test_unmatched_think_closer_is_not_text(http: httpx.Client, is_streamed: bool) -> None:
    token_id = Tokenizer.from_folder(EMBEDDED["nano"]).token_id("</think>")
    closer = {"type": "token", "token": token_id}
    words = [{"type": "const_string", "value": word} for word in ("One `</", "think>`", " two.")]
    form = {"type": "sequence", "elements": [closer, words[0], words[1], closer, words[2], closer]}
    tag = {"structural_tag": {"type": "structural_tag", "format": form}}
    body = CHAT_DIALECT.body(limit=50, structured_outputs=tag, thinking={"type": "disabled"})
    assert CHAT_DIALECT.ask(http, body, is_streamed=is_streamed).content == "One `</think>` two."


def test_server_options_set_parser_template_defaults_and_stream_interval(tmp_path: Path) -> None:
    options = ["--reasoning-parser", "minimax-append-think", "--stream-interval", "1000"]
    options += ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    with serving(*options, log_file=tmp_path / "log") as running, running.http() as http:

        def message(**fields: Any) -> Any:
            answer = post(http, CHAT, **CHAT_DIALECT.body(limit=100, **fields))
            return answer["choices"][0]["message"]

        assert "think" not in message()["content"]
        thinks = message(thinking={"type": "enabled"})
        assert thinks["content"].startswith("<think>") and "</think>" in thinks["content"]
        assert thinks["reasoning_content"] is None
        assert message(thinking={"type": "enabled"}, reasoning_split=True)["reasoning_content"]

        # Responses and messages have a separate field for reasoning.
        on = {"chat_template_kwargs": {"enable_thinking": True}}
        thought, said = post(http, RESPONSES, **GREEDY, input=QUESTION, **on)["output"]
        assert thought["type"] == "reasoning" and "think>" not in said["content"][0]["text"]
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 120}
        thought, said = post(http, MESSAGES, **body, thinking={"type": "adaptive"})["content"]
        assert thought["type"] == "thinking" and "think>" not in said["text"]

        def texts(**fields: Any) -> list[str]:
            events = stream(http, CHAT, **body, ignore_eos=True, **fields)
            return [text for delta in deltas_of(events) if (text := delta.get("content"))]

        joined = texts()
        num_full = len("".join(joined)) / 200  # A fragment has at most 200 characters.
        assert len(joined) <= num_full + 3  # The first and the last fragment are not joined.
        # A busy server joins fragments that arrive together, so try several times.
        assert any(len(texts(stream_interval=1)) > 20 for _ in range(10))
