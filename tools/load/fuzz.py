"""Bodies that are almost right, and some that are nothing: each is answered with 200 or 4xx, and
the server lives on.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tools.load.http import Answer, Connection, request_bytes
from tools.load.server import Server, serving

CHAT: dict[str, Any] = {
    "model": "nano",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather in Rome?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I should ask the tool.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Looks up the weather.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    },
                    "required": ["city"],
                },
            },
        }
    ],
    "tool_choice": "auto",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "n": 1,
    "max_tokens": 2,
    "stop": ["###", "END"],
    "stop_token_ids": [5],
    "logit_bias": {"17": 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {},
    "priority": 0,
    "user": "somebody",
}
TEXT: dict[str, Any] = {
    "model": "nano",
    "prompt": ["Once upon a time", "The sea"],
    "max_tokens": 2,
    "temperature": 0,
    "logprobs": 1,
    "echo": False,
    "n": 1,
    "stop": "END",
    "seed": 1,
    "stream": False,
}
# Valid bodies by route; routes that the server does not have are left out.
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    ],
    "/v1/completions": [TEXT, {"prompt": [1, 2, 3], "max_tokens": 1}],
    "/v1/responses": [
        {"model": "nano", "input": "Hello", "max_output_tokens": 2, "tools": [], "store": False}
    ],
    "/v1/messages": [
        {
            "model": "nano",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Hi"}],
            "system": "Be brief.",
        }
    ],
    "/v1/messages/count_tokens": [
        {"model": "nano", "messages": [{"role": "user", "content": "Hello"}]}
    ],
    "/tokenize": [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/generate": [{"text": "Hello", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}],
}
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 2**31, 2**63, -(2**63), 10**40, 0.0, -0.0, 0.5, 1e308,
    -1e308, float("nan"),
    float("inf"), "", " ", "a", "auto", "none", "required", "null", "1", "\x00", "\ud800", "😀",
    "</think>", "]~b]user",
    "<minimax:tool_call>", "é" * 300, "x" * 5000, [], [[]], [None], {}, {"type": "object"},
    {"$ref": "#/$defs/x"},
    [1, "a", None], {"a": {"b": {"c": []}}}, ["s"] * 500, [0] * 3000,
    {str(number): 1 for number in range(1500)},
)  # fmt: skip
ODD_KEYS = (
    "",
    "type",
    "role",
    "content",
    "name",
    "x" * 300,
    "\x00",
    "max_tokens",
    "messages",
    "stream",
    "n",
    "timeout",
    "😀",
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 8)):
            yield from _paths(value[index], (*path, index))


def _change(body: Any, rng: random.Random) -> Any:
    """One structural change somewhere in `body`, which is changed or replaced."""
    path = rng.choice(list(_paths(body)))
    if not path:
        return body if rng.random() < 0.9 else copy.deepcopy(rng.choice(ODD_VALUES))
    parent = body
    for step in path[:-1]:
        parent = parent[step]
    key = path[-1]
    action = rng.randrange(7)
    if action <= 2:
        parent[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif action == 3:
        del parent[key]
    elif action == 4:
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"value": parent[key]}
    elif action == 5 and isinstance(parent, dict):
        parent[rng.choice(ODD_KEYS)] = (
            copy.deepcopy(rng.choice(ODD_VALUES)) if rng.random() < 0.5 else parent.pop(key)
        )
    elif isinstance(parent, list):
        parent.insert(
            rng.randint(0, len(parent)), copy.deepcopy(rng.choice((parent[key], *ODD_VALUES)))
        )
    return body


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice((60, 70, 500, 20_000))
    opener, closer = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return b'{"messages":' + opener * depth + b"1" + closer * depth + b"}"


def _damage(content: bytes, rng: random.Random) -> bytes:
    """One change to the bytes."""
    position = rng.randrange(len(content) + 1)
    match rng.randrange(5):
        case 0:
            return content[:position]
        case 1:
            return content[:position] + rng.randbytes(rng.randint(1, 4)) + content[position:]
        case 2:
            return content[:position] + content[position + 1 :]
        case 3:
            return content + content
        case _:
            return _nested(rng)


def request(rng: random.Random, seeds: dict[str, list[dict[str, Any]]]) -> tuple[str, bytes]:
    """The route and the bytes of one request: one to four changes to a valid body, sometimes
    damaged bytes on top.
    """
    path = rng.choice(list(seeds))
    body: Any = copy.deepcopy(rng.choice(seeds[path]))
    if isinstance(body, dict) and rng.random() < 0.2:
        body["stream"] = True
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 4))):
        body = _change(body, rng)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode(
        "utf-8", errors="surrogatepass"
    )
    if rng.random() < 0.15:
        content = _damage(content, rng)
    content_type = (
        "application/json"
        if rng.random() < 0.97
        else rng.choice(("", "text/plain", "application/json; charset=x"))
    )
    return path, request_bytes(path, content, content_type=content_type)


def problem_of(answer: Answer) -> str | None:
    """What is wrong with an answer to anything."""
    if answer.status == 200:
        return "an internal error in a stream" if b'"internal_error"' in answer.body else None
    if not 400 <= answer.status < 500:
        return f"status {answer.status}"
    if "x-request-id" not in answer.headers:
        return "no x-request-id"
    try:
        return None if "error" in answer.json() else "no error object"
    except ValueError:
        return "the error is not JSON"


async def _worker(
    server: Server,
    seeds: dict[str, list[dict[str, Any]]],
    numbers: Iterator[int],
    seed: int,
    *,
    statuses: Counter[int],
    problems: list[str],
) -> None:
    connection: Connection = server.connection()
    for number in numbers:
        path, content = request(random.Random(seed * 1_000_003 + number), seeds)
        try:
            answer = await asyncio.wait_for(connection.send_raw(content), 60)
        except Exception as error:
            problems.append(f"body {number} to {path}: {type(error).__name__}: {error}")
            connection.hang_up()
            continue
        statuses[answer.status] += 1
        wrong = problem_of(answer)
        if wrong is not None:
            problems.append(
                f"body {number} to {path}: {wrong}: {answer.body[:200]!r} for {content[-300:]!r}"
            )
        if answer.status == 413:
            connection.hang_up()
    connection.hang_up()


async def fuzz(*, count: int, clients: int, seed: int, num_servers: int) -> dict[str, Any]:
    """The report on `count` bodies; the same seed makes the same bodies."""
    options = ("--max-model-len", "256", "--request-timeout", "5", "--max-queued-requests", "4096")
    with serving(*options, num_servers=num_servers) as server:
        processes = [server.engine_pid(), *server.server_pids()]
        first = server.connection()
        known = (await first.get("/openapi.json")).json()["paths"]
        first.hang_up()
        seeds = {path: bodies for path, bodies in SEEDS.items() if path in known}
        statuses: Counter[int] = Counter()
        problems: list[str] = []
        numbers = iter(range(count))
        started = time.monotonic()
        workers = (
            _worker(server, seeds, numbers, seed, statuses=statuses, problems=problems)
            for _ in range(clients)
        )
        await asyncio.gather(*workers)
        seconds = time.monotonic() - started
        held = await server.leftovers()
        if held:
            problems.append(f"held at the end: {held}")
        if (
            server.process.poll() is not None
            or [server.engine_pid(), *server.server_pids()] != processes
        ):
            problems.append("a process ended")
        problems += server.log_problems()[:10]
        return {
            "bodies": count,
            "routes": sorted(seeds),
            "seconds": seconds,
            "statuses": {str(status): number for status, number in sorted(statuses.items())},
            "problems": problems[:20],
        }
