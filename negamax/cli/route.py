"""`negamax route URL...`: one address in front of several servers."""

from __future__ import annotations

import typer

from negamax.base import log
from negamax.base.imports import large_imports
from negamax.cli.options import add_options
from negamax.cli.serve import announce_ready
from negamax.options.route import RouteOptions, list_servers

HELP = """Route requests to one of several servers.

The router sends a request to the server that has received the longest prefix of its prompt before.
With --kv-event-source, it sends the request to the server whose caches contain the longest prefix.
If this server is too busy, the least busy server gets the request. A server that does not answer
gets no requests. If a server fails before it begins to answer a request, another server gets the
request. For prefill/decode pairs, use --prefill and --decode.
"""


@add_options()
def command(
    *,
    urls: list[str] | None = typer.Argument(
        None, metavar="URL...", help="The addresses of the servers.", show_default=False
    ),
    route: RouteOptions,
) -> None:
    """Route until SIGINT or SIGTERM."""
    log.setup(route.log_level)
    servers, prefillers = list_servers(tuple(urls or ()), route)
    with large_imports():
        from negamax.api.router.run import open_router_socket, serve_router
        from negamax.api.server import make_event_loop
    with open_router_socket(route) as listener, make_event_loop() as runner:
        num_servers = len(servers) + len(prefillers)

        def announce(url: str, num_up: int) -> None:
            announce_ready(f"Negamax is ready: {url}/v1 has {num_up} of {num_servers} servers")

        runner.run(serve_router(servers, prefillers, route, listener=listener, announce=announce))
