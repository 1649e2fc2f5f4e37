from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_contract import cases, check, contract_id, contracts
from torch import Tensor
from triton_support import MI300X

from negamax.formats.platform import Platform
from negamax.kernels import platform
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.launch.tile import Tile
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.moe import tiles as moe_tiles
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize import op as quantize_spec
from negamax.kernels.quantize import triton as quantize
from negamax.kernels.registry import gpu_kernels
from negamax.kernels.sampling import tiles as sampling_tiles

KERNELS = tuple(kernel for kernel in gpu_kernels() if kernel.provider != "reference")
STEP = 5  # The gate runs every 5th case of the first dtype on an H200, and every 15th of others.


def contract(here: Platform, kernel: AnyKernel, dtype: torch.dtype, step: int) -> Any:
    name = f"{contract_id(kernel, dtype)}-{here.arch}{'-sample' if step > 1 else ''}"
    marks = () if step > 1 else pytest.mark.full
    return pytest.param(here, kernel, dtype, step, id=name, marks=marks)


def is_first(kernel: AnyKernel, dtype: torch.dtype) -> bool:
    return dtype is (torch.bfloat16 if torch.bfloat16 in kernel.dtypes else kernel.dtypes[0])


FIRST = [(platform.CPU, *found) for found in contracts(KERNELS) if is_first(*found)]
OTHERS = [  # `platform.CPU` uses the tiles of an H200.
    *((platform.CPU, *found) for found in contracts(KERNELS) if not is_first(*found)),
    *((MI300X, *found[1:]) for found in FIRST if found[1].requires <= MI300X.features),
]
CONTRACTS = [
    *(contract(*found, STEP) for found in FIRST),
    *(contract(*found, 3 * STEP) for found in OTHERS),
    *(contract(*found, 1) for found in (*FIRST, *OTHERS)),
]


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_tiles, "SMALL_M_MAX_M", 24)
    few_programs = moe_tiles.ExpertTiles(
        Tile(1, 64, 256, num_warps=4), Tile(1, 64, 128, num_warps=4), choices=2
    )
    for table in (moe_tiles.MoeTiles, moe_tiles.H200MoeTiles):
        monkeypatch.setattr(table, "gemv_max_m", lambda self, width: 4)
        monkeypatch.setattr(table, "gemv", lambda self, width, hidden: few_programs)
    monkeypatch.setattr(
        sampling_tiles, "tiles_for", lambda device: sampling_tiles.SamplingTiles(strip_block=128)
    )
    monkeypatch.setattr(sampling_tiles, "strip", lambda vocab: 8)
    launch_options.cache_clear()
    yield
    launch_options.cache_clear()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that unwritten values and wrong reads show."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            fresh = make(*args, **options)
            fresh.view(torch.uint8).fill_(255)
            return fresh

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.mark.parametrize(("here", "kernel", "dtype", "step"), CONTRACTS)
def test_kernel_computes_its_op(
    here: Platform,
    kernel: AnyKernel,
    dtype: torch.dtype,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "platform_of", lambda device: here)
    # Quantize activations in the FP8 format of `here`.
    monkeypatch.setattr(quantize_spec, "quantize_activations", quantize.quantize)
    found = cases(kernel, dtype, first=step // 2, step=step)
    assert found
    for case in found:
        if here is MI300X and kernel.op == LINEAR:  # The result is exact in that format.
            case.tensors["x"].masked_fill_(case.tensors["x"] == 7.0, 7.5)
        check(kernel, case, dtype)
