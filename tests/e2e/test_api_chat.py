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
    GREEDY,
    MESSAGES,
    QUESTION,
    RESPONSES,
    WEATHER,
    WEATHER_QUESTION,
    deltas_of,
    error_of,
    post,
    stream,
    whole_and_streamed,
)
from tests.e2e.conftest import MODEL, serving


def test_prompts_are_cached_and_streams_have_usage_when_asked(http: httpx.Client) -> None:
    text = "A shop has 12 pens and sells 5 of them in the morning. How many are left?"
    body = CHAT_DIALECT.body([{"role": "user", "content": text}])
    first, second = (CHAT_DIALECT.ask(http, body) for _ in range(2))
    assert second.cached_tokens > first.cached_tokens
    assert first.content == second.content
    body = {"messages": QUESTION, "max_tokens": 2}
    assert all("usage" not in event for event in stream(http, CHAT, **body))
    events = stream(http, CHAT, **body, stream_options={"continuous_usage_stats": True})
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals == sorted(totals) and totals[-1] == 2


def test_calls_are_text_where_no_tool_is_allowed(http: httpx.Client) -> None:
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
    body = CHAT_DIALECT.body(WEATHER_QUESTION, limit=200)
    hidden = CHAT_DIALECT.ask(http, body | {"tools": [WEATHER], "tool_choice": "none"})
    assert hidden.calls == []
    assert hidden.tokens[0] == CHAT_DIALECT.ask(http, body).tokens[0]


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


def test_logprobs_describe_every_token_of_the_content(http: httpx.Client) -> None:
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


def test_prompt_logprobs_are_returned_and_last_messages_continued(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "prompt_logprobs": 1, "return_token_ids": True}
    answer = post(http, CHAT, **body)
    (first, *scores), (_, *ids) = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert first is None and len(ids) + 1 == answer["usage"]["prompt_tokens"]
    for token_id, entry in zip(ids, scores, strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
    assert len(answer["choices"][0]["token_ids"]) == 4
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
        body = {"model": MODEL, "messages": QUESTION, "max_tokens": 200}
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
