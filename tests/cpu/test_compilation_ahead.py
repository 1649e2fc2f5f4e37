import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torn_words import reads_torn_words

pytest.importorskip("triton")

MAKEFILE = Path(__file__).parents[2] / "Makefile"
OTHERS = re.findall(r"^(?:OLDEST|NEWEST)_TRITON \?= (.+)", MAKEFILE.read_text(), re.MULTILINE)
# KiB of a multiprocessor's shared memory that one program may use
SHARED_KIB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64, "gfx950": 160}
SAMPLE = "sm_90/430+5"  # every 430th case, from the 5th on: a norm, and experts of prefills
# cases for each of OTHERS: a GEMM, experts, and a norm or a part of attention
SAMPLE_OF_OTHERS = ("sm_90/205+11", "sm_90/205+25")
SWEEP = (  # all cases of the measured platform, and samples for the others
    *("sm_90/4", "sm_90/4+1", "sm_90/4+2", "sm_90/4+3", "gfx942/16+1", "gfx942/16+9"),
    *("sm_80/16", "sm_89/16+2", "sm_100/16+4", "gfx950/16+6"),
)


def compiled(*runs: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), *runs],
        # This value is not Triton's default.
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "0"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0 or '"error"' in done.stdout, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(arch: str, found: list[dict[str, Any]]) -> None:
    kernels = [entry for entry in found if "shared_memory" in entry]
    most = SHARED_KIB[arch] * 1024
    assert kernels
    assert [entry for entry in found if "error" in entry] == []
    assert [entry for entry in kernels if entry["shared_memory"] > most] == []
    # GEMMs and sums must be fused. Rope alone gives the bits of separate operations.
    assert {entry["kernel"] for entry in kernels if not entry["fused"]} <= {"_rope_kernel"}
    # For few tokens each thread loads its own operands, with any version of Triton.
    names = re.compile(r"_small_m_kernel|.*_gemv_kernel")
    few = [entry for entry in kernels if names.fullmatch(entry["kernel"])]
    assert [entry for entry in few if entry["shared_memory"] > 8192] == []
    if arch == "sm_90":  # The tiles were selected for this platform.
        # Programs that select blocks for four queries spill most, but only once per sequence.
        assert [entry for entry in kernels if entry["spilled"] > 224] == []
    assert [entry for entry in kernels if entry["torn"]] == []
    refused = {entry["refused"] for entry in found if "refused" in entry}
    assert all("dequanti" in words or "FP8 KV cache" in words for words in refused)
    assert arch in ("sm_80", "gfx942") or not refused


def folder_of(version: str) -> Path:
    return Path(sys.prefix) / f"triton-{version}"


@pytest.fixture(scope="module")
def sample() -> list[dict[str, Any]]:
    folders = [folder for folder in map(folder_of, OTHERS) if folder.exists()]
    return compiled(
        SAMPLE, *(f"{run}@{folder}" for run, folder in zip(SAMPLE_OF_OTHERS, folders, strict=False))
    )


def test_a_sample_compiles(sample: list[dict[str, Any]]) -> None:
    check("sm_90", [entry for entry in sample if entry["triton"] not in OTHERS])


@pytest.mark.parametrize("version", OTHERS)
def test_oldest_and_the_newest_triton_compile(version: str, sample: list[dict[str, Any]]) -> None:
    if not folder_of(version).exists():
        pytest.skip(f"Triton {version} is not beside this environment: run `make tritons`")
    check("sm_90", [entry for entry in sample if entry["triton"] == version])


@pytest.mark.full
@pytest.mark.parametrize("version", OTHERS)
def test_oldest_and_the_newest_triton_compile_every_op(version: str) -> None:
    """Triton 3.6 refuses `tl.zeros` with a tuple of constants, which Triton 3.8 accepts."""
    check("sm_90", compiled(f"sm_90/ops@{folder_of(version)}"))


@pytest.mark.full
@pytest.mark.parametrize("run", SWEEP)
@pytest.mark.timeout(3600)  # The limit allows for two cores that also do other work.
def test_a_sweep_compiles(run: str) -> None:
    check(run.partition("/")[0], compiled(run))


@pytest.mark.parametrize(
    ("polled", "agreements", "torn"),
    [
        (["64x!tt.ptr<i64>, #words"], 0, True),
        (["64x!tt.ptr<i64>, #words"], 1, False),
        (["1x!tt.ptr<i64>, #words", "64x!tt.ptr<i64>, #words"], 1, True),
        (["1x!tt.ptr<i64>, #words", "64x!tt.ptr<i64>, #words"], 2, False),
        (["1x!tt.ptr<i64>, #words", "256x!tt.ptr<i64>, #words"], 1, False),
        (["256x!tt.ptr<i64>, #other"], 0, True),  # The owner of a word is unknown.
    ],
)
def test_shared_loads_are_agreed(polled: list[str], agreements: int, torn: bool) -> None:
    """Check that a torn poll is found, even beside another load such as that of the abort flag."""
    layout = "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]"
    lines = [f"#words = #ttg.blocked<{{{layout}}}>"]
    lines += [f"%w = tt.load %p, %m {{isVolatile = true}} : tensor<{each}>" for each in polled]
    lines += ['%a = tt.elementwise_inline_asm "bar.red.or.pred any, 0, own;"'] * agreements
    assert reads_torn_words({"ptx": "", "ttgir": "\n".join(lines)}) is torn
    assert not reads_torn_words({"ttgir": "\n".join(lines)})  # The code of an AMD GPU has no PTX.


@pytest.mark.parametrize("world", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 8))])
def test_ranks_never_take_a_word_of_the_call_before(world: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("compile_exchanges.py")), str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({entry["kernel"] for entry in kernels if entry["polls"]}) == 8
    assert [entry for entry in kernels if entry["torn"]] == []
