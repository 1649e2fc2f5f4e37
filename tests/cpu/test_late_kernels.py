"""A ready engine has compiled every specialization that it launches while serving."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("late_kernels.py")
SAMPLE = ("M2", "M3, drafts")
OTHERS = (
    "M2, drafts",
    "M2, eager",
    "M2, n-grams",
    "M2, short window",
    "M3",
    "M3, 4 bits, drafts",
    "M3, FP8 cache, drafts that are drawn",
    "M3, sharded index",
    "M3, shared cache",
)


def watched(*cases: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *cases], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = map(json.loads, done.stdout.splitlines())
    return {entry["case"]: entry for entry in found}


@pytest.fixture(scope="module")
def sample() -> dict[str, dict[str, Any]]:
    return watched(*SAMPLE)


def check(found: dict[str, Any]) -> None:
    assert found["forms"] > 40
    assert found["late"] == []
    assert found["alone"] == []


@pytest.mark.parametrize("case", SAMPLE)
def test_no_kernel_is_compiled_while_an_engine_serves(
    case: str, sample: dict[str, dict[str, Any]]
) -> None:
    check(sample[case])


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS)
def test_so_with_other_options(case: str) -> None:
    check(watched(case)[case])
