"""Requests between server processes, in HTTP on Unix sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Self

import httptools
import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from negamax.api.http.sse import ClientGoneError, run_while_connected
from negamax.api.processes.server_rank import ServerRank
from negamax.base.errors import UnavailableError

_READ_BYTES = 1 << 16
_OWN_REQUEST_HEADERS = frozenset((  # of one connection, or set again
    b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"transfer-encoding",
    b"upgrade", b"x-request-id",
))  # fmt: skip
_OWN_ANSWER_HEADERS = frozenset(
    (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding", b"x-request-id")
)
_INTERNAL = "/internal/"  # paths for other server processes only

Headers = Sequence[tuple[bytes, bytes]]
Answer = Callable[[bytes], bytes]


class PeerClient:
    """The other server processes, seen from one of them."""

    def __init__(self, rank: ServerRank) -> None:
        self.rank = rank
        self._answers: dict[str, Answer] = {}

    async def relay(self, request: Request, *, to: int, body: bytes = b"") -> Response:
        """Return the answer of process `to` to a request whose body was read.

        Errors: `UnavailableError` if the process is not there, `ClientGoneError`.
        """
        target = request.scope["raw_path"]
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        headers = [
            (name, value) for name, value in request.headers.raw if name not in _OWN_REQUEST_HEADERS
        ]
        headers.append((b"x-request-id", request.state.request_id.encode()))
        exchange = _Exchange.begin(
            self.rank, to, request.method.encode(), target, headers=headers, body=body
        )
        return _Relayed(await run_while_connected(request.receive, exchange))

    async def ask(self, question: str, body: object, *, of: int) -> Any:
        """Return the answer of process `of` to a question. Errors: `UnavailableError`."""
        content = msgspec.json.encode(body)
        exchange = await _Exchange.begin(
            self.rank, of, b"POST", (_INTERNAL + question).encode(), headers=(), body=content
        )
        try:
            return msgspec.json.decode(b"".join([part async for part in exchange.parts()]))
        finally:
            exchange.close()

    async def ask_others(self, question: str, body: object) -> list[Any]:
        """Return the answers of all other processes that are there."""
        others = [index for index in range(self.rank.count) if index != self.rank.index]
        answers = await asyncio.gather(
            *(self.ask(question, body, of=index) for index in others), return_exceptions=True
        )
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def when_asked(self, question: str, answer: Callable[[Any], object]) -> None:
        def encoded(body: bytes) -> bytes:
            return msgspec.json.encode(answer(msgspec.json.decode(body)))

        self._answers[_INTERNAL + question] = encoded

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the app for other server processes: `app`, and the answers to questions."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._answers.get(scope.get("path", ""))
            if answer is None:
                await app(scope, receive, send)
                return
            content = answer(await Request(scope, receive).body())
            await Response(content, media_type="application/json")(scope, receive, send)

        return answered

    def owner_route(self, parameter: str) -> type[APIRoute]:
        """Make the class of routes without a body that the owner of the parameter answers."""
        peers = self

        class OwnerRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                answer = super().get_route_handler()

                async def answer_or_relay(request: Request) -> Response:
                    owner = peers.rank.owner_of(request.path_params.get(parameter))
                    return await (
                        answer(request)
                        if owner == peers.rank.index
                        else peers.relay(request, to=owner)
                    )

                return answer_or_relay

        return OwnerRoute


class _Exchange:
    """One request to another process and its answer. Single user: its sender."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_begun = self._is_complete = False

    @classmethod
    async def begin(
        cls,
        rank: ServerRank,
        to: int,
        method: bytes,
        target: bytes,
        *,
        headers: Headers,
        body: bytes,
    ) -> Self:
        """Send a request and wait for the head of the answer. Errors: `UnavailableError`."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(rank.socket_of(to)))
        except OSError:
            raise _build_gone_error(to) from None
        exchange = cls(reader, writer)
        try:
            head = [
                method + b" " + target + b" HTTP/1.1",
                *(name + b": " + value for name, value in headers),
            ]
            head += [b"connection: close", b"content-length: %d" % len(body), b"", b""]
            writer.write(b"\r\n".join(head) + body)
            while not exchange._has_begun:
                if not await exchange._read():
                    raise _build_gone_error(to)
        except BaseException as error:
            exchange.close()
            if isinstance(error, OSError):
                raise _build_gone_error(to) from None
            raise
        return exchange

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Errors: `UnavailableError` if it ends early."""
        while True:
            parts, self._parts = self._parts, []
            if parts:
                yield b"".join(parts)
            if self._is_complete:
                return
            if not self._parts and not await self._read():
                raise UnavailableError(
                    "another server process ended its answer early",
                    code="server_process",
                    retry_after=1.0,
                )

    def close(self) -> None:
        self._writer.close()

    async def _read(self) -> bool:
        part = await self._reader.read(_READ_BYTES)
        if part:
            self._parser.feed_data(part)
        return bool(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_begun = True

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete = True


class _Relayed(Response):
    """Another process's answer, sent on as it arrives."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__(status_code=exchange.status)
        self.raw_headers = [
            (name, value) for name, value in exchange.headers if name not in _OWN_ANSWER_HEADERS
        ]
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._pass_on(send))
        except ClientGoneError:
            pass
        finally:
            self._exchange.close()

    async def _pass_on(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async for part in self._exchange.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _build_gone_error(index: int) -> UnavailableError:
    message = (
        f"server process {index}, which owns what this request names, is down; it is being "
        f"restarted"
    )
    return UnavailableError(message, code="server_process", retry_after=1.0)
