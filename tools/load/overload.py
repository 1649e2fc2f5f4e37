"""Overload a server: it must refuse excess requests with 429 or 503, and stay fast for others."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

from tools.load.server import Server, percentile, serving

BATCH = 16
QUEUE = BATCH // 4  # The time in the queue is this share of the time of an answer.
ANSWER_TOKENS = 48
WARM_UP_SECONDS = 1.0


def _body(rng: random.Random) -> dict[str, Any]:
    words = " ".join(rng.choices(("north", "south", "east", "west"), k=20))
    messages = [{"role": "user", "content": words}]
    return {"messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


async def _full_batch(
    server: Server, *, seconds: float, rng: random.Random
) -> tuple[list[float], float]:
    """Keep one full batch busy. Return the latencies and the answers per second."""
    latencies: list[float] = []
    started = time.monotonic()
    end = started + WARM_UP_SECONDS + seconds

    async def client() -> None:
        connection = server.connection()
        while (sent := time.monotonic()) < end:
            answer = await connection.post("/v1/chat/completions", _body(rng))
            if answer.status != 200:
                raise SystemExit(f"status {answer.status} without overload: {answer.body[:200]!r}")
            if sent > started + WARM_UP_SECONDS:
                latencies.append(time.monotonic() - sent)
        connection.hang_up()

    await asyncio.gather(*(client() for _ in range(BATCH)))
    return latencies, len(latencies) / (time.monotonic() - started - WARM_UP_SECONDS)


async def _flood(
    server: Server, *, rate: float, seconds: float, rng: random.Random
) -> tuple[list[float], Counter[int], list[str]]:
    """Send `rate` requests per second. Return latencies, statuses and problems."""
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    idle: list[Any] = []

    async def request() -> None:
        connection = idle.pop() if idle else server.connection()
        sent = time.monotonic()
        try:
            answer = await connection.post("/v1/chat/completions", _body(rng))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            problems.append(f"{type(error).__name__}: {error}")
            connection.hang_up()
            return
        statuses[answer.status] += 1
        if answer.status == 200:
            latencies.append(time.monotonic() - sent)
        elif answer.status in (429, 503) and not int(answer.headers.get("retry-after", "0")) >= 1:
            problems.append(f"a {answer.status} without a useful Retry-After")
        idle.append(connection)

    started = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    for number in range(int(rate * seconds)):
        due = started + number / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(request())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.hang_up()
    return latencies, statuses, problems


async def overload(
    *, factor: float, seconds: float, seed: int, num_servers: int, max_ratio: float | None
) -> dict[str, Any]:
    """Run the scenario. `max_ratio` limits the p99 relative to a full batch without overload."""
    rng = random.Random(seed)
    options = ("--max-num-seqs", str(BATCH), "--max-queued-requests", str(QUEUE))
    with serving(*options, num_servers=num_servers) as server:
        calm, rate = await _full_batch(server, seconds=seconds, rng=rng)
        flood = _flood(server, rate=factor * rate, seconds=seconds, rng=rng)
        accepted, statuses, problems = await flood
        problems = problems[:10] + await server.final_problems()
        if set(statuses) - {200, 429, 503}:
            problems.append(f"statuses {dict(statuses)}")
        if not statuses[429]:
            problems.append("nothing was refused: that was no overload")
        ratio = percentile(accepted, 0.99) / percentile(calm, 0.99)
        if max_ratio is not None and not ratio <= max_ratio:
            problems.append(f"the p99 is {ratio:.2f} times the usual; allowed: {max_ratio}")
        times, loaded = (
            {f"p{share} s": percentile(seconds, share / 100) for share in (50, 99)}
            for seconds in (calm, accepted)
        )
        sent = {"requests/s": factor * rate, "statuses": dict(statuses)}
        return {
            "full batch": {"answers/s": rate} | times,
            "overload": sent | loaded | {"p99 ratio": ratio},
            "problems": problems,
        }
