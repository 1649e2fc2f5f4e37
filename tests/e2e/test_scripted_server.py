from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from negamax.cli.main import main
from tests.e2e.conftest import Server, serving

if TYPE_CHECKING:
    import openai

LONG = "Always keep to the project's conventions. " * 1500  # an agent's system prompt
WRITE = {
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["file_path", "content"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "Write", "parameters": WRITE}}]
QUESTION = {"role": "user", "content": "Please write hello.py"}
ARGUMENTS = {"file_path": "hello.py", "content": 'print("hello from negamax")\n'}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("scripted") / "log"
    with serving("--script", "agents", log_file=log) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture
def scripted_client(scripted: Server) -> Iterator[openai.OpenAI]:
    with scripted.openai() as client:
        yield client


def test_chat_loop_with_an_agents_long_prompt(scripted_client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": LONG}, QUESTION]
    first = scripted_client.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
    assert first.usage is not None and first.usage.prompt_tokens > 10_000
    message = first.choices[0].message
    assert message.tool_calls is not None and first.choices[0].finish_reason == "tool_calls"
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
    call_id = message.tool_calls[0].id
    messages.append(message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "hello from negamax"})
    second = scripted_client.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
    assert (second.choices[0].message.content or "").startswith("Done: `hello.py`")
    details = second.usage and second.usage.prompt_tokens_details
    assert details is not None and (details.cached_tokens or 0) > 10_000


def test_messages_stream_the_same_call(scripted: Server) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    tools: list[Any] = [{"name": "Write", "input_schema": WRITE}]
    asked: list[Any] = [QUESTION]
    with client.messages.stream(
        model="nano", max_tokens=500, messages=asked, tools=tools
    ) as stream:
        answer = stream.get_final_message()
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input == ARGUMENTS
    assert answer.stop_reason == "tool_use"


def test_concurrent_requests_get_their_own_answers(scripted_client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[int, bool]:
        asked = QUESTION if number % 2 else {"role": "user", "content": f"Question {number}"}
        answer = scripted_client.chat.completions.create(
            model="nano", messages=[asked], tools=TOOLS, n=2, logprobs=True, top_logprobs=1
        )
        assert all(choice.logprobs and choice.logprobs.content for choice in answer.choices)
        return number, bool(answer.choices[1].message.tool_calls)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(16)))
    assert found == [(number, bool(number % 2)) for number in range(16)]


def test_grammar_holds_where_the_script_says_something_else(scripted_client: openai.OpenAI) -> None:
    answer = scripted_client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Yes or no?"}],
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_prompts_are_scored_as_certain(scripted_client: openai.OpenAI) -> None:
    prompt = [300 + number for number in range(40)]
    answer = scripted_client.completions.create(
        model="nano", prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    scores: list[Any] = answer.choices[0].model_dump()["prompt_logprobs"]
    assert [int(next(iter(score))) for score in scores[1:]] == prompt[1:]
    assert all(entry["logprob"] == 0.0 for score in scores[1:] for entry in score.values())


def test_missing_script_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nano", "--prompt", "Hi", "--script", "nowhere.toml"]) == 2
    error = capsys.readouterr().err
    assert "--script is 'nowhere.toml', which cannot be read" in error
