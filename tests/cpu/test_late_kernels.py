import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("late_kernels.py")
OTHERS = (
    "M2", "M2, drafts", "M2, eager", "M2, n-grams", "M2, short window", "M3", "M3, 4 bits, drafts",
    "M3, FP8 cache, drafts that are drawn", "M3, sharded index", "M3, shared cache",
    "M3.1, block drafts",
)  # fmt: skip


@pytest.mark.parametrize(
    "case", ["M3, drafts", *(pytest.param(case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_no_kernel_is_compiled_while_an_engine_serves(case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), case], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["forms"] > 40
    assert found["late"] == []
    assert found["alone"] == []
