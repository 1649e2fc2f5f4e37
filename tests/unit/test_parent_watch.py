import subprocess
import sys
import time
from pathlib import Path

from negamax.base.shared_numbers import SharedNumbers

HANG_SECONDS = 2.2  # twice the maximum that one check counts
CHILD = """
import sys, time
from negamax.base.supervision import ParentPulse, watch_parent
def tell(reason): print(reason, flush=True)
watch_parent(ParentPulse(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])), report=tell)
time.sleep(120)
"""
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from negamax.base.shared_numbers import SharedNumbers
child, path, hang_seconds = sys.argv[1:]
pulse = SharedNumbers(1, path=Path(path)).row(0)
pulse[0] = time.monotonic()
subprocess.Popen([sys.executable, "-c", child, str(os.getpid()), path, hang_seconds])
for _ in range(25):
    time.sleep(0.1)
    pulse[0] = time.monotonic()
print("went on", pulse[0], flush=True)
while True:
    pass
"""


def test_a_parent_in_an_endless_loop_is_killed_after_the_report(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, str(tmp_path / "pulse"), str(HANG_SECONDS)]
    for _ in range(10):
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        words, last_pulse = parent.stdout.readline().rsplit(" ", 1)
        if words == "went on":  # with heartbeats it keeps running
            break
        with parent:  # on a stalled machine the heartbeats have not ended
            parent.kill()
    assert words == "went on"
    with parent.stdout as output:
        told = output.readline()
        assert told == f"the first server process sends no heartbeat for {HANG_SECONDS:g} s\n"
        assert parent.wait(120) == -9
        # the children have a second to inform their clients
        assert time.monotonic() - float(last_pulse) > HANG_SECONDS + 0.9
        assert output.read() == ""  # the child has ended, too


def test_a_process_that_is_not_the_parent_is_not_killed(tmp_path: Path) -> None:
    SharedNumbers(1, path=tmp_path / "pulse").row(0)[0] = 1.0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        command = [sys.executable, "-c", CHILD, str(stranger.pid), str(tmp_path / "pulse"), "0.2"]
        assert subprocess.run(command, timeout=120, capture_output=True).returncode == 1
        assert stranger.poll() is None
        stranger.kill()


def test_mapping_the_first_row_alone_keeps_the_others(tmp_path: Path) -> None:
    table = SharedNumbers(1, num_rows=3, path=tmp_path / "pulses")
    table.row(2)[0] = 7.0
    first = SharedNumbers(1, path=tmp_path / "pulses")
    table.row(0)[0] = 3.0
    assert first.row(0)[0] == 3.0 and table.row(2)[0] == 7.0
    assert (tmp_path / "pulses").stat().st_size == 3 * 8
