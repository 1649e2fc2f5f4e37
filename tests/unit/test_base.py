import gc
import math
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from negamax.base import env, private_folder
from negamax.base.errors import ResourceError
from negamax.base.imports import large_imports
from negamax.base.private_folder import PrivateFolder
from negamax.base.shared_numbers import SharedNumbers
from negamax.base.supervision import RestartPolicy, SupervisionLimits


def test_large_imports_are_excluded_from_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        kept = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
    with pytest.raises(ImportError), large_imports():
        raise ImportError
    assert gc.isenabled()


def test_script_on_the_cpu_starts_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from negamax.options.engine import EngineOptions
from negamax.engine.core.setup import start_loop
loop, info = start_loop(EngineOptions(model="nano", script="agents", device="cpu"))
loop.shutdown()
assert info.device == "script"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_during_import_prints_nothing() -> None:
    code = """
import sys
from negamax.__main__ import main
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "negamax.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
        ({"cpu.max": "nonsense"}, math.inf),
    ],
)
def test_container_quota_is_read(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert env._cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (math.inf, None)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int | None) -> None:
    unbounded = env.usable_cores()
    monkeypatch.setattr(env, "_cpu_quota", lambda folder: quota)
    assert env.usable_cores() == (unbounded if cores is None else cores)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_only_this_user_can_enter_and_it_is_removed(temporary: Path) -> None:
    folder = PrivateFolder()
    assert Path(folder.path).parent == temporary
    assert stat.S_IMODE(Path(folder.path).stat().st_mode) == 0o700
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_skips_a_folder_with_a_long_path(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = PrivateFolder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.path}/requests-63")
    folder.remove()
    monkeypatch.setattr(private_folder, "_MOST_BYTES", 30)
    words = r"sockets in the folder need a path of at most \d+ bytes \(set TMPDIR to a folder"
    with pytest.raises(ResourceError, match=words):
        PrivateFolder()


def test_abandoned_folders_are_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = "import os; from negamax.base.private_folder import PrivateFolder"
    command = [sys.executable, "-c", f"{load}; print(PrivateFolder().path, flush=True); os.abort()"]
    done = subprocess.run(command, env={"TMPDIR": str(temporary)}, capture_output=True, text=True)
    abandoned, foreign = Path(done.stdout.strip()), temporary / "negamax-notes"
    foreign.mkdir()
    used = PrivateFolder()
    assert abandoned.is_dir()  # A young folder stays, since its owner may be about to lock it.
    monkeypatch.setattr(private_folder, "_SECONDS_TO_LOCK", -1.0)
    PrivateFolder().remove()
    assert not abandoned.exists()
    assert foreign.exists() and Path(used.path).exists()
    used.remove()


HANG_SECONDS = 2.2  # twice the longest gap that one check counts
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
        if words == "went on":  # The child lets a parent run that sends heartbeats.
            break
        with parent:  # On a stalled machine the child reports too early, so try again.
            parent.kill()
    assert words == "went on"
    with parent.stdout as output:
        told = output.readline()
        assert told == f"the first server process sends no heartbeat for {HANG_SECONDS:g} s\n"
        assert parent.wait(120) == -9
        # The children have one more second to inform their clients.
        assert time.monotonic() - float(last_pulse) > HANG_SECONDS + 0.9
        assert output.read() == ""  # The child has ended, too.


def test_a_process_that_is_not_the_parent_is_not_killed(tmp_path: Path) -> None:
    SharedNumbers(1, path=tmp_path / "pulse").row(0)[0] = 1.0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        command = [sys.executable, "-c", CHILD, str(stranger.pid), str(tmp_path / "pulse"), "0.2"]
        assert subprocess.run(command, timeout=120, capture_output=True).returncode == 1
        assert stranger.poll() is None
        stranger.kill()


def test_a_child_ends_with_a_parent_that_leaves_bytes_unread() -> None:
    ours, childs = socket.socketpair()  # If bytes are unread, Linux resets the connection.
    code = "import time; from negamax.base import supervision as s; s.exit_with_parent(); "
    command = [sys.executable, "-c", code + "time.sleep(120)"]
    with ours, childs:
        childs.sendall(b"unread")
        child = subprocess.Popen(command, stdin=childs, stderr=-1, text=True)
    assert (child.communicate(timeout=100)[1], child.returncode) == ("", 1)


def test_mapping_the_first_row_alone_keeps_the_others(tmp_path: Path) -> None:
    table = SharedNumbers(1, num_rows=3, path=tmp_path / "pulses")
    table.row(2)[0] = 7.0
    first = SharedNumbers(1, path=tmp_path / "pulses")
    table.row(0)[0] = 3.0
    assert first.row(0)[0] == 3.0 and table.row(2)[0] == 7.0
    assert (tmp_path / "pulses").stat().st_size == 3 * 8


def test_processes_share_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    mine = SharedNumbers(3, num_rows=2, path=path)
    mine.row(0)[2] = 5.0
    write = (
        "import sys; from pathlib import Path; from negamax.base import shared_numbers\n"
        "theirs = shared_numbers.SharedNumbers(3, num_rows=2, path=Path(sys.argv[1]))\n"
        "assert theirs.total(2) == 5.0; theirs.row(1)[2] += 2**53 - 10\n"
    )
    subprocess.run([sys.executable, "-c", write, str(path)], check=True)
    assert mine.total(2) == 2**53 - 5
    mine.row(0, start=1, count=1)[0] = 7.0  # Writing to a slice changes the row itself.
    assert list(mine.row(0)) == [0.0, 7.0, 5.0]


def test_only_the_row_of_a_dead_process_is_cleared(tmp_path: Path) -> None:
    numbers = SharedNumbers(3, num_rows=3)
    for index in range(3):
        numbers.row(index)[:] = [1.0, 2.0, 3.0]
    numbers.clear(1, num_columns=2)
    assert [numbers.total(column) for column in range(3)] == [2.0, 4.0, 9.0]
    numbers.clear(1)
    assert list(numbers.row(1)) == [0.0, 0.0, 0.0]
    assert [numbers.total(column) for column in range(3)] == [2.0, 4.0, 6.0]


def test_first_restart_is_immediate_and_later_ones_back_off() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=8, restart_window=600.0))
    assert [policy.note_death(float(second)) for second in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert policy.note_death(8.0) is None


def test_deaths_are_forgotten_after_the_window() -> None:
    policy = RestartPolicy(SupervisionLimits(max_restarts=1, restart_window=600.0))
    assert policy.note_death(0.0) == 0.0
    assert policy.note_death(600.0) == 0.0
    assert policy.note_death(1199.0) is None
    assert RestartPolicy(SupervisionLimits(max_restarts=0)).note_death(0.0) is None


def test_children_without_secrets_have_no_service_key(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NEGAMAX_NODE_KEY", "https_proxy", "DB_URL"}
    for name in (*secrets, "LC_ALL"):
        monkeypatch.setenv(name, "C")
    found = env.make_child_env(has_secrets=False, ADDED="1")
    assert not found.keys() & secrets and found.keys() >= {"ADDED", "LC_ALL", "PATH"}
    assert env.make_child_env().keys() >= secrets
