"""Relay each request to one server, and to another server if the first server fails."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from negamax.api.errors import (
    CLIENT_CLOSED_REQUEST,
    MESSAGES_PATH,
    build_error_response,
    build_json_response,
    describe_error,
)
from negamax.api.http.body_budget import BodyBudget, BodyShare
from negamax.api.http.exchange import Exchange, RelayedAnswer, list_headers, read_target
from negamax.api.http.lifecycle import Lifecycle
from negamax.api.http.limited_body import BODIES_IN_FLIGHT, LimitedBody
from negamax.api.http.request_body import build_size_error
from negamax.api.http.request_threads import run_off_loop
from negamax.api.http.sse import (
    ClientGoneError,
    encode_event,
    encode_named_event,
    run_while_connected,
)
from negamax.api.http.unpacking import find_encoding
from negamax.api.router.metrics import RouterMetrics
from negamax.api.router.prompt import (
    PARAMS,
    ROOM,
    RoutedPrompt,
    build_decode_body,
    build_prefill_body,
    build_room_body,
    read_prompt,
)
from negamax.api.router.servers import OpenCall, RoutedServer, ServerPool
from negamax.api.schemas.answers import HealthAnswer, build_message_error
from negamax.base.errors import NegamaxError, UnavailableError
from negamax.base.log import get_logger

logger = get_logger(__name__)

MAX_RETRIES = 1  # More retries would let a fatal request kill all servers.
_BUSY = frozenset({429, 502, 503})  # Statuses of a full queue, a dead engine, or shutdown.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PAIRED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})  # paths with remote prefill
_ROOM_PATHS = _PAIRED_PATHS | {"/generate"}  # paths with remote prefill in SGLang's protocol
_STORED_PATH = "/v1/responses"  # A response is stored only by the server that created it.
# `_BLOCK_PATHS`: paths with /kv_blocks, which returns the block hashes of a prompt
_BLOCK_PATHS = _PAIRED_PATHS | {MESSAGES_PATH, _STORED_PATH}
_PREVIOUS = "previous_response_id"  # Only the server that stored this response has the prompt.
_LEAST_TOKENS = 512  # For shorter prompts, the router does not ask servers for the prompt's blocks.
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
# If both servers of a pair fail, the failure of the prefilling server arrives within this time.
_CAUSE_SECONDS = 1.0
_PARAMS_BYTES = 8 * 2**20  # Size limit of the answer of a prefilling server.
_INLINE_BYTES = 32 * 1024  # Prompts of larger bodies are hashed in a thread.


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request in the format that the router sends to a server."""

    path: str
    method: bytes
    target: bytes  # Path and query of the URL.
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: RoutedPrompt
    request_id: str


class RouterApp:
    """The router's ASGI app. Servers of `pool` answer; servers of `prefillers` compute prompts."""

    def __init__(
        self,
        pool: ServerPool,
        prefillers: ServerPool | None = None,
        *,
        lifecycle: Lifecycle,
        max_body_bytes: int,
        bootstrap_ports: Mapping[str, int | None] | None = None,
    ) -> None:
        """With `bootstrap_ports` (prefilling server's URL -> port), use SGLang's protocol."""
        self._ports = bootstrap_ports or {}
        self._pool, self._prefillers, self._lifecycle = pool, prefillers, lifecycle
        self._max_body_bytes = max_body_bytes
        self._budget = BodyBudget(BODIES_IN_FLIGHT * max_body_bytes)
        self._metrics = RouterMetrics([*pool.servers, *(prefillers.servers if prefillers else ())])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._lifecycle.opened()
        try:
            response = await self._respond(scope, receive)
            await response(scope, receive, send)
        except UnavailableError:  # The error is logged; uvicorn closes the connection.
            pass
        finally:
            self._lifecycle.closed()

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        share = BodyShare(self._budget, scope)
        try:
            response = self._answer_itself(scope)
            if response is not None:
                return response
            self._lifecycle.check_accepting()
            request = await self._read(scope, receive, share)
            return await run_while_connected(receive, self._place(request))
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except NegamaxError as error:
            return _build_refusal(scope, error)
        finally:
            share.keep(0)  # No retry needs the body now, so free its bytes.

    def _answer_itself(self, scope: Scope) -> Response | None:
        """Answer a request to a route of the router; return None for a route of the servers."""
        path = scope["path"]
        if path == "/livez":
            return build_json_response(HealthAnswer("ok"))
        if path in ("/health", "/readyz"):
            self._lifecycle.check_accepting()
            num_up = len(self._pool.list_ready())
            is_whole = num_up == len(self._pool.servers)
            status = "ok" if is_whole else "degraded" if num_up else "failed"
            return build_json_response(HealthAnswer(status), status=200 if num_up else 503)
        if path == "/metrics":
            encoder, content_type = choose_encoder(Headers(scope=scope).get("accept", ""))
            return Response(encoder(self._metrics.registry), media_type=content_type)
        return None

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare) -> RoutedRequest:
        """Receive a request. Raises the errors of `LimitedBody`, and `PayloadTooLargeError`."""
        headers, body, prompt = list_headers(scope), b"", RoutedPrompt()
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # Uvicorn drops the body.
        if method not in _SAFE_METHODS:
            most = self._max_body_bytes
            encoding = find_encoding(headers)
            limited = LimitedBody(receive, share, max_packed_bytes=most, encoding=encoding)
            if encoding is not None:
                headers = [header for header in headers if header[0] != b"content-encoding"]
            parts: list[bytes] = []
            async for part in Request(scope, limited.receive).stream():
                parts.append(part)
                if share.num_bytes > most:
                    raise build_size_error(share.num_bytes, most)
            body = b"".join(parts)
            sender = b"\n".join(value for name, value in headers if name in _KEY_HEADERS)
            work = partial(read_prompt, body, sender=sender)
            prompt = await run_off_loop(work, num_bytes=len(body), inline_bytes=_INLINE_BYTES)
        return RoutedRequest(
            path=scope["path"],
            method=method.encode(),
            target=read_target(scope),
            headers=headers,
            body=body,
            prompt=prompt,
            request_id=scope["state"]["request_id"],
        )

    async def _place(self, request: RoutedRequest) -> Response:
        """Find the blocks of the prompt if servers publish KV events, and relay the request."""
        server = self._pick_renderer(request)
        if server is not None:
            headers, body = request.headers, request.body
            blocks = await server.find_blocks(request.path, headers=headers, body=body)
            if blocks is not None:
                num_tokens = blocks.num_tokens
                prompt = replace(request.prompt, blocks=blocks, num_tokens=num_tokens)
                request = replace(request, prompt=prompt)
        return await self._relay(request)

    def _pick_renderer(self, request: RoutedRequest) -> RoutedServer | None:
        """Return the server to ask for a prompt's blocks, or None if the router needs no blocks."""
        prompt, path = request.prompt, request.path
        if path not in _BLOCK_PATHS or not prompt.fields or _PREVIOUS in prompt.fields:
            return None
        if prompt.num_tokens < _LEAST_TOKENS:
            return None
        pools = filter(None, (self._pool, self._prefillers))
        return next(filter(None, (pool.pick_renderer(prompt) for pool in pools)), None)

    async def _relay(self, request: RoutedRequest) -> Response:
        """Return the answer of a server. Raises `UnavailableError` if no server answers."""
        tried: list[RoutedServer] = []
        while True:
            is_computed = self._is_paired(request)
            call = self._pool.open(request.prompt, without=tried, is_computed=is_computed)
            tried.append(call.server)
            others = self._pool.list_ready(tried)
            try:
                exchange = await self._begin_answer(call, request)
            except BaseException as error:
                call.close()
                is_gone = isinstance(error, UnavailableError)
                call.server.num_failures += is_gone
                if not is_gone or len(tried) > MAX_RETRIES or not others:
                    raise
                continue
            if isinstance(exchange, Response):
                call.close()
                return exchange
            is_busy = exchange.status in _BUSY
            call.server.num_failures += is_busy
            is_elsewhere = exchange.status == 404 and request.path.startswith(_STORED_PATH)
            if not others or not (is_elsewhere or (is_busy and len(tried) <= MAX_RETRIES)):
                encode_end = partial(_encode_end, request, call.server)
                return RelayedAnswer(exchange, encode_end=encode_end, on_end=call.close)
            call.close()

    def _is_paired(self, request: RoutedRequest, tried: Sequence[RoutedServer] = ()) -> bool:
        """Return whether a prefilling server that is not in `tried` can compute the prompt."""
        fields, paths = request.prompt.fields, _ROOM_PATHS if self._ports else _PAIRED_PATHS
        if self._prefillers is None or fields is None or request.path not in paths:
            return False
        is_prepared = PARAMS in fields or ROOM in fields  # by another router
        return not is_prepared and bool(self._prefillers.list_ready(tried))

    async def _begin_answer(
        self, call: OpenCall, request: RoutedRequest
    ) -> Exchange | RelayedAnswer:
        """Let a prefilling server compute the prompt, and begin the answer of the server of `call`.
        In SGLang's protocol, the prefilling server and the server of `call` start together.

        If a prefilling server refuses the request, return its answer. If all prefilling servers
        fail, the server of `call` computes the prompt.
        """
        fields, tried = request.prompt.fields or {}, list[RoutedServer]()
        while len(tried) <= MAX_RETRIES and self._is_paired(request, tried):
            assert self._prefillers is not None
            first = self._prefillers.open(request.prompt, without=tried)
            tried.append(first.server)
            if not self._ports:
                answer = await _compute(first, request, build_prefill_body(fields))
                if isinstance(answer, bytes):
                    body = build_decode_body(fields, answer) or request.body
                    return await _begin(call, request, body)
            else:
                body = build_room_body(fields, first.server.url, self._ports)
                call.prefill = prefill = asyncio.create_task(_compute(first, request, body))
                decode = asyncio.create_task(_begin(call, request, body))
                try:
                    await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
                    has_begun = decode.done() and decode.exception() is None
                    has_begun = has_begun and decode.result().status not in _BUSY
                    if decode.done() and not has_begun:  # a failed prefill may be the cause
                        await asyncio.wait({prefill}, timeout=_CAUSE_SECONDS)
                    answer = prefill.result() if prefill.done() else b""
                    if isinstance(answer, bytes) or (answer is None and has_begun):
                        return await decode
                finally:
                    decode.cancel()
                if call.exchange is not None:
                    call.exchange.close()
            if isinstance(answer, RelayedAnswer):
                return answer
        return await _begin(call, request, request.body)


async def _compute(
    call: OpenCall, request: RoutedRequest, body: bytes
) -> bytes | RelayedAnswer | None:
    """Let the server of `call` compute a prompt, and close `call`. Return the server's answer, a
    `RelayedAnswer` if the server refuses the request, or None if the server fails.
    """
    server = call.server
    try:
        async with asyncio.timeout(None) as limit:
            server.limits.add(limit)
            with closing(call):
                exchange = await _begin(call, request, body)
                answer = await exchange.read(max_bytes=_PARAMS_BYTES)
        if exchange.status == 200:
            return answer
        if 400 <= exchange.status < 500 and exchange.status not in _BUSY:
            return RelayedAnswer(exchange)
    except (UnavailableError, TimeoutError) as error:
        logger.warning("request %s: %s", request.request_id, str(error) or "a probe failed")
    finally:
        server.limits.discard(limit)
    server.num_failures += 1
    return None


async def _begin(call: OpenCall, request: RoutedRequest, body: bytes) -> Exchange:
    """Send a request and wait for the first bytes of the answer's body. Raises `UnavailableError`
    if the server does not answer, so that the router can try another server.
    """
    call.exchange = await call.server.send(
        request.method, request.target, headers=request.headers, body=body
    )
    await call.exchange.wait_for_body()
    call.note_first_bytes()
    return call.exchange


def _encode_end(request: RoutedRequest, server: RoutedServer, error: UnavailableError) -> bytes:
    """Count an answer that ended early, and return the last event of a stream."""
    server.num_failures += 1
    logger.warning("request %s ended early: %s", request.request_id, error)
    status, answer = describe_error(error)
    end = encode_event(answer)
    if request.path.startswith(MESSAGES_PATH):
        named = build_message_error(status, answer, request_id=request.request_id)
        end = encode_named_event("error", named)
    return b"\n\n" + end  # The blank line ends an incomplete event.


def _build_refusal(scope: Scope, error: NegamaxError) -> Response:
    status, answer = describe_error(error)
    seconds = error.retry_after
    headers = {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
    return build_error_response(scope, status, answer, headers=headers)
