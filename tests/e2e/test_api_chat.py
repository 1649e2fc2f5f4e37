from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.conftest import MODEL, Server, eventually, serving

if TYPE_CHECKING:
    import openai

QUESTION = [
    {
        "role": "user",
        "content": "Tom has 47 apples and buys 38 more. How many apples does he have now?",
    }
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(client.chat.completions.create(model=MODEL, stream=True, **options))


def joined(chunks: list[Any], field: str, index: int = 0) -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def joined_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for piece in choice.delta.tool_calls or ():
                if piece.index not in calls:
                    assert piece.id.startswith("call_") and len(piece.id) == 29
                    assert piece.type == "function"
                    calls[piece.index] = [piece.function.name, ""]
                else:
                    assert piece.id is None and piece.function.name is None
                calls[piece.index][1] += piece.function.arguments or ""
    return [(name, arguments) for _, (name, arguments) in sorted(calls.items())]


def test_answer_thinks_and_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert "85" in (choice.message.content or "")
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"]
    assert "<think>" not in extra["reasoning"] + (choice.message.content or "")
    usage = answer.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details and usage.prompt_tokens_details
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_the_second_time_the_prompt_comes_from_the_cache(client: openai.OpenAI) -> None:
    messages = [
        {
            "role": "user",
            "content": "A shop has 12 pens and sells 5 of them in the morning. How many are left?",
        }
    ]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        for _ in range(2)
    ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[1] > cached[0]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize(
    "options", [{"messages": QUESTION}, {"messages": WEATHER_QUESTION, "tools": [WEATHER]}]
)
def test_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model=MODEL, temperature=0, **options)
    chunks = stream(client, temperature=0, stream_options={"include_usage": True}, **options)
    message = whole.choices[0].message
    assert joined(chunks, "content") == (message.content or "")
    assert (
        joined(chunks, "reasoning")
        == joined(chunks, "reasoning_content")
        == (message.model_extra or {})["reasoning"]
    )
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert joined_calls(chunks) == calls
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage and chunks[-1].usage
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_ends_with_done_and_null_usage_only_when_asked(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 2, "stream": True}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])
    asked = http.post(
        "/v1/chat/completions", json=body | {"stream_options": {"continuous_usage_stats": True}}
    )
    totals = [
        json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"]
        for event in asked.text.split("\n\n")[:-2]
    ]
    assert totals == sorted(totals) and totals[-1] == 2


def test_tool_choice_none_gives_no_calls(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": WEATHER_QUESTION,
        "temperature": 0,
        "max_tokens": 200,
    }
    hidden = client.chat.completions.create(tools=[WEATHER], tool_choice="none", **options)
    without = client.chat.completions.create(**options)
    assert not hidden.choices[0].message.tool_calls
    assert hidden.usage and without.usage
    assert hidden.usage.prompt_tokens == without.usage.prompt_tokens


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_shown_all_tools_and_calls_only_allowed_ones(
    client: openai.OpenAI, mode: str
) -> None:
    clock = {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    }
    options: dict[str, Any] = {
        "messages": WEATHER_QUESTION,
        "tools": [WEATHER, clock],
        "temperature": 0,
        "max_tokens": 400,
    }
    free = client.chat.completions.create(model=MODEL, **options)
    assert [call.function.name for call in free.choices[0].message.tool_calls or ()] == [
        "get_weather"
    ]
    only = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    options |= {"tool_choice": {"type": "allowed_tools", "allowed_tools": only}}
    answer = client.chat.completions.create(model=MODEL, **options)
    names = {call.function.name for call in answer.choices[0].message.tool_calls or ()}
    assert names <= {"get_time"} and (names or mode == "auto")
    assert {name for name, _ in joined_calls(stream(client, **options))} == names
    assert answer.usage and free.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens == free.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == free.usage.prompt_tokens // 16 * 16  # type: ignore[operator]


def test_an_invoke_without_its_block_is_text_where_its_tool_is_not_allowed(
    http: httpx.Client,
) -> None:
    """A schema makes the model write one here."""
    clock = {"type": "function", "function": {"name": "get_time"}}
    opener = http.post("/tokenize", json={"prompt": "<minimax:tool_call>"}).json()["tokens"]
    invoke = '<invoke name="get_weather">\n</invoke>'
    body = {
        "messages": WEATHER_QUESTION,
        "tools": [WEATHER, clock],
        "temperature": 0,
        "thinking_token_budget": 0,
    }
    bias = {
        str(opener[0]): -100,
        str(http.post("/tokenize", json={"prompt": invoke}).json()["tokens"][0]): 100,
    }
    body |= {"regex": invoke, "logit_bias": bias}
    free, held = (
        http.post("/v1/chat/completions", json=body | choice).json()["choices"][0]["message"]
        for choice in (
            {},
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [clock]}},
        )
    )
    assert free["tool_calls"][0]["function"]["name"] == "get_weather"
    assert held["content"] == invoke and "tool_calls" not in held


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled(
    client: openai.OpenAI, http: httpx.Client, temperature: float
) -> None:
    import openai

    allowed = http.post("/tokenize", json={"prompt": "apples and 85"}).json()["tokens"]
    fields: dict[str, Any] = {
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": temperature,
        "seed": 4,
    }
    extra = {"allowed_token_ids": allowed, "return_token_ids": True}
    answer = client.chat.completions.create(model=MODEL, extra_body=extra, **fields)
    token_ids = answer.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(token_ids) == 12 and set(token_ids) <= set(allowed)
    for wrong in ([], [-1], [10**6]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, extra_body={"allowed_token_ids": wrong}, **fields
            )
        assert caught.value.param == "allowed_token_ids"
    with pytest.raises(openai.BadRequestError, match="send only one of them"):
        client.chat.completions.create(
            model=MODEL, extra_body={**extra, "regex": "a+"}, stream=True, **fields
        )


def test_logprobs_describe_every_token(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.chat.completions.create(model=MODEL, **options)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 12
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        # greedy sampling takes the likeliest token
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes or ()).decode("utf-8", "replace") == token.token
    streamed = [
        token.token
        for chunk in stream(client, **options)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert streamed == [token.token for token in logprobs.content]


def test_prompt_logprobs_and_token_ids_are_returned_on_request(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert (
        len(answer["prompt_logprobs"])
        == len(answer["prompt_token_ids"])
        == answer["usage"]["prompt_tokens"]
    )
    assert answer["prompt_logprobs"][0] is None
    for token_id, entry in zip(
        answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:], strict=True
    ):
        assert entry[str(token_id)]["logprob"] <= 0
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body={"include_reasoning": False}
    )
    assert (answer.choices[0].message.model_extra or {})["reasoning"] is None
    assert answer.choices[0].message.content


def test_last_message_can_be_continued(http: httpx.Client) -> None:
    begun = {"role": "assistant", "reasoning_content": "47 + 38 = 85", "content": "He has"}
    body = {
        "messages": [*QUESTION, begun],
        "temperature": 0,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 16,
        "return_token_ids": True,
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    assert "error" not in answer
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is None  # the content is continued
    assert message["content"]
    tokens = http.post(
        "/v1/completions",
        json={"prompt": [answer["prompt_token_ids"]], "echo": True, "max_tokens": 0},
    )
    assert tokens.json()["choices"][0]["text"].endswith("85\n</think>\n\nHe has")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 100_000, "n": 8}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 100_000}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 100_000}),
    ],
    ids=["chat", "messages", "responses"],
)
def test_client_that_hangs_up_frees_its_sequence(
    server: Server, path: str, body: dict[str, Any], streamed: bool
) -> None:
    body = {"model": MODEL, "ignore_eos": True, "stream": streamed, **body}
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
    aborted = server.num_aborted

    def ask_and_hang_up() -> bool:
        """Return whether sequences were aborted; on a busy machine none may have started."""
        with (
            contextlib.suppress(httpx.ReadTimeout),
            server.http() as other,
            other.stream("POST", path, json=body, timeout=1) as response,
        ):
            next(response.iter_lines())
        assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
        return server.num_aborted > aborted

    assert any(ask_and_hang_up() for _ in range(20))
    assert eventually(lambda: server.gauge("vllm:kv_cache_usage_perc") == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_without_tools_what_looks_like_a_call_is_text(http: httpx.Client, path: str) -> None:
    opener = "<minimax:tool_call>"
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body["logit_bias"] = {str(Tokenizer.from_folder(EMBEDDED["nano"]).token_id(opener)): 100}
    if path == "/v1/responses":
        (item,) = http.post(path, json={**body, "input": QUESTION, "max_output_tokens": 3}).json()[
            "output"
        ]
        said = item["content"][0]["text"]
    elif path == "/v1/messages":
        body |= {"messages": QUESTION, "max_tokens": 3, "thinking": {"type": "disabled"}}
        (block,) = http.post(path, json=body).json()["content"]
        said = block["text"]
    else:
        said = http.post(path, json={**body, "messages": QUESTION, "max_tokens": 3}).json()[
            "choices"
        ][0]["message"]["content"]
    assert said == opener * 3


@pytest.mark.parametrize("streamed", [False, True])
def test_unmatched_think_closer_is_not_text(client: openai.OpenAI, streamed: bool) -> None:
    closer = {
        "type": "token",
        "token": Tokenizer.from_folder(EMBEDDED["nano"]).token_id("</think>"),
    }
    words = [{"type": "const_string", "value": word} for word in ("One `</", "think>`", " two.")]
    form = {"type": "sequence", "elements": [closer, words[0], words[1], closer, words[2], closer]}
    tag = {"structural_tag": {"type": "structural_tag", "format": form}}
    body = {"structured_outputs": tag, "thinking": {"type": "disabled"}}
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 50, "extra_body": body}
    if streamed:
        text = joined(stream(client, **options), "content")
    else:
        text = (
            client.chat.completions.create(model=MODEL, **options).choices[0].message.content or ""
        )
    assert text == "One `</think>` two."


def test_server_options_set_parser_template_defaults_and_stream_interval(tmp_path: Path) -> None:
    options = ["--reasoning-parser", "minimax-append-think", "--stream-interval", "1000"]
    options += ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    with serving(*options, log_file=tmp_path / "log") as running, running.http() as http:

        def message(**fields: Any) -> dict[str, Any]:
            body = {"messages": QUESTION, "temperature": 0, "max_tokens": 100, **fields}
            answer: dict[str, Any] = http.post("/v1/chat/completions", json=body).json()["choices"][
                0
            ]["message"]
            return answer

        assert "think" not in message()["content"]
        thinks = message(thinking={"type": "enabled"})
        assert thinks["content"].startswith("<think>") and "</think>" in thinks["content"]
        assert thinks["reasoning_content"] is None
        assert message(thinking={"type": "enabled"}, reasoning_split=True)["reasoning_content"]

        # responses and messages have their own place for reasoning
        body: dict[str, Any] = {
            "input": QUESTION,
            "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": True},
        }
        thought, said = http.post("/v1/responses", json=body).json()["output"]
        assert thought["type"] == "reasoning" and "think>" not in said["content"][0]["text"]
        body = {
            "model": MODEL,
            "messages": QUESTION,
            "max_tokens": 200,
            "thinking": {"type": "adaptive"},
        }
        thought, said = http.post("/v1/messages", json=body).json()["content"]
        assert thought["type"] == "thinking" and "think>" not in said["text"]

        def events(**fields: Any) -> list[str]:
            body = {
                "messages": QUESTION,
                "stream": True,
                "max_tokens": 200,
                "ignore_eos": True,
                **fields,
            }
            lines = http.post("/v1/chat/completions", json=body).text.splitlines()
            deltas = [
                json.loads(line[6:])["choices"][0]["delta"]
                for line in lines
                if line.startswith("data: {")
            ]
            return [delta.get("content") or "" for delta in deltas]

        joined_texts = events()
        num_full = len("".join(joined_texts)) / 200  # fragments have at most 200 characters
        # the first and the last are not joined
        assert len([text for text in joined_texts if text]) <= num_full + 3
        # retry: a busy server joins fragments that arrive together
        assert any(len(events(stream_interval=1)) > 20 for _ in range(10))


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    questions = [
        f"Tom has {number} apples and buys 2 more. How many apples does he have now?"
        for number in range(10, 26)
    ]
    answers: dict[str, str] = {}

    def ask(question: str) -> None:
        messages: list[Any] = [{"role": "user", "content": question}]
        chunks = stream(client, messages=messages, temperature=0, max_tokens=300)
        answers[question] = joined(chunks, "content")

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = [
        str(number + 2) in answers[question]
        for number, question in zip(range(10, 26), questions, strict=True)
    ]
    assert sum(right) >= 14
