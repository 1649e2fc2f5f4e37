import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("late_kernels.py")
OTHERS = (
    "M2", "M2, drafts", "M2, eager", "M2, n-grams", "M2, short window", "M3", "M3, eager",
    "M3, 4 bits, drafts", "M3, FP8 cache, drafts that are drawn", "M3, sharded index",
    "M3, shared cache", "M3.1, block drafts",
)  # fmt: skip


ON_AMD = (
    ("gfx942", "M2"), ("gfx942", "M2, eager"), ("gfx942", "M3, 4 bits, drafts"),
    ("gfx950", "M2, drafts"), ("gfx950", "M3.1, block drafts"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "case"), [("sm_90", "M3, drafts"), *(("sm_90", case) for case in OTHERS), *ON_AMD]
)
def test_no_kernel_is_compiled_while_an_engine_serves(arch: str, case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), arch, case], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["forms"] > 40
    assert found["late"] == []
    assert found["alone"] == []
