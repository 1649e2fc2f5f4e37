"""Run an engine for `tests.e2e.stub_serve` that starts when the file HELD_ENGINE is deleted."""

import os
import sys
import time
from pathlib import Path

from negamax.engine.core.process import main

if __name__ == "__main__":
    deadline = time.monotonic() + 300  # The limit ends this process if its test was killed.
    while Path(os.environ["HELD_ENGINE"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit(main(sys.argv[1]))
