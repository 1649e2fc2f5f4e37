"""Run the real server with a stub engine on a free port: `python -m tests.stub_server`."""

import argparse

from negamax.api import server
from negamax.base import log
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", help="whose tokenizer and template are used")
    parser.add_argument("--served-model-name")
    parser.add_argument("--engine-module", default="tests.stub_engine")
    parser.add_argument("--parser", default="auto", help="for tool calls and reasoning")
    parser.add_argument("--api-server-count", type=int, default=1)
    args = parser.parse_args()
    log.setup("warning")
    names = () if args.served_model_name is None else (args.served_model_name,)
    options = ServerOptions(
        port=0, api_server_count=args.api_server_count, served_model_name=names,
        tool_call_parser=args.parser, reasoning_parser=args.parser,
    )  # fmt: skip
    listener = server.open_listener(options)
    with listener:
        server.run(
            EngineOptions(model=args.model, max_queued_requests=4096),
            options,
            listener=listener,
            announce=lambda url, engine: print(f"Negamax is ready: {url}/v1", flush=True),
            engine_module=args.engine_module,
        )


if __name__ == "__main__":
    main()
