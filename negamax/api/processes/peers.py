"""Send requests between server processes as HTTP over Unix sockets."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from negamax.api.http.exchange import Exchange, Headers, RelayedAnswer, list_headers, read_target
from negamax.api.http.sse import run_while_connected
from negamax.api.processes.server_rank import ServerRank
from negamax.base.errors import UnavailableError

_INTERNAL = "/internal/"  # Path prefix that only other server processes may use.

Answer = Callable[[bytes], bytes]


class PeerClient:
    """Sends requests to the other server processes, and answers their requests."""

    def __init__(self, rank: ServerRank) -> None:
        self.rank = rank
        self._answers: dict[str, Answer] = {}

    async def relay(self, request: Request, *, to: int, body: bytes = b"") -> Response:
        """Relay a request and its `body` to process `to`, and return the answer.

        Raises `UnavailableError` if the process is down, `ClientGoneError` if the client is gone.
        """
        method, target = request.method.encode(), read_target(request.scope)
        begin = self._begin(to, method, target, headers=list_headers(request.scope), body=body)
        return RelayedAnswer(await run_while_connected(request.receive, begin))

    async def ask(self, question: str, body: object, *, of: int) -> Any:
        """Return the answer of process `of` to an internal request, or raise `UnavailableError`."""
        content = msgspec.json.encode(body)
        target = (_INTERNAL + question).encode()
        exchange = await self._begin(of, b"POST", target, headers=(), body=content)
        try:
            return msgspec.json.decode(b"".join([part async for part in exchange.parts()]))
        finally:
            exchange.close()

    async def ask_others(self, question: str, body: object) -> list[Any]:
        """Return the answers of all other processes that are running."""
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
        """Return an app that answers internal requests, and passes other requests to `app`."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._answers.get(scope.get("path", ""))
            if answer is None:
                await app(scope, receive, send)
                return
            content = answer(await Request(scope, receive).body())
            await Response(content, media_type="application/json")(scope, receive, send)

        return answered

    async def _begin(
        self, to: int, method: bytes, target: bytes, *, headers: Headers, body: bytes
    ) -> Exchange:
        message = f"server process {to}, which owns the id in this request, is down and restarts"
        gone = UnavailableError(message, code="server_process", retry_after=1.0)
        try:
            connection = await asyncio.open_unix_connection(str(self.rank.socket_of(to)))
        except OSError:
            raise gone from None
        return await Exchange.begin(
            connection, method, target, headers=headers, body=body, gone=gone
        )

    def owner_route(self, parameter: str) -> type[APIRoute]:
        """Make a route class that relays a request to the process that made the id `parameter`."""
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
