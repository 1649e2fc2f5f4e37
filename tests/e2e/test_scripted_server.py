import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from negamax.cli.main import main
from tests.e2e.api_support import CHAT, COMPLETIONS, MESSAGES, join_messages, post, stream
from tests.e2e.conftest import shared

LONG = "Always keep to the project's conventions. " * 1500  # an agent's system prompt
WRITE = {
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["file_path", "content"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "Write", "parameters": WRITE}}]
QUESTION = {"role": "user", "content": "Please write hello.py"}
ARGUMENTS = {"file_path": "hello.py", "content": 'print("hello from negamax")\n'}
server = shared("--script agents")


def test_chat_loop_with_an_agents_long_prompt(http: httpx.Client) -> None:
    messages: list[Any] = [{"role": "system", "content": LONG}, QUESTION]
    first = post(http, CHAT, messages=messages, tools=TOOLS)
    assert first["usage"]["prompt_tokens"] > 10_000
    (choice,) = first["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call["id"], "content": "hello from negamax"}
    second = post(http, CHAT, messages=[*messages, choice["message"], result], tools=TOOLS)
    assert second["choices"][0]["message"]["content"].startswith("Done: `hello.py`")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 10_000


def test_messages_stream_the_same_call(http: httpx.Client) -> None:
    body = {"model": "nano", "max_tokens": 500, "messages": [QUESTION]}
    tools = [{"name": "Write", "input_schema": WRITE}]
    answer = join_messages(stream(http, MESSAGES, **body, tools=tools))
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert call["input"] == ARGUMENTS and answer["stop_reason"] == "tool_use"


def test_concurrent_requests_get_their_own_answers(http: httpx.Client) -> None:
    def ask(number: int) -> tuple[int, bool]:
        asked = QUESTION if number % 2 else {"role": "user", "content": f"Question {number}"}
        body = {"messages": [asked], "tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
        choices = post(http, CHAT, **body)["choices"]
        for choice in choices:
            assert bool(choice["logprobs"]["content"]) == bool(choice["message"]["content"])
        return number, bool(choices[1]["message"].get("tool_calls"))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(16)))
    assert found == [(number, bool(number % 2)) for number in range(16)]


def test_grammars_hold_against_the_script_and_prompts_are_scored(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Yes or no?"}]
    answer = post(http, CHAT, messages=messages, structured_outputs={"choice": ["yes", "no"]})
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")
    prompt = [300 + number for number in range(40)]
    answer = post(http, COMPLETIONS, prompt=prompt, max_tokens=1, prompt_logprobs=0)
    _, *scores = answer["choices"][0]["prompt_logprobs"]
    assert [int(next(iter(score))) for score in scores] == prompt[1:]
    assert all(entry["logprob"] == 0.0 for score in scores for entry in score.values())


def test_missing_script_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nano", "--prompt", "Hi", "--script", "nowhere.toml"]) == 2
    assert "--script is 'nowhere.toml', which cannot be read" in capsys.readouterr().err
