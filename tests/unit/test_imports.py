"""What a process imports at its start, and what that costs."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from negamax.base.imports import large_imports


def test_large_imports_are_no_garbage_to_look_for() -> None:
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
from negamax.config.options import EngineOptions
from negamax.engine.core.setup import start_loop
loop, info = start_loop(EngineOptions(model="nano", script="agents", device="cpu"))
loop.shutdown()
assert info.device == "script"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
