"""Measure how fast a rank loads a synthetic MiniMax-M2 checkpoint.

    python tools/bench_load.py FOLDER [--gb 60] [--stored fp8] [--device cuda] [--tp 1] [--rank 0]

The page cache is cold in some runs and warm in others. `dd` reads the same files for comparison. If
FOLDER does not exist, the tool writes the checkpoint first, and deletes it at the end unless --keep
is set.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.stream import THREADS
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import resolve
from negamax.models.build import build_empty_slots, build_model
from negamax.models.registry import bundled_spec, import_names
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect

SHARD_BYTES = 5 * 10**9
SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
FP8 = {
    "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"],
}  # fmt: skip


def spec_of(gigabytes: float, stored: str) -> ModelSpec:
    """Return M2 with as many layers as fit, or one layer with as many experts as fit."""
    whole = bundled_spec("minimax-m2")
    quantization = QuantizationSpec("fp8", FP8) if stored == "fp8" else None
    per_layer = 3.69e9 * (1 if stored == "fp8" else 2)
    if (layers := round(gigabytes * 1e9 / per_layer)) >= 1:
        return replace(whole, num_layers=layers, quantization=quantization)
    experts = max(8, round(gigabytes * 1e9 / per_layer * whole.num_experts / 8) * 8)
    sizes = {"num_layers": 1, "num_experts": experts}
    return replace(whole, **sizes, quantization=quantization)


def tensors_of(spec: ModelSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of all tensors, in the order of safetensors."""
    scheme, found = detect(spec.quantization), []
    for weight in import_names(spec).weights(spec):
        for name in weight.names():
            module = name.removesuffix(".weight")
            is_matrix = len(weight.shape) == 2 and not weight.is_table and weight.dtype is None
            stored = scheme.format_of(module) if scheme and is_matrix else None
            if stored is None or len(stored.tensors) == 1:
                dtype = "F32" if weight.dtype == "float32" and "norm" not in name else "BF16"
                found.append((name, dtype, weight.shape))
                continue
            for each in stored.tensors:
                shape = each.shape(tuple(weight.shape))
                found.append((f"{module}.{each.name}", SAFETENSORS[each.dtypes[0]], shape))
    return sorted(found)


def write_checkpoint(folder: Path, spec: ModelSpec) -> None:
    """Write files of about SHARD_BYTES with random numbers."""
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in tensors_of(spec):
        num_bytes = math.prod(tensor[2]) * ITEM_BYTES[tensor[1]]
        if size + num_bytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    noise = {
        "BF16": torch.randn(2**25).to(torch.bfloat16).view(torch.uint8).numpy(),
        "F8_E4M3": torch.randint(0, 0x70, (2**26,), dtype=torch.uint8).numpy(),
        "F32": torch.full((2**24,), 0.01).view(torch.uint8).numpy(),
    }
    weight_map = {}
    with Progress("writing the checkpoint") as progress:
        for number, shard in enumerate(shards):
            file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            shard.sort(key=lambda tensor: (-ITEM_BYTES[tensor[1]], tensor[0]))
            header: dict[str, Any] = {}
            at = 0
            for name, dtype, shape in shard:
                end = at + math.prod(shape) * ITEM_BYTES[dtype]
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
                weight_map[name], at = file, end
            text = json.dumps(header).encode()
            text = text.ljust(-(-len(text) // 8) * 8)
            with (folder / file).open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                for _, dtype, shape in shard:
                    left = math.prod(shape) * ITEM_BYTES[dtype]
                    while left:
                        left -= stream.write(noise[dtype][:left])
                stream.flush()
                os.fsync(stream.fileno())
            progress(number + 1, len(shards))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def forget(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd_seconds(files: list[Path]) -> float:
    """Read the files with `dd`, one after the other."""
    began = time.perf_counter()
    for file in files:
        command = ["dd", f"if={file}", "of=/dev/null", "bs=16M", "status=none"]
        subprocess.run(command, check=True)
    return time.perf_counter() - began


@contextmanager
def host_memory() -> Iterator[list[int]]:
    """Sample the anonymous memory of this process beyond its value at the start."""
    first, found, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            found.append(anonymous_bytes() - first)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


def load_seconds(
    folder: Path, spec: ModelSpec, layout: ParallelLayout, device: torch.device
) -> tuple[float, float, int, int]:
    """Return seconds of check and reads, bytes read, and host memory beyond the parameters."""
    kernels = resolve(platform=platform_of(device), dtype=torch.bfloat16)
    began = time.perf_counter()
    slots = build_empty_slots(spec, layout, kernels=kernels)
    plan = plan_load(slots, spec, folder, layout)
    checked = time.perf_counter() - began
    context = ParallelContext(layout)
    model = build_model(spec, context=context, device=device, kernels=kernels)
    if device.type == "cpu":  # Pages not yet assigned would be counted.
        for slot in model.weight_slots().values():
            if slot.target is not None:
                slot.target.zero_()
    torch.set_num_threads(1)  # A rank also starts with one thread.
    with torch.inference_mode(), host_memory() as memory:
        began = time.perf_counter()
        report = fill(model.weight_slots(), plan)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return checked, seconds, report.num_bytes, max(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=60.0)
    parser.add_argument("--stored", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    folder, spec = arguments.folder, spec_of(arguments.gb, arguments.stored)
    is_new = not folder.exists()
    if is_new:
        folder.mkdir(parents=True)
        write_checkpoint(folder, spec)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    layout = ParallelLayout(rank=arguments.rank, tp=arguments.tp)
    device = torch.device(arguments.device)
    print(f"{len(files)} files, {format_bytes(size)}, {spec.num_layers} layers; {THREADS} threads")
    print("| cache | dd GB/s | load GB/s | of dd | read | check s | host memory |")
    print("|---|---|---|---|---|---|---|")
    for cache in ("cold", "warm"):
        for _ in range(arguments.runs):
            if cache == "cold":
                forget(files)
            dd = size / dd_seconds(files) / 1e9
            if cache == "cold":
                forget(files)
            checked, seconds, read, memory = load_seconds(folder, spec, layout, device)
            rate = read / seconds / 1e9
            rates = f"{dd:.2f} | {rate:.2f} | {rate / dd:.0%} | {format_bytes(read)}"
            print(f"| {cache} | {rates} | {checked:.1f} | {format_bytes(memory)} |", flush=True)
    if is_new and not arguments.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
