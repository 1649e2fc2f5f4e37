"""Run a small server that answers incorrectly, in its own thread."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Fault = Callable[[asyncio.StreamWriter, int], Awaitable[None]]  # called with the request's number

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class FaultyServer:
    port: int = 0
    connections: int = 0
    refusals: int = 0  # number of next GET requests that get status 503
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


@contextlib.contextmanager
def faulty_server(fault: Fault) -> Iterator[FaultyServer]:
    """Run a server that answers POST requests by `fault` and lists one model, 'faulty'."""
    state = FaultyServer()
    ready, loop, stopped = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                match = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(match[1]) if match else 0)
                if head.startswith("GET") and state.refusals:
                    state.refusals -= 1
                    writer.write(whole(503, {}))
                    continue
                if head.startswith("GET"):
                    writer.write(whole(200, {"data": [{"id": "faulty", "max_model_len": 4096}]}))
                    continue
                state.headers.append(head)
                state.bodies.append(json.loads(body))
                await fault(writer, len(state.bodies) - 1)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        state.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stopped.wait()
        server.close()
        # These tasks answer clients that are still connected.
        answering = asyncio.all_tasks() - {asyncio.current_task()}
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(120)


def whole(status: int, answer: object, *, headers: str = "") -> bytes:
    body = json.dumps(answer).encode()
    return f"HTTP/1.1 {status} Word\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(payload: object) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    data = f"data: {text}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def text_chunk(text: str, finish_reason: str | None = None) -> bytes:
    return chunk({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def good_stream(tokens: int = 3, *, usage: bool = True) -> bytes:
    counts = {"prompt_tokens": 8, "completion_tokens": 2 * tokens}
    last = chunk({"choices": [], "usage": counts}) if usage else b""
    parts = (text_chunk("x") * tokens, text_chunk("", "length"), last, chunk("[DONE]"))
    return STREAM + b"".join(parts) + b"0\r\n\r\n"
