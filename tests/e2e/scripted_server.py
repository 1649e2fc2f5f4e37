"""Run a server with the real chat page and scripted answers: hostile text, errors, pauses."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.responses import StreamingResponse

from negamax.api.playground import make_playground_router

NAME = "scripted"
USAGE: dict[str, Any] = {"prompt_tokens": 1200, "completion_tokens": 40, "total_tokens": 1240}
USAGE["prompt_tokens_details"] = {"cached_tokens": 1152}
USAGE["completion_tokens_details"] = {"reasoning_tokens": 12}
DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.0}
INFO = {
    "sampling_defaults": {**DEFAULTS, "repetition_penalty": 1.0}, "num_running_reqs": 2,
    "num_queue_reqs": 1, "num_used_tokens": 1500, "max_total_num_tokens": 10_000,
    "num_generated_tokens": 100,
}  # fmt: skip


@dataclass
class Script:
    # deltas, error events, seconds to wait, and events to wait for
    steps: list[Any] = field(default_factory=list)
    # status, error and headers that replace a stream
    refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
    key: str | None = None
    finish_reason: str = "stop"
    bodies: list[dict[str, Any]] = field(default_factory=list)  # bodies of all requests so far
    hang_ups: int = 0  # number of streams whose client disconnected
    num_info_requests: int = 0


def call(name: str, *arguments: str, index: int = 0) -> list[dict[str, Any]]:
    first = {"index": index, "id": f"call_{index}", "type": "function"}
    first["function"] = {"name": name, "arguments": ""}
    pieces = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [piece]} for piece in (first, *pieces)]


def _app(scripts: list[Script]) -> FastAPI:
    app = FastAPI()
    app.include_router(make_playground_router())

    def refused(request: Request) -> Response | None:
        key = scripts[-1].key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return _error(401, {"message": "the API key is missing", "code": "missing_api_key"}, {})
        return None

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        body = {"object": "list", "data": [{"id": NAME, "max_model_len": 196_608}]}
        return refused(request) or _json(body)

    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        scripts[-1].num_info_requests += 1
        return refused(request) or _json(INFO)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        script = scripts[-1]
        script.bodies.append(await request.json())
        if script.refusal is not None:
            return _error(*script.refusal)
        headers = {"x-request-id": f"request-{len(script.bodies)}"}
        return refused(request) or StreamingResponse(
            _events(script), media_type="text/event-stream", headers=headers
        )

    return app


def _error(status: int, error: dict[str, Any], headers: dict[str, str]) -> Response:
    headers = {"x-request-id": "request-refused", **headers}
    return _json({"error": error}, status_code=status, headers=headers)


def _json(body: object, **options: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", **options)


async def _events(script: Script) -> AsyncIterator[bytes]:
    try:
        for step in script.steps:
            if isinstance(step, threading.Event):
                while not step.is_set():
                    await asyncio.sleep(0.01)
            elif isinstance(step, float | int):
                await asyncio.sleep(step)
            elif "error" in step:
                yield _event(step)
                return
            else:
                usage = USAGE | {"completion_tokens": 1}
                yield _event({"choices": [{"index": 0, "delta": step}], "usage": usage})
        last = {"index": 0, "delta": {}, "finish_reason": script.finish_reason}
        yield _event({"choices": [last], "usage": None})
        yield _event({"choices": [], "usage": USAGE})
        yield b"data: [DONE]\n\n"
    except asyncio.CancelledError:
        script.hang_ups += 1
        raise


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@contextlib.contextmanager
def scripted() -> Iterator[tuple[str, Script]]:
    with scripted_server() as (url, scripts):
        yield url, scripts[0]


@contextlib.contextmanager
def scripted_server() -> Iterator[tuple[str, list[Script]]]:
    """Run a server that follows the last script of a list, to which tests append theirs."""
    scripts = [Script()]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(_app(scripts), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", scripts
    finally:
        server.should_exit = True
        thread.join(120)
