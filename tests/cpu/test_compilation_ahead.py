"""What the kernel table chooses compiles for GPUs that are not here, at the sizes of MiniMax-M2, or
is refused in words: a compiler's traceback never reaches a user.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950")
# what a program may have of a multiprocessor's shared memory
SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64, "gfx950": 160}
SAMPLE = 40  # every so manieth case, others for each architecture


def compiled(arch: str, part: str) -> list[dict[str, Any]]:
    """What `compile_kernels.py` says of each kernel and case."""
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), arch, "--part", part],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(arch: str, part: str) -> None:
    found = compiled(arch, part)
    assert [entry for entry in found if "error" in entry] == []
    sizes = {entry["kernel"]: entry["shared_memory"] for entry in found if "kernel" in entry}
    assert sizes and max(sizes.values()) <= SHARED_KIB[arch] * 1024, sizes
    refused = {entry["refused"] for entry in found if "refused" in entry}
    assert all("dequantised" in words or "FP8 KV cache" in words for words in refused)
    assert arch in ("sm_80", "gfx942") or not refused


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_compiles(arch: str) -> None:
    check(arch, f"{5 * ARCHS.index(arch)}/{SAMPLE}")


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
def test_everything_compiles(arch: str) -> None:
    check(arch, "0/1")
