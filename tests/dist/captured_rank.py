"""A rank with captured steps, for `python -m`; it exits with code 3 if it replays none."""

import sys

import pytest

from negamax.worker import rank_process
from tests.cpu import graph_support

if __name__ == "__main__":
    endpoint, rank = sys.argv[1:]
    pool, patch = graph_support.RepeatedSteps(), pytest.MonkeyPatch()
    graph_support.install(patch, graph_support.runtime(pool, is_asynchronous=True))
    graph_support.watch_reads(patch)
    code = rank_process.main(endpoint, int(rank))
    sys.exit(code if pool.num_replays else 3)
