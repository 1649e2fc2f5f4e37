"""`negamax check` sends one small request to each endpoint of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from negamax.bench.serve_client import ServingClient, WholeResponse
from negamax.bench.server_probe import (
    ABSENT,
    CHAT,
    CheckFailure,
    exchange,
    find_model,
    read_chat,
    read_object,
    read_stream,
)

_HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
_LIMIT = {"max_tokens": 4, "temperature": 0}
_SHORT = {"max_new_tokens": 4, "temperature": 0}
_RESPONSE = {"input": "Hello", "max_output_tokens": 16}
# endpoint -> path, body of a POST request, and field of the answer that must not be empty
ENDPOINTS: dict[str, tuple[str, dict[str, Any] | None, str | None]] = {
    "models": ("/v1/models", None, "data"),
    "health": ("/health", None, None),
    "metrics": ("/metrics", None, None),
    "chat": (CHAT, _HELLO | _LIMIT, "choices"),
    "chat-stream": (CHAT, _HELLO | _LIMIT | {"stream": True}, None),
    "completions": ("/v1/completions", {"prompt": "Hello", **_LIMIT}, "choices"),
    "responses": ("/v1/responses", _RESPONSE, "output"),
    "messages": ("/v1/messages", _HELLO | _LIMIT, "content"),
    "count-tokens": ("/v1/messages/count_tokens", _HELLO, "input_tokens"),
    "tokenize": ("/tokenize", {"prompt": "Hello"}, "tokens"),
    "detokenize": ("/detokenize", {"tokens": [65]}, None),
    "render": ("/v1/chat/completions/render", _HELLO, "token_ids"),
    "input-tokens": ("/v1/responses/input_tokens", {"input": "Hello"}, "input_tokens"),
    "generate": ("/generate", {"text": "Hello", "sampling_params": _SHORT}, "meta_info"),
    "server-info": ("/server_info", None, None),
    "version": ("/version", None, "version"),
}


@dataclass(frozen=True)
class EndpointState:
    """The result of the check of an endpoint. `state` is ok, absent or failed."""

    name: str
    state: str
    milliseconds: float
    detail: str = ""  # error text if the state is failed


async def check_endpoints(
    client: ServingClient, *, model: str | None, timeout: float, required: Collection[str] = ()
) -> list[EndpointState]:
    """Check all endpoints within `timeout` seconds. An absent endpoint in `required` fails."""
    deadline = time.monotonic() + timeout
    if model is None:
        try:
            model = await find_model(client)
        except CheckFailure:
            model = "default"  # the check of the endpoint /v1/models will report the failure
    asked = (_ask(client, name, model, deadline, required) for name in ENDPOINTS)
    states = await asyncio.gather(*asked)
    client.close()
    return states


def is_working(states: Collection[EndpointState]) -> bool:
    """Return whether some endpoints answered and none failed."""
    found = [each.state for each in states]
    return "ok" in found and "failed" not in found


async def _ask(
    client: ServingClient, name: str, model: str, deadline: float, required: Collection[str]
) -> EndpointState:
    path, body, _ = ENDPOINTS[name]
    started = time.monotonic()
    state, detail = "ok", ""
    try:
        async with asyncio.timeout(max(deadline - started, 0)):
            method, body = ("GET", None) if body is None else ("POST", {"model": model, **body})
            _judge(name, await exchange(client, method, path, body))
    except TimeoutError:
        state, detail = "failed", "no answer in time"
    except CheckFailure as failure:
        # A 404 that contains the model name reports an unknown model, not a missing endpoint.
        is_absent = failure.status in ABSENT and model not in str(failure)
        state = "absent" if is_absent and name not in required else "failed"
        detail = "" if state == "absent" else str(failure)
    return EndpointState(name, state, round(1e3 * (time.monotonic() - started), 1), detail)


def _judge(name: str, answer: WholeResponse) -> None:
    """Raise `CheckFailure` if an answer of status 200 is not usable."""
    field = ENDPOINTS[name][2]
    if name == "metrics" and b"# TYPE" not in answer.raw:
        raise CheckFailure("the answer has no metrics in Prometheus' format")
    if name == "chat-stream":
        read_stream(answer)
    if field is not None and not read_object(answer).get(field):
        raise CheckFailure(f"the answer has no {field!r}")
    if name == "chat":
        read_chat(read_object(answer))
