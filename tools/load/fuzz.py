"""Send damaged request bodies: each answer must be 200 or 4xx, and the server must survive."""

import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.load.http import Answer, Connection, request_bytes
from tools.load.server import Server, serving

# Valid bodies by route. A route that the server lacks is skipped.
_BODIES = Path(__file__).with_name("bodies.json")
SEEDS: dict[str, list[dict[str, Any]]] = json.loads(_BODIES.read_text(encoding="utf-8"))
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
    "", "type", "role", "content", "name", "x" * 300, "\x00", "max_tokens", "messages", "stream",
    "n", "timeout", "😀",
)  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 8)):
            yield from _paths(value[index], (*path, index))


def _change(body: Any, rng: random.Random) -> Any:
    """Make one structural change in `body`, in place or by returning a new body."""
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
        value = copy.deepcopy(rng.choice(ODD_VALUES)) if rng.random() < 0.5 else parent.pop(key)
        parent[rng.choice(ODD_KEYS)] = value
    elif isinstance(parent, list):
        value = copy.deepcopy(rng.choice((parent[key], *ODD_VALUES)))
        parent.insert(rng.randint(0, len(parent)), value)
    return body


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice((60, 70, 500, 20_000))
    opener, closer = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return b'{"messages":' + opener * depth + b"1" + closer * depth + b"}"


def _damage(content: bytes, rng: random.Random) -> bytes:
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
    """Make a request from a valid body by up to four changes, sometimes with damaged bytes."""
    path = rng.choice(list(seeds))
    body: Any = copy.deepcopy(rng.choice(seeds[path]))
    if isinstance(body, dict) and rng.random() < 0.2:
        body["stream"] = True
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 4))):
        body = _change(body, rng)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7)
    content = text.encode("utf-8", errors="surrogatepass")
    if rng.random() < 0.15:
        content = _damage(content, rng)
    if rng.random() < 0.97:
        return path, request_bytes(path, content)
    content_type = rng.choice(("", "text/plain", "application/json; charset=x"))
    return path, request_bytes(path, content, content_type=content_type)


def problem_of(answer: Answer) -> str | None:
    """Return the problem of an answer, or None."""
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
    server: Server, seeds: dict[str, list[dict[str, Any]]], numbers: Iterator[int], seed: int, *,
    statuses: Counter[int], problems: list[str],
) -> None:  # fmt: skip
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
            shown = f"{answer.body[:200]!r} for {content[-300:]!r}"
            problems.append(f"body {number} to {path}: {wrong}: {shown}")
        if answer.status == 413:
            connection.hang_up()
    connection.hang_up()


async def fuzz(*, count: int, clients: int, seed: int, num_servers: int) -> dict[str, Any]:
    """Send `count` bodies. Equal seeds make equal bodies."""
    options = ("--max-model-len", "256", "--request-timeout", "5", "--max-queued-requests", "4096")
    with serving(*options, num_servers=num_servers) as server:
        processes = server.processes()
        first = server.connection()
        known = (await first.get("/openapi.json")).json()["paths"]
        first.hang_up()
        seeds = {path: bodies for path, bodies in SEEDS.items() if path in known}
        statuses: Counter[int] = Counter()
        problems: list[str] = []
        numbers = iter(range(count))
        started = time.monotonic()
        found = {"statuses": statuses, "problems": problems}
        work = (_worker(server, seeds, numbers, seed, **found) for _ in range(clients))
        await asyncio.gather(*work)
        seconds = time.monotonic() - started
        problems += await server.final_problems(processes)
        return {
            "bodies": count,
            "routes": sorted(seeds),
            "seconds": seconds,
            "statuses": {str(status): number for status, number in sorted(statuses.items())},
            "problems": problems[:20],
        }
