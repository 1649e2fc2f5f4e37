"""The oneDNN linear pads to few row counts, since every count keeps a kernel in memory."""

import subprocess
import sys

import pytest
import torch

from negamax.formats.floats import plain
from negamax.kernels.gemm import cpu

MAX_SIZES = 80
MAX_GROWTH_MIB = 100.0  # measured: 45 MiB; 440 MiB with a kernel per row count

GROWTH = """
import torch
from pathlib import Path
from negamax.formats.floats import plain
from negamax.kernels.gemm import cpu

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

torch.set_num_threads(1)
weight = cpu.pack(plain(torch.ones(512, 64, dtype=torch.bfloat16)))
x = torch.ones(700, 64, dtype=torch.bfloat16)
cpu.linear(x, weight)
before = resident()
for rows in range(1, 701, 2):
    cpu.linear(x[:rows], weight)
print(resident() - before)
"""


def _skip_without(dtype: torch.dtype) -> None:
    if not any(kernel.available() for kernel in cpu.ONEDNN if dtype in kernel.dtypes):
        pytest.skip(f"no oneDNN linear here in {dtype}")


def test_a_tile_is_padded_by_less_than_a_sixteenth_to_one_of_few_sizes() -> None:
    sizes = {rows: cpu.padded_rows(rows) for rows in range(1, cpu.TILE_ROWS + 1)}
    assert all(rows <= size < rows * 1.0625 for rows, size in sizes.items())
    assert len(set(sizes.values())) <= MAX_SIZES and max(sizes.values()) == cpu.TILE_ROWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_and_padding_leave_every_row_as_it_is(dtype: torch.dtype) -> None:
    _skip_without(dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 96, generator=generator).to(dtype)
    weight = cpu.pack(plain(torch.randn(80, 96, generator=generator).to(dtype)))
    alone = torch.cat([cpu.linear(row, weight) for row in x.split(1)])
    for rows in (31, 32, 33, 40, 63, 65, 129, 145, 255, 256, 257, 289, 512, 513, 600):
        out = cpu.linear(x[:rows], weight)
        assert out.shape == (rows, 80) and torch.equal(out, alone[:rows]), rows


def test_many_counts_of_rows_leave_the_process_small() -> None:
    _skip_without(torch.bfloat16)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(done.stdout) < MAX_GROWTH_MIB
