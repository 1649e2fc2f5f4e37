"""Run an engine (FOLDER) whose rank 1 (ENDPOINT RANK) dies once while expert weights move.

Rank 1 dies if the file KILLED_IN_MOVE is empty, and writes the time in seconds into it.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from negamax.base import supervision
from negamax.engine.core.process import main
from negamax.worker import rank_process
from negamax.worker.expert_weights import MovableExperts

MODULE = "tests.dist.killed_in_move"


def die_in_move(mark: Path) -> None:
    """Kill this rank when the expert to send is in its buffer and the other rank waits for it."""
    move = MovableExperts._move

    def killed(self: MovableExperts, *args: Any) -> None:
        if not mark.read_text():

            def die(**_: Any) -> None:
                mark.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

            self._group.exchange = die  # type: ignore[method-assign]
        move(self, *args)

    MovableExperts._move = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        spawn = supervision.spawn

        @functools.wraps(spawn)
        def spawn_these(module: str, *args: str, **options: Any) -> Any:
            is_rank = module == "negamax.worker.rank_process"
            return spawn(MODULE if is_rank else module, *args, **options)

        supervision.spawn = spawn_these
        sys.exit(main(sys.argv[1]))
    if sys.argv[2] == "1":
        die_in_move(Path(os.environ["KILLED_IN_MOVE"]))
    sys.exit(rank_process.main(sys.argv[1], int(sys.argv[2])))
