"""One rank as a process: `python -m negamax.worker.rank_process ENDPOINT RANK`.

Frames from the executor's socket at ENDPOINT: a WorkerConfig, which names all other addresses, then
StepPlans (each with its GrammarBitmask behind it, where it has grammar rows) and DebugCommands, all
behind one byte that tells which, and an empty frame to stop; back come a WorkerReady or a
RankFailed, then one DebugResult per command. The socket of the results carries one StepResult per
plan, from the first of the ranks that run it: a thread of its own waits for the device, so that the
next plan is launched meanwhile. Another thread writes the time into the rank's row of the file of
beats (`worker.heartbeat`).
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import zmq

from negamax.base import env, log
from negamax.base.crash_dump import CrashDumps
from negamax.base.errors import EngineDeadError, NegamaxError
from negamax.base.imports import large_imports
from negamax.base.log import get_logger
from negamax.base.process import exit_now, exit_with_parent
from negamax.base.shared_numbers import SharedNumbers
from negamax.scheduler import crash_details
from negamax.scheduler.step import GrammarBitmask, RowFailures, StepPlan, StepResult
from negamax.worker.config import DebugCommand, WorkerReady, decode_config
from negamax.worker.heartbeat import LOST_SECONDS, RankHeartbeat
from negamax.worker.node_sockets import connect

if TYPE_CHECKING:
    from negamax.worker.step_output import StepOutput

logger = get_logger(__name__)

RESULT, ROW_FAILURES = b"r", b"f"  # first byte of a frame of the results
PLAN, BITMASK, DEBUG_COMMAND = b"s", b"m", b"p"  # first byte of a frame
IDLE_MILLISECONDS = 100  # without a plan
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks exchange through plain peer memory; NVLink multicast, which the libraries would set up by
# themselves, is not used. The executor watches the ranks, so PyTorch's own watch of them, which
# calls an orderly end an alarm, is off.
ENVIRONMENT = (
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_NCCL_ENABLE_MONITORING", "0"),
)


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    ready: WorkerReady


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    exit_code: int


RankReport = RankReady | RankFailed


class _Stopped(BaseException):
    """Told to stop in the middle of a step."""


def main(endpoint: str, rank: int) -> int:
    """Serve the executor at `endpoint` until it says stop; the exit code of the process."""
    exit_with_parent()
    log.setup_as_parent()
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
        context.socket(zmq.PUSH) as reports,  # of ranks that send no results
    ):
        socket.linger = reports.linger = 1000
        connect(socket, endpoint)
        config = decode_config(socket.recv())
        addresses, layout = config.addresses, config.layout
        assert addresses is not None
        results, reports_results = addresses.results[layout.dp_rank], layout.reports_results
        connect(reports, results)
        beats = SharedNumbers(1, num_rows=layout.world_size + 1, path=Path(addresses.beats))
        heartbeat = RankHeartbeat(beats, rank)
        # What gloo and NCCL listen on takes messages without a key: nobody beyond the machines of
        # the ranks may reach it.
        interface = addresses.interface or LOOPBACK
        env.set_default("GLOO_SOCKET_IFNAME", interface)
        env.set_default("NCCL_SOCKET_IFNAME", f"={interface}")
        if addresses.interface is not None:  # its store warns of addresses that have no name
            env.set_default("TORCH_CPP_LOG_LEVEL", "ERROR")
        for name, value in ENVIRONMENT:
            env.set_default(name, value)
        part = f"rank-{rank}"
        dumps = CrashDumps(config.crash_dump_dir, part=part, options=dataclasses.asdict(config))
        try:
            # torch: seconds of import, after the connection stands
            with large_imports():
                from negamax.worker.worker import Worker

            worker = Worker(config)
            heartbeat.watch(worker.poll_control)
        except NegamaxError as error:
            socket.send(msgspec.msgpack.encode(RankFailed(str(error), error.exit_code)))
            # the executor ends all ranks; one that went before would be an error to the others
            socket.recv()
            return error.exit_code
        # what the start left behind lives as long as the process: later collections need not visit
        # it
        gc.freeze()
        socket.send(msgspec.msgpack.encode(RankReady(worker.ready)))
        outcomes: SimpleQueue[StepOutput | StepResult | None] = SimpleQueue()
        sending = (outcomes, context, results, dumps, heartbeat)
        sender = threading.Thread(target=_send_results, args=sending, name="results")
        if reports_results:
            sender.start()
        plans, commands = msgspec.msgpack.Decoder(StepPlan), msgspec.msgpack.Decoder(DebugCommand)
        bitmasks = msgspec.msgpack.Decoder(GrammarBitmask)

        def next_bitmask() -> GrammarBitmask:
            frame = socket.recv()
            if frame[:1] != BITMASK:
                raise _Stopped
            return bitmasks.decode(frame[1:])

        plan: StepPlan | None = None
        try:
            while True:
                if not socket.poll(IDLE_MILLISECONDS):
                    worker.idle()
                frame = socket.recv()
                if not frame:
                    break
                if frame[:1] == PLAN:
                    plan = plans.decode(frame[1:])
                    outcome = worker.launch(plan, next_bitmask)
                    failures = worker.take_row_failures()
                    if reports_results:
                        outcomes.put(outcome)
                    elif failures:
                        reports.send(
                            ROW_FAILURES
                            + msgspec.msgpack.encode(RowFailures(plan.step_id, failures))
                        )
                else:
                    socket.send(
                        msgspec.msgpack.encode(worker.run_debug_command(commands.decode(frame[1:])))
                    )
        except _Stopped:
            pass
        except EngineDeadError as error:
            logger.error("rank %d cannot go on: %s", rank, error)
            time.sleep(LOST_SECONDS)
            return 1
        except Exception as error:
            last = [crash_details.of_plan(plan)] if plan else []
            dumps.write("the rank failed", details=lambda: {"last_plans": last}, error=error)
            raise
        finally:  # a rank that fails must end, and not wait for its own thread
            outcomes.put(None)
            # (what another rank was to send may never come)
            while reports_results and sender.is_alive() and not heartbeat.is_aborted:
                sender.join(0.1)
        if heartbeat.is_aborted:
            exit_now(1)  # the groups are not left in order: a rank is missing
        worker.close()
    return 0


def _send_results(
    outcomes: SimpleQueue[StepOutput | StepResult | None],
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    dumps: CrashDumps,
    heartbeat: RankHeartbeat,
) -> None:
    """Wait for one outcome after another and send what came of it, until None."""
    encoder = msgspec.msgpack.Encoder()
    with context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        connect(socket, address)
        while (outcome := outcomes.get()) is not None:
            try:
                result = outcome if isinstance(outcome, StepResult) else outcome.result()
            except Exception as error:
                logger.exception("a step failed on the device")
                dumps.write("a step failed on the device", details=dict, error=error)
                exit_now(1)
            if not heartbeat.is_aborted:
                socket.send(RESULT + encoder.encode(result))


if __name__ == "__main__":
    exit_now(main(sys.argv[1], int(sys.argv[2])))
