"""Check headers, API key, readiness and queue length of each request before its route runs.

The middleware checks a request before the body is read, so that a refusal costs little.
"""

import ipaddress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from negamax.api.access import get_owner
from negamax.api.common.context import ApiContext
from negamax.api.errors import handle_error
from negamax.api.http.body_budget import BodyBudget, BodyShare
from negamax.api.http.limited_body import BODIES_IN_FLIGHT, PACKED_HEADERS, LimitedBody
from negamax.api.http.request_threads import SENDER
from negamax.api.http.unpacking import find_encoding
from negamax.base.errors import ForbiddenError, HeadTooLargeError, NegamaxError, UrlTooLongError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})  # paths that need no API key
GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
)
MAX_URL_BYTES = 8192
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_Headers = list[tuple[bytes, bytes]]


class AuthMiddleware:
    """Checks each request before its route runs. Only the event loop changes this object."""

    def __init__(self, app: ASGIApp, *, context: ApiContext) -> None:
        options = context.options
        self._app = app
        self._context = context
        self._access = context.access
        hosts = {host.lower() for host in (*options.allowed_hosts, options.host)}
        is_open = self._access.has_keys or options.allow_unauthenticated or "*" in hosts
        self._hosts = None if is_open else hosts
        max_bytes = context.body_limits.num_bytes
        self._body_budget = BodyBudget(BODIES_IN_FLIGHT * max_bytes)
        self._max_packed_bytes = max_bytes  # size limit of one compressed request body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_safe = scope["method"] in _SAFE_METHODS
        try:
            self._check(scope)
            encoding = None if is_safe else find_encoding(scope["headers"])
        except NegamaxError as error:
            await handle_error(Request(scope), error)(scope, receive, send)
            return
        if is_safe:
            if scope["method"] == "HEAD":  # The GET route answers HEAD; uvicorn drops the body.
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive, send)
            return
        if encoding is not None:
            headers = [each for each in scope["headers"] if each[0] not in PACKED_HEADERS]
            scope = {**scope, "headers": headers}
        share = BodyShare(self._body_budget, scope)
        body = LimitedBody(
            receive, share, max_packed_bytes=self._max_packed_bytes, encoding=encoding
        )
        lifecycle = self._context.lifecycle
        lifecycle.opened()
        try:
            await self._app(scope, body.receive, send)
        finally:
            lifecycle.closed()
            share.keep(0)

    def _check(self, scope: Scope) -> None:
        headers: _Headers = scope["headers"]
        path: str = scope["path"]
        _check_size(headers, url_bytes=len(scope["raw_path"]) + len(scope["query_string"]))
        if self._hosts is not None:
            _check_host(headers, self._hosts)
        if path in OPEN_PATHS:
            return
        self._access.identify(scope)
        SENDER.set(scope["state"]["tenant"] if scope["state"]["shares_queue"] else "")
        if scope["method"] in _SAFE_METHODS:
            return
        self._access.check_site(scope)
        self._context.lifecycle.check_accepting()
        if path in GENERATION_PATHS:
            self._context.engine.check_alive()
            self._context.engine.check_room([1], owner=get_owner(Request(scope)))


def _check_size(headers: _Headers, *, url_bytes: int) -> None:
    if url_bytes > MAX_URL_BYTES:
        raise UrlTooLongError(
            f"the URL has {url_bytes} bytes; send at most {MAX_URL_BYTES}", code="url_too_long"
        )
    if len(headers) > MAX_HEADERS:
        raise HeadTooLargeError(
            f"the request has {len(headers)} headers; send at most {MAX_HEADERS}",
            code="too_many_headers",
        )
    header_bytes = sum(len(name) + len(value) for name, value in headers)
    if header_bytes > MAX_HEADER_BYTES:
        raise HeadTooLargeError(
            f"the headers have {header_bytes} bytes; send at most {MAX_HEADER_BYTES}",
            code="headers_too_large",
        )


def _check_host(headers: _Headers, allowed: set[str]) -> None:
    """Refuse a Host header that names another machine, to stop attacks by DNS rebinding."""
    for name, value in headers:
        if name == b"host":
            host = _parse_host(value.decode("latin-1"))
            if host not in allowed and not is_loopback(host):
                raise ForbiddenError(
                    f"the Host header names {host[:100]!r}, which is not a name of this machine",
                    hint="set an API key, or start the server with --allowed-hosts",
                    code="host_not_allowed",
                )


def _parse_host(value: str) -> str:
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return value.partition(":")[0].strip().lower()


def is_loopback(host: str) -> bool:
    """Return whether the name or address `host` is the loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
