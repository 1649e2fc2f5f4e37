"""A rank process that runs into the faults of `tests.row_faults`: `python -m tests.dist.faulty_rank PLANS RESULTS`."""

from __future__ import annotations

import sys

from negamax.worker import rank_process
from tests import row_faults

if __name__ == "__main__":
    row_faults.install(int(sys.argv[1].rpartition("rank")[2]), setattr)
    sys.exit(rank_process.main(sys.argv[1], sys.argv[2]))
