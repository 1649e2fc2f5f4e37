import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from negamax.base import private_folder
from negamax.base.errors import ResourceError
from negamax.base.private_folder import PrivateFolder


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
