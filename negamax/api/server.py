"""The server: the app with its routes and its border, the listening socket, signals, and the way from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute

from negamax import __version__
from negamax.api.border import HANDLERS, Border
from negamax.api.chat_completions import chat_router
from negamax.api.completions import completions_router
from negamax.api.context import ApiContext
from negamax.api.health import health_router
from negamax.api.models import models_router
from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.config.options import EngineOptions, ServerOptions
from negamax.engine.client import AsyncEngine

logger = get_logger(__name__)

GRACE_SECONDS = 5.0  # that open requests get to finish after the first signal; then they are aborted
_BACKLOG = 2048
_WILDCARDS = ("0.0.0.0", "::", "")


def create_app(context: ApiContext) -> FastAPI:
    """The ASGI app in front of a started engine."""
    app = FastAPI(
        title="Negamax", version=__version__, docs_url=None, redoc_url=None, exception_handlers=HANDLERS, redirect_slashes=False
    )
    app.add_middleware(Border, api_key=context.options.api_key)
    routers = [make(context) for make in (health_router, models_router, chat_router, completions_router)]
    for router in routers:
        app.include_router(router)
    app.state.paths = [route.path for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return app


def open_listener(host: str, port: int) -> socket.socket:
    """A bound socket for `host` and `port` (0: any free port), made before the model is loaded so that a port in use is told
    at once. Errors: `ResourceError` with the port, `ConfigError` for a host that is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host is {host!r}, which cannot be resolved: {error}", hint="use 127.0.0.1 or 0.0.0.0") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host=host, port=port) from None
    return listener


def _bind_error(error: OSError, *, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = "stop the other server, or use another --port (0 picks a free one)"
        return ResourceError(f"--port is {port}, which is in use on {host}", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(f"--port is {port}, which this user may not open", hint="use a port above 1023")
    return ConfigError(f"--host is {host!r} and --port {port}: {error.strerror}", hint="use 127.0.0.1 or 0.0.0.0")


async def serve(
    engine_options: EngineOptions,
    server_options: ServerOptions,
    *,
    listener: socket.socket,
    announce: Callable[[str, AsyncEngine], None],
) -> None:
    """Start the engine, serve on `listener` until SIGINT or SIGTERM, stop everything. `announce` is called with the URL and
    the engine once requests are answered. Errors: those of `AsyncEngine.start`."""
    signals = _Signals()
    with signals.watched():
        template = None if server_options.chat_template is None else Path(server_options.chat_template)
        try:
            engine = await AsyncEngine.start(engine_options, chat_template=template)
        except asyncio.CancelledError:
            logger.info("stopped while starting")
            return
        try:
            app = create_app(ApiContext.create(engine, server_options))
            server = _Server(app, announce=lambda: announce(_url(listener), engine))
            signals.hand_over(server, engine)
            try:
                await server.serve(sockets=[listener])
            except OSError as error:  # someone else took the port while the model was loading
                raise _bind_error(error, host=server_options.host, port=server_options.port) from None
        finally:
            await signals.stop_engine(engine)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = "localhost" if host in _WILDCARDS else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, with our signals, and a word when it listens."""

    def __init__(self, app: FastAPI, *, announce: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(2 * GRACE_SECONDS),  # for a client that stopped reading
        )
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """SIGINT and SIGTERM: the first one stops starting, or lets open requests finish; a second one ends at once.

    Single writer: the event loop.
    """

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._server: _Server | None = None
        self._engine: AsyncEngine | None = None
        self._count = 0
        self._stopping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Handle the signals while inside."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def hand_over(self, server: _Server, engine: AsyncEngine) -> None:
        """From now on a signal stops `server`."""
        self._server, self._engine = server, engine

    async def stop_engine(self, engine: AsyncEngine) -> None:
        """Stop the engine, once."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(engine.shutdown())
        await self._stopping

    def _received(self) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(1)  # asked three times: something hangs
        if self._server is None or self._engine is None:
            assert self._main is not None
            self._main.cancel()
            return
        self._server.should_exit = True
        grace = GRACE_SECONDS if self._count == 1 else 0.0
        asyncio.get_running_loop().call_later(grace, self._abort_requests)

    def _abort_requests(self) -> None:
        """Stopping the engine ends every open stream with an error event, so that the server can close its connections."""
        if self._stopping is None and self._engine is not None:
            self._stopping = asyncio.create_task(self._engine.shutdown())
