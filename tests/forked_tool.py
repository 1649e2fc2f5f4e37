"""Run a tool whose servers are forked: `python -m tests.forked_tool MODULE ARGUMENTS`."""

import importlib
import sys

from tests import forked_children
from tools.load import server

if __name__ == "__main__":
    server.start = forked_children.start
    del sys.argv[0]
    sys.exit(importlib.import_module(sys.argv[0]).main())
