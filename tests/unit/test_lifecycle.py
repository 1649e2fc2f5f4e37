import asyncio
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from negamax.api.http.lifecycle import Lifecycle
from negamax.base.shared_numbers import SharedNumbers


@pytest.mark.parametrize(
    ("seconds", "drain_timeout", "is_cancelled", "expected"),
    [
        (0.2, 120, False, (True, 0, True)),
        (120, 0.1, False, (False, 1, False)),
        (60, 60, True, (True, 0, False)),
    ],
    ids=["waits", "ends at the timeout", "work is cancelled"],
)
def test_draining_waits_for_work_in_the_background(
    seconds: float, drain_timeout: float, is_cancelled: bool, expected: tuple[bool, int, bool]
) -> None:
    done: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(seconds)
        done.append(True)

    async def scene() -> tuple[bool, int]:
        lifecycle = Lifecycle(drain_timeout=drain_timeout)
        task = lifecycle.run_in_background(work())
        assert lifecycle.num_open == 1  # The task counts before its first step.
        lifecycle.begin_drain()
        if is_cancelled:
            task.cancel()
        return await lifecycle.drained(is_idle=lambda: True), lifecycle.num_open

    assert (*asyncio.run(scene()), bool(done)) == expected


PROGRAM = """
import asyncio, os, sys
from negamax.api.http.lifecycle import Signals

async def main():
    signals, end = Signals(), asyncio.Event()
    async def abort(): pass
    def drain(): print("drain", flush=True); end.set()
    with signals.watched():
        signals.hand_over(drain=drain, abort=abort, reload=lambda: print("reload", flush=True))
        print("ready", flush=True)
        await asyncio.wait_for(end.wait(), 120)

if sys.argv[1]:
    os.open(sys.argv[1], os.O_RDWR)
asyncio.run(main())
"""


@pytest.mark.parametrize("is_in_terminal", [True, False])
def test_a_hangup_reloads_and_ends_only_when_the_terminal_is_gone(is_in_terminal: bool) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, os.ttyname(terminal) if is_in_terminal else ""]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "reload\n"
        os.close(terminal)
        os.close(controller)
        if is_in_terminal:
            assert process.stdout.readline() == "drain\n"
            assert process.wait(120) == 0
        else:
            time.sleep(0.2)
            assert process.poll() is None
            process.kill()


def test_a_loop_that_never_runs_has_written_a_heartbeat() -> None:
    async def show() -> float:
        pulses = SharedNumbers(1)
        pulse = Lifecycle(drain_timeout=1, pulses=pulses).start_pulse()
        shown = pulses.row(0)[0]  # The event loop has not run a turn since the pulse started.
        pulse.cancel()
        return shown

    assert asyncio.run(show()) > 0
