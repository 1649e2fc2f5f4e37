import gc
import math
import subprocess
import sys
from pathlib import Path

import pytest

from negamax.base import env
from negamax.base.imports import large_imports


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
