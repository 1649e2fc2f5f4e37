"""Compile the kernels of the table for absent GPUs, at the sizes of MiniMax-M2.

`python tests/cpu/compile_kernels.py gfx942 sm_90/40@FOLDER [--quiet]` takes every case for MI300X,
and every 40th for H200 with the Triton in FOLDER; sm_90/ops takes the first case of each op. The
script prints one JSON object per kernel. The exit code is 1 if a kernel does not compile.

The ops' full-size cases are applied to "meta" tensors. The code that selects tiles and launches
runs as on the GPU, but a launch only compiles: to PTX and through ptxas, or to AMD code.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"}
sys.path.append(str(Path(__file__).parents[2]))
import torch
from torch import Tensor
from torn_words import reads_torn_words

from negamax.base.errors import ConfigError
from negamax.formats.platform import Feature, Platform
from negamax.kernels import platform as platforms
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.op import Op
from negamax.kernels.quantize import op as quantize_spec
from negamax.kernels.registry import OPS, resolve
from tests.kernel_cases import CASES
from tests.kernel_cases.case import Case

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

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
    def __init__(self, target: "GPUTarget") -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


@contextmanager
def without_memory() -> Iterator[None]:
    saved = {name: getattr(torch, name) for name in (*FACTORIES, "tensor")}

    def on_meta(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        return make(*args, **{**kwargs, "device": META})

    for name, make in saved.items():
        setattr(torch, name, partial(on_meta, make))
    clamp = Tensor.clamp_
    # PyTorch would need a compiler for `clamp_`, and this machine may have none.
    Tensor.clamp_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        Tensor.clamp_ = clamp
        for name, make in saved.items():
            setattr(torch, name, make)


def reason_against(platform: Platform, case: Case) -> str | None:
    """Return the engine's refusal of this case on the platform, or None if the case runs."""
    caches = [tensor.dtype for name, tensor in case.tensors.items() if name.endswith("_cache")]
    try:
        platform.check_arithmetic(fp8_cache=FP8 in (*caches, case.numbers.get("cache_dtype")))
    except ConfigError as error:
        return str(error)
    if case.numbers.get("quantize") and Feature.FP8 not in platform.features:
        return "weights are dequantized here, so no product asks for FP8 activations"
    return None


def described(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error)[-600:]}"


def spilled_bytes(code: Mapping[str, Any]) -> int:
    """Return the stack bytes per thread (spilled registers) of an NVIDIA kernel's ELF file."""
    found = re.search(rb"\x04\x11\x08\x00.{4}(.{4})", code.get("cubin", b""), re.DOTALL)
    return int.from_bytes(found[1], "little") if found else 0


def compile_for(
    platform: Platform, cases: list[tuple[Op, Case]], *, folder: str = "", quiet: bool = False
) -> None:
    """Compile with the Triton in `folder`, report (only errors if `quiet`), then exit.

    No other code may import Triton or a kernel before this call.
    """
    sys.path.insert(0, folder or sys.path[0])
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    nvidia = platform.vendor == "nvidia"
    if not nvidia:
        sys.modules["triton.language.extra.cuda"] = None  # type: ignore[assignment]  # as on ROCm
    arch = int(platform.arch.removeprefix("sm_")) if nvidia else platform.arch
    driver.set_active(Driver(GPUTarget("cuda" if nvidia else "hip", arch, platform.warp_size)))
    platforms.platform_of = lambda device: platform  # type: ignore[assignment]
    table = resolve(platform=platform, dtype=torch.bfloat16)
    # Quantize activations to the platform's FP8 format.
    quantize_spec.quantize_activations = table["quantize.activations"].run
    about: dict[str, Any] = {}
    done: set[str] = set()
    failed = False

    def report(**found: Any) -> None:
        nonlocal failed
        failed |= "error" in found
        if not quiet or "error" in found:
            print(json.dumps({**about, **found}), flush=True)

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            except Exception as error:
                report(kernel=kernel.fn.__name__, error=described(error))
                return
            if compiled.hash not in done:
                done.add(compiled.hash)
                found = compiled.metadata
                report(
                    kernel=kernel.fn.__name__,
                    shared_memory=found.shared,
                    spilled=spilled_bytes(compiled.asm),
                    fused=found.enable_fp_fusion,
                    torn=reads_torn_words(compiled.asm),
                )

        return run

    triton.JITFunction.__getitem__ = launch
    for op, case in cases:
        kernel = table.choose(op, case.stored)
        about = {"arch": platform.arch, "triton": triton.__version__, "op": op, "case": case.label}
        refusal = reason_against(platform, case)
        if kernel is None:
            refusal = f"{case.stored.name} is dequantized at load"
        if kernel is None or refusal is not None:
            report(refused=refusal)
            continue
        about["provider"] = kernel.provider
        try:
            with without_memory(), torch.inference_mode():
                CASES[op].apply(kernel, case)
                if op.startswith(("attention", "block_sparse", "cache_shards")):
                    with patch.object(AttentionMetadata, "is_captured", True):
                        CASES[op].apply(kernel, case)
        except Exception as error:
            report(error=described(error))
    sys.exit(int(failed))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="ARCH[/N[+K]|/ops][@FOLDER]",
        help="every N-th case from the K-th, or the first of each op, with the Triton in FOLDER; "
        f"{sorted(PLATFORMS)}",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    options = parser.parse_args()
    sys.modules["triton"] = None  # type: ignore[assignment]  # PyTorch would import it otherwise
    with without_memory(), torch.inference_mode():
        cases = [
            (op, case)
            for op in OPS.values()
            for case in CASES[op].wide(torch.bfloat16, SimpleNamespace(device=META))  # type: ignore[arg-type]
        ]
    del sys.modules["triton"]
    failed = []
    for run in options.runs:
        target, _, folder = run.partition("@")
        arch, _, part = target.partition("/")
        every, _, start = part.partition("+")
        chosen = list({op: (op, case) for op, case in reversed(cases)}.values())
        if every != "ops":
            chosen = cases[int(start or 0) :: int(every or 1)]
        process = multiprocessing.get_context("fork").Process(
            target=compile_for,
            args=(PLATFORMS[arch], chosen),
            kwargs={"folder": folder, "quiet": options.quiet},
        )
        process.start()
        process.join()
        if process.exitcode:
            failed.append(f"{run}: exit code {process.exitcode}")
    if failed:
        triton = f"Triton {version('triton')}, unless a folder is given,"
        sys.exit(f"{triton} does not compile all of them; {', '.join(failed)}")


if __name__ == "__main__":
    main()
