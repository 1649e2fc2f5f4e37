"""One tensor-parallel rank as a process: `python -m negamax.worker.rank_process ADDRESS`.

Frames from the executor: a WorkerConfig first, then StepPlans, an empty frame to stop. Frames to it: a WorkerReady or a
RankFailed, then (rank 0 only) one StepResult per plan.
"""

from __future__ import annotations

import sys

import msgspec
import zmq

from negamax.base import log
from negamax.base.errors import NegamaxError
from negamax.base.process import exit_with_parent
from negamax.scheduler.step import StepPlan
from negamax.worker.config import WorkerConfig, WorkerReady


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    ready: WorkerReady


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    exit_code: int


RankReport = RankReady | RankFailed


def main(address: str) -> int:
    """Serve one executor until it says stop; the exit code of the process."""
    exit_with_parent()
    log.setup()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 1000
        socket.connect(address)
        config = msgspec.msgpack.decode(socket.recv(), type=WorkerConfig)
        try:
            from negamax.worker.worker import Worker  # torch: seconds of import, after the connection stands

            worker = Worker(config)
        except NegamaxError as error:
            socket.send(msgspec.msgpack.encode(RankFailed(str(error), error.exit_code)))
            return error.exit_code
        socket.send(msgspec.msgpack.encode(RankReady(worker.ready)))
        plans = msgspec.msgpack.Decoder(StepPlan)
        while frame := socket.recv():
            result = worker.execute(plans.decode(frame))
            if config.layout.rank == 0:
                socket.send(msgspec.msgpack.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
