import gc
import subprocess
import sys

import pytest

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
