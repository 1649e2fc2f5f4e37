"""Abort requests at random: resources must be freed, and other greedy texts must not change."""

import asyncio
import contextlib
import json
import random
import time
from typing import Any

from tools.load.http import INTERRUPTED, Connection, request_bytes
from tools.load.server import Server, serving

PROMPTS = (
    "Tell me about the sea.", "What is 12 times 7?", "Name three colours.",
    "Write a short poem about rain.",
)  # fmt: skip
STAYING_CLIENTS = 4


def _greedy(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "temperature": 0, "max_tokens": 40, "priority": -1}


async def _text(connection: Connection, prompt: str) -> str:
    answer = await connection.post("/v1/chat/completions", _greedy(prompt))
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.body[:200]!r}")
    message = answer.json()["choices"][0]["message"]
    return f"{message['reasoning_content']}|{message['content']}"


async def _stay(
    server: Server, texts: dict[str, str], stop: asyncio.Event, problems: list[str],
    counts: list[int],
) -> None:  # fmt: skip
    """Ask for greedy texts until `stop`, and compare the answers."""
    connection = server.connection()
    while not stop.is_set():
        for prompt, text in texts.items():
            try:
                if await _text(connection, prompt) != text:
                    problems.append(f"the text of {prompt!r} changed")
                counts[0] += 1
            except Exception as error:
                problems.append(f"an answer to a staying client: {type(error).__name__}: {error}")
                connection.hang_up()
    connection.hang_up()


def _doomed(rng: random.Random) -> bytes:
    words = " ".join(rng.choices(("stone", "river", "lamp", "cloud"), k=rng.choice((3, 30, 300))))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 20, 500)), "stream": rng.random() < 0.6}
    body["n"] = rng.choice((1, 1, 1, 4))
    path = "/v1/completions"
    if rng.random() < 0.7:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = [words, words[:7]]
    return request_bytes(path, json.dumps(body).encode())


async def _leave(server: Server, rng: random.Random) -> None:
    """Abort one request: in its head, in its body, in the queue, or during its answer."""
    connection = server.connection()
    request = _doomed(rng)
    if rng.random() < 0.1:
        request = request[: rng.randrange(len(request))]

    async def read() -> None:
        _, headers = await connection.start(request)
        await connection.body(headers)

    reading = asyncio.ensure_future(read())
    await asyncio.wait({reading}, timeout=rng.random() ** 3 * 0.4)
    connection.hang_up(reset=rng.random() < 0.5)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError, AttributeError, *INTERRUPTED):
        await reading


async def aborts(*, count: int, clients: int, seed: int, num_servers: int) -> dict[str, Any]:
    """Abort `count` requests from `clients` clients at a time."""
    options = ("--num-kv-blocks", "2048", "--max-num-seqs", "32", "--max-queued-requests", "4096")
    options += ("--scheduling-policy", "priority")
    with serving(*options, num_servers=num_servers) as server:
        first = server.connection()
        texts = {prompt: await _text(first, prompt) for prompt in PROMPTS}
        first.hang_up()
        processes = server.processes()
        problems, compared = list[str](), [0]
        stop = asyncio.Event()
        stays = (_stay(server, texts, stop, problems, compared) for _ in range(STAYING_CLIENTS))
        staying = [asyncio.ensure_future(stay) for stay in stays]
        left = iter(range(count))

        async def leaver(rng: random.Random) -> None:
            for _ in left:
                await _leave(server, rng)

        started = time.monotonic()
        await asyncio.gather(*(leaver(random.Random(seed + index)) for index in range(clients)))
        seconds = time.monotonic() - started
        stop.set()
        await asyncio.gather(*staying)
        problems += await server.final_problems(processes)
        aborted = (await server.metrics())["sglang:num_aborted_requests_total"]
        return {
            "hung up": count,
            "seconds": seconds,
            "sequences aborted": aborted,
            "greedy answers compared": compared[0],
            "problems": problems[:20],
        }
