"""Run `negamax serve` with the stub engine, or with the engine module in ENGINE_MODULE."""

import functools
import os
import sys

from negamax.api import server
from negamax.cli.main import main

if __name__ == "__main__":
    engine = os.environ.get("ENGINE_MODULE", "tests.stub_engine")
    server.run = functools.partial(server.run, engine_module=engine)
    sys.exit(main())
