"""Build the server's app, bind its socket, and run the server from start to stop."""

import asyncio
import errno
import gc
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from negamax import __version__
from negamax.api.auth import AuthMiddleware, is_loopback
from negamax.api.common.context import ApiContext
from negamax.api.dialects.chat.routes import make_chat_router
from negamax.api.dialects.completions.routes import make_completions_router
from negamax.api.dialects.generate.routes import make_native_router
from negamax.api.dialects.messages.routes import make_messages_router
from negamax.api.dialects.responses.routes import make_responses_router
from negamax.api.dialects.tokens.routes import make_tokens_router
from negamax.api.errors import HANDLERS, ErrorMiddleware
from negamax.api.health import make_health_router
from negamax.api.http.lifecycle import Signals
from negamax.api.http.limited_server import LimitedServer
from negamax.api.http.listening import TlsFiles
from negamax.api.load_report import log_load
from negamax.api.models import make_models_router
from negamax.api.openapi import build_document
from negamax.api.playground import make_playground_router
from negamax.api.processes.server_rank import ServerRank
from negamax.api.processes.supervisor import ServerSupervisor
from negamax.base import env
from negamax.base.addresses import bind, resolve_host
from negamax.base.errors import ConfigError, EngineDeadError, ResourceError
from negamax.base.log import get_logger
from negamax.base.private_folder import PrivateFolder
from negamax.base.supervision import SupervisionLimits
from negamax.engine.client.connection import ENGINE_MODULE
from negamax.engine.client.engine_client import AsyncEngine
from negamax.engine.client.supervisor import EngineSupervisor
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions

logger = get_logger(__name__)

_GC_THRESHOLD = 10_000  # Number of allocated containers that triggers a collection of generation 0.
# `_NO_TELEMETRY` disables FastAPI's telemetry, which environment variables can enable.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
ROUTERS = (
    make_health_router, make_models_router, make_chat_router, make_completions_router,
    make_messages_router, make_responses_router, make_tokens_router, make_native_router,
)  # fmt: skip
_WILDCARDS = ("0.0.0.0", "::", "")


def create_app(context: ApiContext) -> FastAPI:
    options = context.options
    app = FastAPI(
        title="Negamax",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        exception_handlers=HANDLERS,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    app.add_middleware(AuthMiddleware, context=context)  # The middleware added first is innermost.
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(
        ErrorMiddleware, lifecycle=context.lifecycle, logs_access=options.enable_access_log
    )
    routers = [make(context) for make in ROUTERS]
    for router in routers:
        app.include_router(router)
    app.include_router(make_playground_router())
    app.openapi = partial(build_document, app)  # type: ignore[method-assign]
    app.state.metrics = context.metrics
    app.state.logs_requests = options.enable_log_requests
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.state.paths = [route.path for route in routes]
    app.state.endpoints = [
        f"{method} {route.path}" for route in routes for method in sorted(route.methods or ())
    ]
    return app


def open_listener(options: ServerOptions) -> socket.socket:
    """Bind a socket to the host and port of `options`. Port 0 selects a free port.

    The socket is bound before the model loads, so that errors appear at once. Raises
    `ResourceError` for a port in use. Raises `ConfigError` if the host is another machine, if other
    machines can reach the host without an API key, or if the TLS files are unusable.
    """
    family, address = resolve_address(options)
    _make_tls_files(options)
    try:
        listener = bind(family, address)
        if options.api_server_count > 1:
            # The first socket shows that the port is free. Then a shared socket replaces
            # the first socket, so that other server processes can bind the same port.
            address = listener.getsockname()
            listener.close()
            return bind(family, address, is_shared=True)
    except OSError as error:
        raise build_bind_error(error, host=options.host, port=options.port) from None
    return listener


def resolve_address(options: ServerOptions) -> tuple[int, Any]:
    """Return the socket family and the address to listen on.

    Raises `ConfigError` if the host is unknown, or if it needs an API key and no key is set.
    """
    host, has_key = options.host, bool(options.api_keys or options.api_key_file)
    family, address = resolve_host(host, options.port)
    if not (has_key or options.allow_unauthenticated or is_loopback(str(address[0]))):
        raise ConfigError(
            f"--host is {host!r}, which other machines can reach, and there is no API key",
            hint="set NEGAMAX_API_KEY or --api-key, or pass --allow-unauthenticated",
        )
    return family, address


def _make_tls_files(options: ServerOptions) -> TlsFiles | None:
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return None
    return TlsFiles(options.ssl_certfile, options.ssl_keyfile)


def build_bind_error(error: OSError, *, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = "stop the other server, or use another --port (0 selects a free port)"
        return ResourceError(f"--port is {port}, which is in use on {host}", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(
            f"--port is {port}, which this user cannot open", hint="use a port above 1023"
        )
    return ConfigError(
        f"--host {host!r} with --port {port}: {error.strerror}", hint="use 127.0.0.1 or 0.0.0.0"
    )


def make_event_loop() -> asyncio.Runner:
    try:
        from uvloop import Loop as loop_factory
    except ImportError:
        loop_factory = None
    env.set_default("TOKENIZERS_PARALLELISM", "false")  # Do not tokenize batches in threads.
    return asyncio.Runner(loop_factory=loop_factory)


def run(engine_options: EngineOptions, server_options: ServerOptions, **how: Any) -> None:
    """Run `serve` in a new event loop."""
    with make_event_loop() as runner:
        runner.run(serve(engine_options, server_options, **how))


async def serve(
    engine_options: EngineOptions,
    server_options: ServerOptions,
    *,
    listener: socket.socket,
    announce: Callable[[str, AsyncEngine], None],
    engine_module: str = ENGINE_MODULE,
) -> None:
    """Start the engine, serve on `listener` until SIGINT or SIGTERM, and stop everything.

    `announce` is called with the URL and the engine when the server is ready. The engine process
    runs `engine_module`. SIGHUP reloads the key and TLS files. Raises errors of
    `EngineSupervisor.run`. Raises `EngineDeadError` if the engine or a server dies too often.
    """
    signals = Signals()
    template = None if server_options.chat_template is None else Path(server_options.chat_template)
    server_rank = ServerRank.of(
        0,
        server_options.api_server_count,
        Path(PrivateFolder().path),
        num_replicas=engine_options.num_replicas,
    )
    servers = ServerSupervisor(server_rank, engine_options, server_options, listener=listener)
    with signals.watched():
        try:
            supervisor = await EngineSupervisor.run(
                await AsyncEngine.create(
                    engine_options, chat_template=template, queue=server_rank.queue
                ),
                engine_options,
                limits=SupervisionLimits(
                    max_restarts=server_options.max_engine_restarts,
                    restart_window=server_options.engine_restart_window,
                    hang_timeout=server_options.engine_hang_timeout,
                ),
                module=engine_module,
                num_servers=server_rank.count,
                listener=servers,
                parent=servers.pulse,
            )
        except asyncio.CancelledError:
            logger.info("stopped while starting")
            await servers.end()
            return
        except BaseException:
            await servers.end()
            raise
        engine = supervisor.engine
        servers.on_death = supervisor.on_server_lost
        try:
            server = HttpServer(
                ApiContext.create(engine, server_options, server_rank),
                stop_engine=supervisor.shutdown,
                announce=lambda: announce(
                    build_url(listener, is_tls=server_options.ssl_certfile is not None), engine
                ),
                servers=servers,
            )
            signals.hand_over(drain=server.drain, abort=server.abort, reload=server.reload)
            settle_garbage_collection()
            try:
                await server.serve(sockets=[listener])
            except OSError as error:  # Another process took the port while the model was loading.
                raise build_bind_error(
                    error, host=server_options.host, port=server_options.port
                ) from None
        finally:
            await servers.end()
            await supervisor.shutdown()
        if engine.failed.done():
            raise EngineDeadError(f"the engine ended too often: {engine.failed.result()}")
        if servers.failed.done():
            raise EngineDeadError(f"a server process ended too often: {servers.failed.result()}")


def settle_garbage_collection() -> None:
    """Exempt all current objects from garbage collection, and make garbage collections rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def build_url(listener: socket.socket, *, is_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    host = "localhost" if host in _WILDCARDS else f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{host}:{port}"


class HttpServer(LimitedServer):
    """Serves the API of an engine. Only the event loop changes this object."""

    def __init__(
        self,
        context: ApiContext,
        *,
        stop_engine: Callable[[], Awaitable[None]],
        announce: Callable[[], None] | None = None,
        servers: ServerSupervisor | None = None,
    ) -> None:
        """`stop_engine` ends open requests. `servers` supervises the other server processes."""
        options = context.options
        app = create_app(context)
        super().__init__(
            app,
            slow_client_timeout=options.slow_client_timeout,
            max_connections_per_address=options.max_connections_per_address,
            forwarded_allow_ips=options.forwarded_allow_ips,
            tls=_make_tls_files(options),
        )
        self._internal_app = context.peers.wrap(app)
        self._context = context
        self._stop_engine = stop_engine
        self._announce = announce
        self._servers = servers
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        context, servers = self._context, self._servers
        self._pulse = context.lifecycle.start_pulse()  # A task that runs until the event loop ends.
        watches = [self._watch(context.engine.failed)]
        if servers is not None:  # True in process 0, which also serves the metrics.
            watches += [context.metrics.watch(), self._watch(servers.failed)]
            if context.options.log_stats:
                watches.append(
                    log_load(context.engine, interval=context.options.log_stats_interval)
                )
        self._tasks = [asyncio.create_task(watch) for watch in watches]
        if context.server_rank.count > 1:
            await self._listen_to_peers()
        if servers is not None:
            await servers.ready()
        if self._announce is not None and not context.lifecycle.is_draining:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)
        if self._context.tracer is not None:
            await self._context.tracer.close()

    def drain(self) -> None:
        """Refuse new requests, answer open requests within the drain timeout, and end."""
        self._context.lifecycle.begin_drain()
        if self._servers is not None:
            self._servers.drain()
        self._tasks.append(asyncio.create_task(self._drain()))

    def reload(self) -> None:
        """Reload the key file and the TLS files. If a file is invalid, keep its old content."""
        if self._servers is not None:
            self._servers.reload()
        try:
            self._context.access.reload()
            if self._tls is not None:
                self._tls.reload()
        except ConfigError as error:
            logger.error("the files were not reloaded: %s", error)
        else:
            logger.info("the files were reloaded")

    async def abort(self) -> None:
        """End the server now. Stopping the engine ends open streams with an error event."""
        self._context.lifecycle.begin_drain()
        ends = [self._stop_engine()]
        if self._servers is not None:
            ends.append(self._servers.end())
        await asyncio.gather(*ends)
        self.should_exit = True

    async def _drain(self) -> None:
        engine, servers = self._context.engine, self._servers
        is_idle = await self._context.lifecycle.drained(
            is_idle=lambda: engine.num_open == 0 and (servers is None or servers.num_running == 0)
        )
        if not is_idle:
            logger.warning(
                "%d requests are still open and are aborted", self._context.lifecycle.total_open
            )
            await self.abort()
        self.should_exit = True

    async def _watch(self, end: asyncio.Future[str]) -> None:
        await asyncio.shield(end)
        self._context.lifecycle.begin_drain()
        self.should_exit = True

    async def _listen_to_peers(self) -> None:
        config = self._make_config(self._internal_app)
        config.load()
        make_protocol = self._make_protocol_factory(config)
        path = str(self._context.server_rank.socket_of(self._context.server_rank.index))
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_unix_server(make_protocol, path))
