"""The real server in front of the stub engine, on any free port: `python -m tools.load.stub_server`."""

from __future__ import annotations

from negamax.api import server
from negamax.base import log
from negamax.config.options import EngineOptions, ServerOptions


def main() -> None:
    log.setup("warning")
    options = ServerOptions(port=0)
    listener = server.open_listener(options)
    with listener:
        server.run(
            EngineOptions(model="nano", max_queued_requests=4096),
            options,
            listener=listener,
            announce=lambda url, engine: print(f"Negamax is ready: {url}/v1", flush=True),
            engine_module="tools.load.stub_engine",
        )


if __name__ == "__main__":
    main()
