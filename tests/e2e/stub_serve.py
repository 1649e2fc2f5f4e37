"""`negamax serve` in front of the stub engine, which needs no model and starts in no time: for what
the server does by itself.
"""

from __future__ import annotations

import functools
import sys

from negamax.api import server
from negamax.cli.main import main

if __name__ == "__main__":
    server.run = functools.partial(server.run, engine_module="tools.load.stub_engine")
    sys.exit(main())
