"""Add request ids, write the access log, and convert errors to responses."""

import math
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from negamax.api.http.lifecycle import Lifecycle
from negamax.api.http.sse import ClientGoneError
from negamax.api.playground import CHALLENGE, PAGE_PATHS
from negamax.api.request_log import log_access, log_refusal
from negamax.api.schemas.answers import ErrorAnswer, build_error, build_message_error, encode
from negamax.api.schemas.request_model import suggest_nearest
from negamax.base.errors import NegamaxError
from negamax.base.log import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 1000  # Maximum characters of an error message that quotes a request.
MESSAGES_PATH = "/v1/messages"  # Clients expect Anthropic's error format on this path.
_ALIAS = "/anthropic"  # Path prefix of Anthropic's routes, as in MiniMax's own API.
_ALIASED = (f"{_ALIAS}{MESSAGES_PATH}", f"{_ALIAS}/v1/models")
CLIENT_CLOSED_REQUEST = 499  # Only logs contain this status, as in nginx.

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_INTERNAL = "the server failed on this request; search the server's log for the request id"


def build_json_response(
    answer: msgspec.Struct | Sequence[msgspec.Struct],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    return Response(
        encode(answer), status_code=status, headers=headers, media_type="application/json"
    )


def describe_error(error: Exception) -> tuple[int, ErrorAnswer]:
    """Return HTTP status and body for `error`. The body of an internal error has no details."""
    if isinstance(error, NegamaxError) and error.http_status != 500:
        message = str(error)[:MAX_MESSAGE_CHARS]
        return error.http_status, build_error(
            message, error_type=error.error_type, param=error.param, code=error.code
        )
    return 500, build_error(_INTERNAL, error_type="internal_error", code="internal_error")


def build_error_response(
    scope: Scope, status: int, answer: ErrorAnswer, *, headers: dict[str, str] | None = None
) -> Response:
    if not scope["path"].startswith(MESSAGES_PATH):
        return build_json_response(answer, status=status, headers=headers)
    request_id = scope["state"]["request_id"]
    body = build_message_error(status, answer, request_id=request_id)
    return build_json_response(
        body, status=status, headers={**(headers or {}), "request-id": request_id}
    )


def log_failure(error: Exception, *, request_id: str) -> tuple[int, ErrorAnswer]:
    """Log an error that occurred after the start of a stream. Return `describe_error`'s result."""
    status, answer = describe_error(error)
    if status == 500:
        logger.error("request %s failed in its stream: %s", request_id, error, exc_info=error)
    else:
        logger.warning("request %s failed in its stream: %s", request_id, error)
    return status, answer


class ErrorMiddleware:
    """Adds an `x-request-id` to every response, and answers uncaught errors with status 500."""

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle, logs_access: bool) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(_ALIASED):
            scope["path"] = scope["path"].removeprefix(_ALIAS)
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        arrival = time.monotonic()
        status = 0  # The status is 0 until the response starts.

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self._lifecycle.is_draining:
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s: %s %r failed", request_id, scope["method"], scope["path"])
            if status:
                raise  # Part of the response was sent; close the connection.
            code, answer = describe_error(error)
            await build_error_response(scope, code, answer)(scope, receive, send_with_id)
        finally:
            if self._logs_access and scope["client"] is not None:  # Skip internal requests.
                log_access(
                    client="{}:{}".format(*scope["client"]),
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=time.monotonic() - arrival,
                    request_id=request_id,
                )


def handle_error(request: Request, error: Exception) -> Response:
    status, answer = describe_error(error)
    if status == 500:
        logger.error("request %s failed: %s", request.state.request_id, error, exc_info=error)
    else:
        is_asked_for = request.app.state.logs_requests
        log_refusal(request, status, answer.error.message, is_asked_for=is_asked_for)
    challenge = CHALLENGE if request.url.path in PAGE_PATHS else "Bearer"
    headers = {"www-authenticate": challenge} if status == 401 else {}
    if isinstance(error, NegamaxError) and error.retry_after is not None:
        if request.method == "POST":  # Failed readiness probes (GET) are not counted.
            request.app.state.metrics.measured.rejections.add(error.code or "")
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return build_error_response(request.scope, status, answer, headers=headers)


# Path segments of APIs for models that generate no text.
_OTHER_MODELS = frozenset({
    "audio", "classify", "embed", "embeddings", "images", "moderations", "pooling", "rerank",
    "score",
})  # fmt: skip


def handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        is_of_others = not _OTHER_MODELS.isdisjoint(request.url.path.split("/"))
        hint = suggest_nearest(request.url.path, request.app.state.paths)
        hint = " The models served here generate text only." if is_of_others else hint
        answer = build_error(
            f"there is no route {where}.{hint}", error_type="not_found_error", code="unknown_route"
        )
    elif error.status_code == 405:
        message = f"{where} is not allowed; use the method {headers.get('Allow', 'of the route')}"
        answer = build_error(message, error_type="invalid_request_error", code="method_not_allowed")
    else:
        answer = build_error(str(error.detail), error_type="invalid_request_error")
    return build_error_response(request.scope, error.status_code, answer, headers=headers)


def handle_client_gone(request: Request, error: Exception) -> Response:
    logger.debug("request %s: the client disconnected", request.state.request_id)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: dict[Any, Any] = {
    NegamaxError: handle_error,
    HTTPException: handle_http_error,
    ClientGoneError: handle_client_gone,
    ClientDisconnect: handle_client_gone,
}
