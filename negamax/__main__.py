"""`python -m negamax` is the `negamax` command."""

from __future__ import annotations

import sys

from negamax.cli.main import main

sys.exit(main())
