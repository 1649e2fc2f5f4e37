"""Run mixed load for a long time, and check for errors, held resources and memory growth."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from negamax.text.encoding_cache import CACHE_BYTES
from tools.load.http import DONE, INTERRUPTED
from tools.load.server import Server, serving

# The cache is so small that it is full after a minute. The server's memory does not grow
# afterwards.
KV_BLOCKS = {"nano": 2048, "nano-m3": 256}  # 32,768 tokens
FULL_BATCH = 64  # default number of sequences that a CPU runs at once
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}
WORDS = (
    "river", "stone", "lamp", "window", "garden", "letter", "winter", "silver", "bridge", "paper",
    "story", "cloud",
)  # fmt: skip


@dataclass
class _Tally:
    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    # seconds, MiB of the server, MiB of the engine
    memory: list[tuple[float, float, float]] = field(default_factory=list)


class _Client:
    """Send one request after the other, and abort `abort_share` of them."""

    def __init__(self, server: Server, tally: _Tally, rng: random.Random, abort_share: float):
        self._connection = server.connection()
        self._tally = tally
        self._rng = rng
        self._abort_share = abort_share

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            kind = self._rng.choices(
                ("chat stream", "chat", "text stream", "text", "refused", "look"),
                weights=(40, 20, 12, 12, 6, 10),
            )[0]
            if kind not in ("refused", "look") and self._rng.random() < self._abort_share:
                await self._abort(kind)
                continue
            try:
                await asyncio.wait_for(self._one(kind), 120)
            except Exception as error:
                self._tally.errors.append(f"{kind}: {type(error).__name__}: {error}")
                self._connection.hang_up()
            self._tally.answers[kind] += 1
        self._connection.hang_up()

    async def _one(self, kind: str) -> None:
        if kind == "look":
            for path in ("/v1/models", "/health", "/readyz", "/livez"):
                _expect(await self._connection.get(path), 200)
        elif kind == "refused":
            body = self._chat() | {"temperature": 9}
            _expect(await self._connection.post("/v1/chat/completions", body), 400)
        else:
            path, body = self._request(kind)
            if "stream" in kind:
                await self._stream(path, body)
            else:
                answer = await self._connection.post(path, body)
                _expect(answer, 200)
                self._check(answer.json()["choices"], answer.json()["usage"], body)

    def _request(self, kind: str) -> tuple[str, dict[str, Any]]:
        path, body = "/v1/completions", self._text()
        if kind.startswith("chat"):
            path, body = "/v1/chat/completions", self._chat()
        if "stream" in kind:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return path, body

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        said = [("system", "You are a helpful assistant. " * rng.choice((1, 20)))]
        for _ in range(rng.randint(0, 2)):
            said += [("user", self._words(20)), ("assistant", self._words(20))]
        said.append(("user", self._words(rng.randint(1, 60))))
        messages = [{"role": role, "content": content} for role, content in said]
        body: dict[str, Any] = {"messages": messages, "max_tokens": rng.randint(1, 48)}
        body["n"] = rng.choice((1, 1, 1, 2))
        if rng.random() < 0.3:
            body["tools"] = [TOOL]
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3}
        if rng.random() < 0.2:
            body |= {"stop": ["e", "\n\n"]}
        return body

    def _text(self) -> dict[str, Any]:
        rng = self._rng
        prompts = [self._words(rng.randint(1, 100)) for _ in range(rng.choice((1, 1, 3)))]
        max_tokens, temperature = rng.randint(1, 48), rng.choice((0, 1))
        return {"prompt": prompts, "max_tokens": max_tokens, "temperature": temperature}

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    async def _stream(self, path: str, body: dict[str, Any]) -> None:
        payloads = [payload async for payload in self._connection.stream(path, body)]
        if not payloads or payloads[-1] != DONE:
            raise ValueError("the stream did not end with [DONE]")
        chunks = [json.loads(payload) for payload in payloads[:-1]]
        if any("error" in chunk for chunk in chunks):
            raise ValueError(f"an error in the stream: {chunks[-1]}")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ended = [choice for choice in choices if choice["finish_reason"] is not None]
        self._check(ended, chunks[-1]["usage"], body)

    def _check(
        self, choices: list[dict[str, Any]], usage: dict[str, int], body: dict[str, Any]
    ) -> None:
        prompts = body.get("prompt", [""])
        expected = body.get("n", 1) * len(prompts)
        if sorted(choice["index"] for choice in choices) != list(range(expected)):
            raise ValueError(f"{len(choices)} choices ended; the request has n = {expected}")
        reasons = {choice["finish_reason"] for choice in choices}
        if reasons - {"stop", "length", "tool_calls"}:
            raise ValueError(f"finish reasons {reasons}")
        count, limit = usage["completion_tokens"], expected * body["max_tokens"]
        if not 0 < count <= limit:
            raise ValueError(f"{count} tokens; allowed: {limit}")
        self._tally.tokens += count

    async def _abort(self, kind: str) -> None:
        """Begin a request and abort it after a moment, at the latest when it ends."""
        connection = self._connection
        work = asyncio.ensure_future(self._one(kind))
        await asyncio.wait({work}, timeout=self._rng.random() ** 2)
        connection.hang_up(reset=self._rng.random() < 0.5)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, *INTERRUPTED):
            await work
        self._tally.answers["hung up"] += 1


def _expect(answer: Any, status: int) -> None:
    if answer.status != status:
        raise ValueError(f"status {answer.status} instead of {status}: {answer.body[:200]!r}")


async def _visit_batch_sizes(server: Server) -> None:
    """Run each batch size once, since a kernel that is compiled later would look like a leak."""

    async def ask(max_tokens: int) -> None:
        connection = server.connection()
        body = {"prompt": "river", "max_tokens": max_tokens, "ignore_eos": True}
        _expect(await connection.post("/v1/completions", body), 200)
        connection.hang_up()

    await asyncio.gather(*(ask(8 + index) for index in range(FULL_BATCH)))


async def _fill_encodings(server: Server, rng: random.Random) -> None:
    """Fill the server's cache of tokenized texts, which would take an hour under load."""
    connection = server.connection()
    for _ in range(CACHE_BYTES // (1 << 17)):
        # Each text needs about 1 KiB in the cache.
        texts = [" ".join(rng.choices(WORDS, k=60)) for _ in range(300)]
        _expect(await connection.post("/tokenize", {"prompt": texts}), 200)
    connection.hang_up()


async def _watch_memory(server: Server, tally: _Tally) -> None:
    started, engine, servers = time.monotonic(), server.engine_pid(), server.server_pids()
    while True:
        tally.memory.append((time.monotonic() - started, server.rss(*servers), server.rss(engine)))
        await asyncio.sleep(1.0)


def slope(points: list[tuple[float, float]]) -> float:
    """Return MiB per minute, by a least-squares line through (seconds, MiB)."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(
    *, clients: int, seconds: float, abort_share: float, seed: int, num_servers: int,
    max_slope: float | None, model: str = "nano", host_gib: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the scenario. `max_slope`, if given, limits late memory growth in MiB per minute."""
    options = ("--num-kv-blocks", str(KV_BLOCKS[model]), "--max-queued-requests", str(4 * clients))
    if host_gib is not None:
        options += ("--kv-offloading-size", str(host_gib))
    with serving(*options, num_servers=num_servers, model=model) as server:
        processes = server.processes()
        tally = _Tally()
        if max_slope is not None:
            await _visit_batch_sizes(server)
            await _fill_encodings(server, random.Random(seed))
        watcher = asyncio.ensure_future(_watch_memory(server, tally))
        end = time.monotonic() + seconds
        rngs = (random.Random(seed + index) for index in range(clients))
        workers = (_Client(server, tally, rng, abort_share).run(end) for rng in rngs)
        await asyncio.gather(*workers)
        num_offloaded = (await server.metrics()).get("vllm:kv_offload_total_bytes_total", 0.0)
        problems = tally.errors[:10] + await server.final_problems(processes)
        watcher.cancel()
        late = tally.memory[len(tally.memory) // 2 :]
        sampled = tally.memory[:: max(1, len(tally.memory) // 20)]
        slopes = {
            "server": slope([(at, rss) for at, rss, _ in late]),
            "engine": slope([(at, rss) for at, _, rss in late]),
        }
        if max_slope is not None:
            allowed = {"server": max_slope * num_servers, "engine": max_slope}
            leaks = {name: rise for name, rise in slopes.items() if rise > allowed[name]}
            problems += [f"the {name} grows by {rise:.2f} MiB/min" for name, rise in leaks.items()]
        return {
            "clients": clients,
            "seconds": seconds,
            "answers": dict(tally.answers),
            "errors": len(tally.errors),
            "bytes to and from main memory": num_offloaded,
            "generated tokens": tally.tokens,
            "server MiB, first and last": [tally.memory[0][1], late[-1][1]],
            "engine MiB, first and last": [tally.memory[0][2], late[-1][2]],
            "MiB per minute, second half": slopes,
            "server MiB over time": [round(rss) for _, rss, _ in sampled],
            "engine MiB over time": [round(rss) for _, _, rss in sampled],
            "problems": problems,
        }
