"""The outermost layer of the server: request ids, and one shape for all errors."""

from __future__ import annotations

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
from negamax.api.http.sse import ClientGoneError, event
from negamax.api.playground import CHALLENGE, PAGE_PATHS
from negamax.api.request_log import log_access, log_refusal
from negamax.api.schemas.answers import ErrorAnswer, encode, error_answer, message_error
from negamax.api.schemas.request_model import nearest
from negamax.base.errors import NegamaxError
from negamax.base.log import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 1000  # of an error: whatever it quotes from the request
MESSAGES_PATH = "/v1/messages"  # where clients expect Anthropic's shapes
CLIENT_CLOSED_REQUEST = 499  # in logs only; the number that proxies use for it

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_INTERNAL = "the server failed on this request; its log has the details under the request id"


def json_response(
    answer: msgspec.Struct | Sequence[msgspec.Struct],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    """`answer` as a JSON response."""
    return Response(
        encode(answer), status_code=status, headers=headers, media_type="application/json"
    )


def error_of(error: Exception) -> tuple[int, ErrorAnswer]:
    """Status and body for `error`. What is not ours, or our own fault, has no details."""
    if isinstance(error, NegamaxError) and error.http_status != 500:
        message = str(error)[:MAX_MESSAGE_CHARS]
        return error.http_status, error_answer(
            message, error_type=error.error_type, param=error.param, code=error.code
        )
    return 500, error_answer(_INTERNAL, error_type="internal_error", code="internal_error")


def error_response(
    scope: Scope, status: int, answer: ErrorAnswer, *, headers: dict[str, str] | None = None
) -> Response:
    """An error in the shape that the route's clients know."""
    if not scope["path"].startswith(MESSAGES_PATH):
        return json_response(answer, status=status, headers=headers)
    request_id = scope["state"]["request_id"]
    body = message_error(status, answer, request_id=request_id)
    return json_response(body, status=status, headers={**(headers or {}), "request-id": request_id})


def failure_event(error: Exception, *, request_id: str) -> bytes:
    """An error after the start of a stream: logged, and sent as an event, because the status line
    is already sent.
    """
    return event(logged_failure(error, request_id=request_id)[1])


def logged_failure(error: Exception, *, request_id: str) -> tuple[int, ErrorAnswer]:
    """As `error_of`, of an error after the start of a stream: nothing else would log it."""
    status, answer = error_of(error)
    if status == 500:
        logger.error("request %s failed in its stream: %s", request_id, error, exc_info=error)
    else:
        logger.warning("request %s failed in its stream: %s", request_id, error)
    return status, answer


class ErrorMiddleware:
    """The outermost layer: gives every response an `x-request-id`, and makes a 500 of what no
    handler caught.
    """

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle, logs_access: bool) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        arrival = time.monotonic()
        status = 0  # nothing was sent yet

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
                raise  # the connection is closed: a part of the response is already sent
            code, answer = error_of(error)
            await error_response(scope, code, answer)(scope, receive, send_with_id)
        finally:
            if self._logs_access and scope["client"] is not None:  # None: another server process
                log_access(
                    client="{}:{}".format(*scope["client"]),
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=time.monotonic() - arrival,
                    request_id=request_id,
                )


def negamax_error(request: Request, error: Exception) -> Response:
    """Handler for our own errors."""
    status, answer = error_of(error)
    if status == 500:
        logger.error("request %s failed: %s", request.state.request_id, error, exc_info=error)
    else:
        is_asked_for = request.app.state.logs_requests
        log_refusal(request, status, answer.error.message, is_asked_for=is_asked_for)
    challenge = CHALLENGE if request.url.path in PAGE_PATHS else "Bearer"
    headers = {"www-authenticate": challenge} if status == 401 else {}
    if isinstance(error, NegamaxError) and error.retry_after is not None:
        if request.method == "POST":  # probes that find the server unready are no rejections
            request.app.state.metrics.measured.rejections.add(error.code or "")
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return error_response(request.scope, status, answer, headers=headers)


def http_error(request: Request, error: Exception) -> Response:
    """Handler for errors of the router: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        answer = error_answer(
            f"there is no route {where}.{nearest(request.url.path, request.app.state.paths)}",
            error_type="not_found_error",
            code="unknown_route",
        )
    elif error.status_code == 405:
        message = f"{where} is not allowed; allowed: {headers.get('Allow', 'another method')}"
        answer = error_answer(
            message, error_type="invalid_request_error", code="method_not_allowed"
        )
    else:
        answer = error_answer(str(error.detail), error_type="invalid_request_error")
    return error_response(request.scope, error.status_code, answer, headers=headers)


def client_gone(request: Request, error: Exception) -> Response:
    """Handler for a client that closed its connection before the response."""
    logger.debug("request %s: the client hung up", request.state.request_id)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: dict[Any, Any] = {
    NegamaxError: negamax_error,
    HTTPException: http_error,
    ClientGoneError: client_gone,
    ClientDisconnect: client_gone,
}
