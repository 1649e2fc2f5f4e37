"""Open the socket of the router, and run the router until it ends."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain, islice
from urllib.parse import SplitResult

from negamax.api.auth import is_loopback
from negamax.api.errors import ErrorMiddleware
from negamax.api.http.lifecycle import Lifecycle, Signals
from negamax.api.http.limited_server import LimitedServer
from negamax.api.router.app import RouterApp
from negamax.api.router.kv_events import EventReader
from negamax.api.router.servers import ServerPool
from negamax.api.server import build_bind_error, build_url, settle_garbage_collection
from negamax.base.addresses import bind, resolve_host
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.options.route import RouteOptions, list_event_addresses, list_prefillers

logger = get_logger(__name__)

_SLOW_CLIENT_SECONDS = 60.0  # A client that reads nothing for this time is disconnected.
_DRAIN_SECONDS = 30.0  # time after SIGTERM for open requests to finish


def open_router_socket(options: RouteOptions) -> socket.socket:
    """Bind the router's socket. Raises `ConfigError` if --allow-unauthenticated is needed."""
    family, address = resolve_host(options.host, options.port)
    if not (options.allow_unauthenticated or is_loopback(str(address[0]))):
        raise ConfigError(
            f"--host is {options.host!r}, which other machines can reach, and the router checks "
            f"no keys",
            hint="set API keys on the servers, and start the router with --allow-unauthenticated",
        )
    try:
        return bind(family, address)
    except OSError as error:
        raise build_bind_error(error, host=options.host, port=options.port) from None


async def serve_router(
    servers: Sequence[SplitResult],
    prefillers: Sequence[SplitResult],
    options: RouteOptions,
    *,
    listener: socket.socket,
    announce: Callable[[str, int], None],
) -> None:
    """Route until SIGINT or SIGTERM. Call `announce` with the URL and the number of ready servers.

    A server that is down at the start gets requests as soon as it answers.
    """
    signals = Signals()
    addresses = list_event_addresses(options, [*servers, *prefillers])
    with signals.watched(), closing(EventReader(chain(*addresses.values()))) as reader:
        found = iter(reader.indexes)
        indexes = {url: list(islice(found, len(ranks))) for url, ranks in addresses.items()}
        pools = [ServerPool(servers, role="decode" if prefillers else "both", indexes=indexes)]
        if prefillers:
            pools.append(ServerPool(prefillers, role="prefill", indexes=indexes))
        try:
            await asyncio.gather(*(pool.probe() for pool in pools))
        except asyncio.CancelledError:
            return
        num_up = sum(len(pool.list_ready()) for pool in pools)
        server = RouterServer(
            pools, options, announce=lambda: announce(build_url(listener), num_up)
        )
        watches = [asyncio.create_task(pool.watch(options.health_interval)) for pool in pools]
        signals.hand_over(drain=server.drain, abort=server.abort, reload=lambda: None)
        settle_garbage_collection()
        await server.serve(sockets=[listener])
        for watch in watches:
            watch.cancel()


class RouterServer(LimitedServer):
    """Serves the router's app. Only the event loop changes this object."""

    def __init__(
        self, pools: Sequence[ServerPool], options: RouteOptions, *, announce: Callable[[], None]
    ) -> None:
        self._lifecycle = Lifecycle(drain_timeout=_DRAIN_SECONDS)
        ports = {url.geturl(): port for url, port in list_prefillers(options)}
        app = RouterApp(
            *pools,
            lifecycle=self._lifecycle,
            max_body_bytes=options.max_body_bytes,
            bootstrap_ports=ports if options.pd_disaggregation else None,
        )
        super().__init__(
            ErrorMiddleware(app, lifecycle=self._lifecycle, logs_access=False),
            slow_client_timeout=_SLOW_CLIENT_SECONDS,
        )
        self._announce = announce
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def drain(self) -> None:
        """Refuse new requests, finish the open answers, and end."""
        self._lifecycle.begin_drain()
        self._draining = asyncio.create_task(self._drain())

    async def abort(self) -> None:
        self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        if not await self._lifecycle.drained(is_idle=lambda: True):
            logger.warning("%d requests are still open and end now", self._lifecycle.num_open)
        self.should_exit = True
