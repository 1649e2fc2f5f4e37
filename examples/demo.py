"""Serve the built-in model, stream a chat with thinking, run one tool call, and stop.

`make demo` runs this script. It exits with 1 if a step fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI

MODEL = "nano"
QUESTION = "Tom has 47 apples and buys 38 more. How many apples does he have now?"
ANSWER = "85"
TOOL_QUESTION = "What is the weather in Paris?"
WEATHER = {"temperature": 19, "condition": "cloudy"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

IS_TERMINAL = sys.stdout.isatty()


def styled(text: str, code: str) -> str:
    """Add an ANSI style if standard output is a terminal."""
    return f"\033[{code}m{text}\033[0m" if IS_TERMINAL else text


def heading(text: str) -> None:
    """Print the title of the next part."""
    print(styled(f"\n== {text}", "1"), flush=True)


def check(is_right: bool, problem: str) -> None:
    """Exit with `problem` unless `is_right`."""
    if not is_right:
        raise SystemExit(f"demo: {problem}")


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start `negamax serve nano` on a free port; return its process and URL when it is ready."""
    command = [
        sys.executable,
        "-m",
        "negamax",
        "serve",
        MODEL,
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    print("$ negamax serve nano", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    url = re.search(r"http://\S+/v1", line)
    check(url is not None, "the server did not start; see its messages above")
    print(line, end="", flush=True)
    return process, url[0] if url else ""


def stream(client: OpenAI, show: Callable[[str, str], None], **request: Any) -> dict[str, Any]:
    """Stream one answer; return its message, `usage` and seconds."""
    started = time.perf_counter()
    first = started
    parts = {"reasoning_content": "", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    usage = None
    chunks = client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, temperature=0, **request
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for field in parts:
                text = getattr(choice.delta, field, None)
                if text:
                    first = time.perf_counter() if first == started else first
                    parts[field] += text
                    show(field, text)
            for piece in choice.delta.tool_calls or ():
                if piece.index not in calls:
                    function = {"name": piece.function.name, "arguments": ""}
                    calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
                calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
    print()
    check(usage is not None, "the stream ended without usage")
    message: dict[str, Any] = {"role": "assistant", **parts}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {
        "message": message,
        "usage": usage,
        "first": first - started,
        "seconds": time.perf_counter() - started,
    }


def printer() -> Callable[[str, str], None]:
    """Return a function that prints thinking dimmed and the answer plain."""
    previous = ""

    def show(field: str, text: str) -> None:
        nonlocal previous
        if previous and field != previous:
            print("\n")
        previous = field
        print(styled(text, "2") if field == "reasoning_content" else text, end="", flush=True)

    return show


def report(answer: dict[str, Any]) -> None:
    """Print one line of numbers about an answer."""
    usage = answer["usage"]
    pace = usage.completion_tokens / answer["seconds"]
    thought = usage.completion_tokens_details.reasoning_tokens
    print(
        styled(
            f"[{usage.completion_tokens} tokens, {thought} of them thinking, first after "
            f"{answer['first'] * 1000:.0f} ms, "
            f"{pace:.0f} tokens/s; prompt {usage.prompt_tokens}, "
            f"{usage.prompt_tokens_details.cached_tokens} from the cache]",
            "36",
        )
    )


def chat(client: OpenAI) -> None:
    """Ask a question that needs thinking."""
    heading("A chat, streamed, thinking first")
    print(f"user: {QUESTION}")
    answer = stream(client, printer(), messages=[{"role": "user", "content": QUESTION}])
    report(answer)
    check(bool(answer["message"]["reasoning_content"]), "the model did not think")
    check(ANSWER in answer["message"]["content"], f"the answer should contain {ANSWER}")


def tool_call(client: OpenAI) -> None:
    """Ask a question that needs a tool: call, local execution, final answer."""
    heading("A tool call and its answer")
    messages: list[dict[str, Any]] = [{"role": "user", "content": TOOL_QUESTION}]
    print(f"user: {TOOL_QUESTION}")
    asked = stream(client, printer(), messages=messages, tools=[TOOL])
    report(asked)
    calls = asked["message"].get("tool_calls", [])
    check(len(calls) == 1, f"there should be one tool call, there are {len(calls)}")
    function = calls[0]["function"]
    print(styled(f"call: {function['name']}({function['arguments']})", "33"))
    check(function["name"] == "get_weather", "the tool should be get_weather")
    check(
        json.loads(function["arguments"]) == {"city": "Paris"}, "the arguments should be the city"
    )
    result = json.dumps(WEATHER)
    print(styled(f"result: {result}", "33"))
    messages += [
        asked["message"],
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": result},
    ]
    final = stream(client, printer(), messages=messages, tools=[TOOL])
    report(final)
    check(
        str(WEATHER["temperature"]) in final["message"]["content"],
        "the final answer should use the result",
    )


def main() -> None:
    """Run all parts."""
    heading("A server with the built-in model")
    process, url = start_server()
    try:
        with OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            chat(client)
            tool_call(client)
    finally:
        process.terminate()
        code = process.wait(30)
    check(code == 0, f"the server should end with exit code 0, it ended with {code}")
    heading("Done: the server has stopped")


if __name__ == "__main__":
    main()
