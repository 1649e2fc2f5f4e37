import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_contract import cases, check, contract_id, contracts
from triton_support import MI300X

from negamax.formats.floats import E4M3_BLOCKS, e4m3_blocks, plain
from negamax.formats.platform import CPU
from negamax.kernels import platform
from negamax.kernels.attention.metadata import PagedShape, attention_metadata
from negamax.kernels.attention.op import DECODE
from negamax.kernels.gemm import cpu
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.native import library
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.op import Kernel
from negamax.kernels.quantize.native import to_native
from negamax.kernels.quantize.op import QUANTIZE
from negamax.kernels.registry import KERNELS, OPS, resolve
from tests.kernel_cases import CASES


def contract(kernel: Kernel, dtype: torch.dtype) -> Any:
    """Return a test parameter; the gate runs a definition in bfloat16 only.

    Definitions in other dtypes differ from fp32 by rounding alone.
    """
    is_full = kernel.provider == "reference" and dtype is not torch.bfloat16
    return pytest.param(
        kernel, dtype, id=contract_id(kernel, dtype), marks=[pytest.mark.full] * is_full
    )


@pytest.mark.parametrize(("kernel", "dtype"), [contract(*each) for each in contracts(KERNELS)])
def test_kernel_computes_its_op(kernel: Kernel, dtype: torch.dtype) -> None:
    if kernel.provider.endswith("onednn") and not kernel.available():
        pytest.skip(f"no oneDNN linear here in {dtype}")
    assert kernel.available()
    found = cases(kernel, dtype)
    assert len(found) >= 3
    for case in found:
        check(kernel, case, dtype)


@pytest.mark.parametrize("name", sorted(OPS))
def test_cost_counts_bytes_and_flops(name: str) -> None:
    op = OPS[name]
    costs = [CASES[op].cost(case) for case in cases(op.reference, torch.bfloat16)]
    assert all(cost.num_bytes >= 0 and cost.flops >= 0 for cost in costs)
    assert max(cost.num_bytes for cost in costs) > 0


def test_table_holds_every_op_by_preference_and_ends_with_the_reference() -> None:
    table = resolve(platform=CPU, dtype=torch.float32)
    text = table.describe()
    for name in OPS:
        assert table[name].op == name
        assert name in text
    assert "bucketed" in text
    table = resolve(platform=replace(CPU, features=frozenset()), dtype=torch.float32)
    assert {kernel.provider for found in table.candidates.values() for kernel in found} == {
        "reference"
    }
    table = resolve(platform=CPU, dtype=torch.bfloat16)
    for name in OPS:
        found = table.candidates[name]
        assert found[-1].provider == "reference"
        assert table[name] is found[0]


BF16 = torch.bfloat16
TABLE = resolve(platform=MI300X, dtype=BF16)
FNUZ = torch.float8_e4m3fnuz


def test_whatever_has_a_kernel_on_nvidia_has_one_on_amd() -> None:
    nvidia = resolve(platform=platform.nvidia((9, 0), name="H200"), dtype=BF16)
    for name in OPS:
        assert (TABLE[name].provider == "reference") == (nvidia[name].provider == "reference"), name
        assert TABLE[name].requires <= MI300X.features or TABLE[name].provider == "reference"
    assert TABLE.reads_stored(E4M3_BLOCKS)


@pytest.fixture
def on_mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform_of", lambda device: MI300X)


@pytest.mark.usefixtures("on_mi300x")
def test_stored_values_are_the_same_numbers_in_the_form_of_mi300() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    found, scale = to_native(values, torch.tensor([[3.0]]))
    assert found.dtype is FNUZ and scale.item() == 6.0
    want, got = values.float() * 3.0, found.float() * scale
    assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.usefixtures("on_mi300x")
def test_all_values_in_fp8_have_the_form_of_mi300() -> None:
    values = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn)
    stored = e4m3_blocks(values, torch.ones(1, 2, 1))
    linear, experts = (TABLE.choose(name, E4M3_BLOCKS) for name in (LINEAR, EXPERTS))
    assert linear is not None and experts is not None
    assert linear.prepare(e4m3_blocks(values[0], torch.ones(2, 1))).weight.dtype is FNUZ
    prepared = experts.prepare(stored, e4m3_blocks(values[:, :128], torch.ones(1, 1, 1)))
    assert prepared.gate_up.dtype is FNUZ and prepared.down.dtype is FNUZ
    x = torch.ones(1, 256, dtype=BF16)
    norm = TABLE[ADD_RMS].prepare(x[0], 1e-6, quantize=True)
    queries = attention_metadata(torch.tensor([[0]]), [1], [1])
    shape = PagedShape(kv_heads=1, group=2, block_size=16, quantize=True)
    plan = TABLE[DECODE].prepare(queries, shape)
    cache = torch.ones(1, 1, 16, 128, dtype=BF16)
    for made in (
        TABLE[QUANTIZE].run(x),
        TABLE[ADD_RMS].run(x, x.clone(), norm),
        TABLE[DECODE].run(x.view(1, 2, 128), KvCache(cache, cache), plan),
    ):
        assert made.q.dtype is FNUZ and made.q.float().abs().amax() == 240.0


ASK = """
from negamax import LLM, SamplingParams
with LLM("nano", dtype="bfloat16", num_threads=1, max_model_len=512) as llm:
    table = llm._loop.executor._worker.runner.kernels
    print({table[op].provider for op in table.candidates})
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    print(llm.chat(question, SamplingParams(temperature=0))[0].outputs[0].message.content)
"""


LOAD = "from negamax.kernels.native import library; print(library.load() is not None)"


def ask(code: str = ASK, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return result.stdout


def test_library_is_not_needed(tmp_path: Path) -> None:
    assert ask(LOAD, CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path)) == "False\n"


@pytest.mark.full
def test_answer_is_the_same_without_a_compiler(tmp_path: Path) -> None:
    output = ask(CC="false", XDG_CACHE_HOME=str(tmp_path))
    assert "native" not in output
    assert "bucketed" in output
    assert "85" in output


def test_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    output = ask(XDG_CACHE_HOME=str(tmp_path))
    assert "native" in output and "85" in output
    (compiled,) = (tmp_path / "negamax" / "native").iterdir()
    stamp = compiled.stat().st_mtime_ns
    assert ask(LOAD, XDG_CACHE_HOME=str(tmp_path)) == "True\n"
    assert compiled.stat().st_mtime_ns == stamp


def test_logs_the_compilers_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "disk is full" >&2; exit 3; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    monkeypatch.setattr(library.logger, "warning", lambda text, *values: said.append(text % values))
    assert library.load.__wrapped__() is None
    assert said[0].endswith(f"{compiler} ended with exit code 3: disk is full")


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
