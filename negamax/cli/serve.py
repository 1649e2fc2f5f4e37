"""`negamax serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from negamax.base import log
from negamax.base.imports import large_imports
from negamax.base.standard_streams import drop_unwritable
from negamax.cli.options import add_options
from negamax.config.embedded import EMBEDDED
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions

if TYPE_CHECKING:
    from negamax.engine.client.engine_client import AsyncEngine

logger = log.get_logger(__name__)

HELP = "Serve MODEL over an OpenAI-compatible HTTP API."


def check(*, engine: EngineOptions, server: ServerOptions) -> None:
    """Raise `ConfigError` if the address, the model or an option prevents a start."""
    with large_imports():
        from negamax.api.server import resolve_address  # the import of the HTTP stack is slow
        from negamax.api.tracing import check_endpoint
    from negamax.engine.core.source import check_model
    from negamax.engine.nodes.ray_launcher import check_installed

    if not engine.node_rank:  # nodes other than node 0 run no server
        resolve_address(server)
    check_model(engine)
    check_installed(engine)
    if server.otlp_traces_endpoint is not None:
        check_endpoint(server.otlp_traces_endpoint)


def _check_line(*, engine: EngineOptions, server: ServerOptions) -> None:
    """Run the checks of a start. If the model's folder is on another machine, skip its checks."""
    if engine.model.startswith(("/", "./", "~")) and not Path(engine.model).expanduser().exists():
        print(f"note: the folder {engine.model} is not on this machine", file=sys.stderr)
        check(engine=dataclasses.replace(engine, model=next(iter(EMBEDDED))), server=server)
        return
    check(engine=engine, server=server)
    from negamax.engine.core.source import check_start

    check_start(engine)


@add_options(check=_check_line)
def command(*, engine: EngineOptions, server: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM. NEGAMAX_API_KEY may contain API keys."""
    started = time.monotonic()
    log.setup(engine.log_level, engine.log_format)
    if engine.node_rank:
        from negamax.engine.nodes.agent import run_agent

        port = server.node_health_port
        run_agent(engine, health_address=None if port is None else (server.host, port))
    else:
        _serve(engine, server, started=started)


def _serve(engine_options: EngineOptions, server_options: ServerOptions, *, started: float) -> None:
    check(engine=engine_options, server=server_options)
    from negamax.api import server
    from negamax.engine.core.planned_sizes import choose_parallel_sizes
    from negamax.engine.shape import HASH, add_parsers

    engine_options = choose_parallel_sizes(engine_options, one_engine=False)
    listener = server.open_listener(server_options)

    def announce(url: str, engine: AsyncEngine) -> None:
        name = (server_options.served_model_name or (engine.info.served_model_name,))[0]
        seconds = time.monotonic() - started
        shape = add_parsers(engine.info.shape, server_options)[HASH]
        served = f"{name!r} ({engine.info.max_model_len} tokens, {seconds:.1f} s, shape {shape})"
        announce_ready(f"Negamax is ready: {url}/v1 serves {served}; chat page: {url}/")

    try:
        server.run(engine_options, server_options, listener=listener, announce=announce)
    finally:
        listener.close()


def announce_ready(line: str) -> None:
    """Print `line`, or log the line if standard output cannot be written."""
    try:
        print(line, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s): %s", error.strerror, line)
        drop_unwritable()
