"""`negamax bench profile`: the time of a decode step by operation.

The command records the GPU kernels of rank 0, or PyTorch's operators on a CPU, for some decode
steps of a batch. All sequences of the batch have the same context length.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from negamax.base.tables import read_table
from negamax.bench.report import environment
from negamax.bench.workload import RandomPrompts, Write, decode_batch
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.setup import start_loop
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest
from negamax.worker.config import START_PROFILE, STOP_PROFILE, KernelTime

SCHEMA = "negamax-bench-profile/1"
WARM_UP_STEPS = 8

# operation of operations.toml -> name prefixes of the operation's kernels
OPERATIONS = {
    operation: tuple(prefixes.split())
    for operation, prefixes in read_table(__file__, "operations.toml").items()
}


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation, or of an unknown kernel, in a decode step of rank 0."""

    operation: str
    microseconds: float  # GPU time per decode step.
    launches: float  # Kernel launches per decode step.
    kernels: tuple[str, ...]  # Names of the kernels of the operation.


def operation_of(kernel: str) -> str:
    """Return the operation of a GPU kernel, or the kernel's short name."""
    name = _kernel_name(kernel)
    found = (operation for operation, prefixes in OPERATIONS.items() if name.startswith(prefixes))
    return next(found, name)


def _kernel_name(kernel: str) -> str:
    """Shorten 'void at::native::index_kernel<...>(...)' to 'index_kernel'."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.split("<", 1)[0].split("(", 1)[0]
    return name.rsplit("::", 1)[-1].strip() or kernel


def group(times: Sequence[KernelTime], *, steps: int) -> list[OperationTime]:
    """Return the mean time per step of each operation in `times`, with the longest time first."""
    groups: dict[str, list[KernelTime]] = {}
    for kernel in times:
        groups.setdefault(operation_of(kernel.name), []).append(kernel)
    found = [
        OperationTime(
            operation=operation,
            microseconds=sum(kernel.microseconds for kernel in kernels) / steps,
            launches=sum(kernel.calls for kernel in kernels) / steps,
            kernels=tuple(dict.fromkeys(kernel.name for kernel in kernels)),
        )
        for operation, kernels in groups.items()
    ]
    return sorted(found, key=lambda entry: -entry.microseconds)


def run(
    options: EngineOptions, *, batches: Sequence[int], context: int, steps: int, say: Write
) -> dict[str, Any]:
    """Profile decode steps for each batch size. Return a JSON document. Raises `ConfigError`."""
    loop, info = start_loop(options)
    try:
        prompts = RandomPrompts(info, seed=options.seed, temperature=1.0)
        runs = []
        for batch in batches:
            requests = prompts.batch(batch, **_lengths(context, steps, info.max_model_len))
            entries, wall = _profile(loop, requests, steps=steps)
            operations = [asdict(entry) for entry in entries]
            runs.append({"batch": batch, "step_microseconds": wall, "operations": operations})
            busy = sum(entry.microseconds for entry in entries)
            say(
                f"batch {batch}: {busy:.0f} us of kernels in a step of {wall:.0f} us (with the "
                f"profiler on)"
            )
    finally:
        loop.shutdown()
    result = {
        "model": options.model,
        "num_layers": locate(options).spec.num_layers,
        "tensor_parallel_size": options.tensor_parallel_size,
        "context": context,
        "steps": steps,
        "runs": runs,
        "options": asdict(options),
        "info": msgspec.to_builtins(info),
        "environment": environment(info.device),
    }
    return {"schema": SCHEMA, "results": [result]}


def _lengths(context: int, steps: int, max_model_len: int) -> dict[str, int]:
    """Return input and output lengths for contexts of `context` tokens after the warm-up."""
    input_len = max(1, context - WARM_UP_STEPS)
    # Use the longest outputs that the model allows, so that no sequence ends before the recording.
    return {
        "input_len": input_len,
        "output_len": max(WARM_UP_STEPS + steps, max_model_len - input_len),
    }


def _profile(
    loop: EngineLoop, requests: list[GenerateRequest], *, steps: int
) -> tuple[list[OperationTime], float]:
    """Return kernel times by operation, and the wall-clock microseconds of a recorded step."""
    stepper = decode_batch(loop, requests)
    try:
        for _ in range(WARM_UP_STEPS):
            next(stepper)
        loop.run_debug_command(START_PROFILE)
        started = time.perf_counter()
        for _ in range(steps):
            next(stepper)
        wall = 1e6 * (time.perf_counter() - started) / steps
        times = loop.run_debug_command(STOP_PROFILE)[0].kernels or []
    finally:
        stepper.close()
    return group(times, steps=steps), wall


def table_rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: microseconds and launches per layer, by operation and batch size.

    Times of all operations are divided by the number of layers, even if they run once per step.
    """
    runs, layers = result["runs"], result["num_layers"]
    by_batch = [{entry["operation"]: entry for entry in run["operations"]} for run in runs]
    names = list(dict.fromkeys(name for entries in by_batch for name in entries))
    headings = ["us per layer (launches)", *(f"batch {run['batch']}" for run in runs)]

    def cell(entries: Sequence[dict[str, Any]]) -> str:
        microseconds, launches = (
            sum(entry[key] for entry in entries) / layers for key in ("microseconds", "launches")
        )
        return f"{microseconds:.1f} ({launches:.2f})"

    rows = [
        [name, *(cell([found[name]]) if name in found else "" for found in by_batch)]
        for name in names
    ]
    all_entries = [run["operations"] for run in runs]
    rows.append(["total", *map(cell, all_entries)])
    busy = (sum(entry["microseconds"] for entry in entries) for entries in all_entries)
    rows.append(["kernels per step, us", *(f"{microseconds:.0f}" for microseconds in busy)])
    rows.append(["step while profiled, us", *(f"{run['step_microseconds']:.0f}" for run in runs)])
    return headings, rows
