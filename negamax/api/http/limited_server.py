"""Run uvicorn's server with Negamax's signal handling, connection handling and limits."""

import contextlib
import socket
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from negamax.api.http.listening import Acceptor, ConnectionLimits, TlsFiles
from negamax.api.http.protocol import LimitedProtocol
from negamax.base import env

_CLOSE_SECONDS = 5  # Time limit for connections to close after the last answer.


class LimitedServer(uvicorn.Server):
    """Serves an app over `LimitedProtocol`. Only the event loop changes this object."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        slow_client_timeout: float,
        max_connections_per_address: int | None = None,
        forwarded_allow_ips: Sequence[str] = (),
        tls: TlsFiles | None = None,
    ) -> None:
        self._slow_client_timeout = slow_client_timeout
        self._limits = ConnectionLimits.of(
            max_files=env.raise_file_limit(), per_address=max_connections_per_address
        )
        self._tls = tls
        self._make_config = partial(
            uvicorn.Config,
            http=LimitedProtocol,
            log_config=None,
            access_log=False,
            proxy_headers=bool(forwarded_allow_ips),
            forwarded_allow_ips=list(forwarded_allow_ips),
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_CLOSE_SECONDS,  # Disconnect clients that stopped reading.
        )
        super().__init__(self._make_config(app))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        make_protocol = self._make_protocol_factory(self.config)
        for listener in sockets or ():
            acceptor: Any = Acceptor(listener, make_protocol, limits=self._limits, tls=self._tls)
            self.servers.append(acceptor)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def _make_protocol_factory(self, config: uvicorn.Config) -> Callable[[], LimitedProtocol]:
        return partial(
            LimitedProtocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            slow_client_timeout=self._slow_client_timeout,
        )
