"""Compiles what the kernel table launches on a GPU that is not here, at the sizes of MiniMax-M2:
`python tests/cpu/compile_kernels.py gfx942 [--part I/N]`. One JSON object per kernel on standard
output.

The ops' own full-size cases are applied to tensors without memory (PyTorch's "meta" device), so the
code that chooses tiles and launches runs as on the GPU; a launch only compiles. Compiled is as far
as what Triton carries goes without a GPU: PTX through ptxas, or AMD's code object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from negamax.base.errors import ConfigError
from negamax.kernels import platform as platforms
from negamax.kernels.op import Case

if "gfx" in sys.argv[1]:
    sys.modules["triton.language.extra.cuda"] = None  # type: ignore[assignment]  # as on ROCm

KIB = 1024
PLATFORMS = {
    found.arch: found
    for found in (
        platforms.nvidia((8, 0), name="A100", multiprocessors=108, shared_memory=164 * KIB),
        platforms.nvidia((8, 9), name="L40S", multiprocessors=142, shared_memory=100 * KIB),
        platforms.nvidia((9, 0), name="H200", multiprocessors=132, shared_memory=228 * KIB),
        platforms.nvidia((10, 0), name="B200", multiprocessors=148, shared_memory=228 * KIB),
        platforms.amd("gfx942", name="MI300X", multiprocessors=304, shared_memory=64 * KIB),
        platforms.amd("gfx950", name="MI355X", multiprocessors=256, shared_memory=160 * KIB),
    )
}
META = torch.device("meta")
FP8 = torch.float8_e4m3fn
FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros")


class Driver:
    """What Triton's compiler asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, PyTorch's factories make tensors of a shape and dtype only."""
    saved = {name: getattr(torch, name) for name in (*FACTORIES, "tensor")}

    def on_meta(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        return make(*args, **{**kwargs, "device": META})

    for name, make in saved.items():
        setattr(torch, name, partial(on_meta, make))
    try:
        yield
    finally:
        for name, make in saved.items():
            setattr(torch, name, make)


def reason_against(platform: platforms.Platform, case: Case) -> str | None:
    """Why the engine would not come to run this case here: the words of its own refusal."""
    cache = (case.tensors.get("k_cache"), case.numbers.get("cache_dtype"))
    try:
        platform.check_arithmetic(fp8_cache=FP8 in (getattr(cache[0], "dtype", None), cache[1]))
    except ConfigError as error:
        return str(error)
    if case.numbers.get("quantize") and platforms.Feature.FP8 not in platform.features:
        return "weights are dequantised here, so no product asks for FP8 activations"
    return None


def main() -> None:
    """Compile and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", choices=sorted(PLATFORMS))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    platform = PLATFORMS[options.arch]
    nvidia = platform.vendor == "nvidia"
    arch = int(platform.arch.removeprefix("sm_")) if nvidia else platform.arch
    driver.set_active(Driver(GPUTarget("cuda" if nvidia else "hip", arch, platform.warp_size)))
    platforms.platform_of = lambda device: platform  # type: ignore[assignment]
    from negamax.kernels.gemm import spec as gemm_spec
    from negamax.kernels.moe import spec as moe_spec
    from negamax.kernels.registry import OPS, resolve

    about: dict[str, Any] = {}
    done: set[str] = set()

    def report(**found: Any) -> None:
        print(json.dumps({**about, **found}), flush=True)

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            except Exception as error:
                report(kernel=kernel.fn.__name__, error=f"{type(error).__name__}: {error}"[-600:])
                return
            if compiled.hash not in done:
                done.add(compiled.hash)
                report(kernel=kernel.fn.__name__, shared_memory=compiled.metadata.shared)

        return run

    triton.JITFunction.__getitem__ = launch
    table = resolve(platform=platform, dtype=torch.bfloat16)
    # activations in the platform's form of FP8
    quantize = table["quantize.activations"].run
    gemm_spec.quantize_activations = moe_spec.quantize_rows = quantize  # type: ignore[assignment]
    number = -1
    for name, op in OPS.items():
        with without_memory(), torch.inference_mode():
            for case in op.wide(torch.bfloat16, SimpleNamespace(device=META)):  # type: ignore[arg-type]
                number += 1
                if number % step != first:
                    continue
                kernel = table.choose(name, case.stored)
                about = {"op": name, "case": case.label}
                refusal = reason_against(platform, case)
                if kernel is None:
                    refusal = f"{case.stored.name} is dequantised at load"
                if kernel is None or refusal is not None:
                    report(refused=refusal)
                    continue
                about["provider"] = kernel.provider
                try:
                    op.apply(kernel, case)
                except Exception as error:
                    report(error=f"{type(error).__name__}: {error}"[-600:])


if __name__ == "__main__":
    main()
