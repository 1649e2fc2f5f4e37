"""`negamax serve` in front of the stub engine, which needs no model and starts in no time: for what
the server does by itself. Another engine is the module that ENGINE_MODULE names.
"""

from __future__ import annotations

import functools
import os
import sys

from negamax.api import server
from negamax.cli.main import main

if __name__ == "__main__":
    engine = os.environ.get("ENGINE_MODULE", "tests.stub_engine")
    server.run = functools.partial(server.run, engine_module=engine)
    sys.exit(main())
