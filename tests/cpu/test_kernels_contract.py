from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_contract import cases, check, contract_id, contracts

from negamax.formats.platform import CPU
from negamax.kernels.op import Kernel
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
