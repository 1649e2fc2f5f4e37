"""Reports of a measurement: environment, physical limits, and comparison with a baseline."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from negamax import __version__
from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.tables import read_table
from negamax.bench.group import label
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import expected_distinct_experts
from negamax.planner.floor import step_bytes

COPY_BYTES = 2**30
COPY_ROUNDS = 10
_ROWS: list[tuple[str, str, str]] = read_table(__file__, "labels.toml")["offline"]["rows"]

Run = Mapping[str, Any]


def environment(device: str) -> dict[str, Any]:
    """Return versions, machine and date. `device` is a name such as "cuda:0" or "cpu"."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": env.usable_cores(),
        "versions": {
            "negamax": __version__,
            "torch": str(torch.__version__),
            "triton": env.installed_version("triton"),
        },
    }
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        found["cuda"] = torch.version.cuda
    return found


def copy_bytes_per_second() -> float:
    """Return the bytes per second of a large copy on a CUDA device, in the fastest round."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(gpu_seconds(lambda: target.copy_(source), rounds=COPY_ROUNDS))


def gpu_seconds(
    call: Callable[[], object], *, rounds: int, between: Callable[[], object] | None = None
) -> list[float]:
    """Time `rounds` calls by CUDA events after one warm-up. Call `between` before each round."""
    call()
    seconds: list[float] = []
    for _ in range(rounds):
        if between is not None:
            between()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def add_limits(result: dict[str, Any], spec: ModelSpec, *, bytes_per_second: float) -> None:
    """Add to each run of `result` the shortest possible TPOT and its ratio to the measured TPOT.

    Runs with speculative decoding are skipped, because their steps yield several tokens. Results of
    pipeline-parallel or data-parallel engines are also skipped.
    """
    if label(result) != f"TP{result['tensor_parallel_size']}":
        return
    info, options = result["info"], result["options"]
    kv_dtype, index_dtype = (
        info["dtype"] if dtype == "auto" else dtype
        for dtype in (options.get(f"{kind}_cache_dtype", "auto") for kind in ("kv", "index"))
    )
    result["bandwidth_tb_s"] = bytes_per_second / 1e12
    for run in result["runs"]:
        if "spec_decode_num_drafts" in run:
            continue
        num_bytes = step_bytes(
            spec,
            batch=run["concurrency"],
            context=result["input_len"] + result["output_len"] / 2,
            dtype=info["dtype"],
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            ranks=result["tensor_parallel_size"],
        )
        seconds = num_bytes / bytes_per_second
        run["limit_tpot_ms"] = 1e3 * seconds
        if run["tpot_ms"] is not None:
            run["share_of_limit"] = 1e3 * seconds / run["tpot_ms"]


def read_baseline(file: Path, conditions: Mapping[str, Any]) -> Run:
    """Return the result in `file` that was measured under `conditions`. Raises `ConfigError`."""
    try:
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        # result files of older versions lack the key cached_prompts
        described = [
            {key: {"cached_prompts": False, **other}[key] for key in conditions}
            for other in results
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--compare: {file} has no results of `negamax bench offline` ({error!r})"
        ) from error
    if dict(conditions) not in described:
        raise ConfigError(f"--compare: {file} has no result for {conditions}; it has {described}")
    return dict(results[described.index(dict(conditions))])


def add_comparison(result: dict[str, Any], baseline: Run) -> None:
    """Add to each run its speed-up over the baseline's run with the same batch size."""
    others = {run["concurrency"]: run for run in baseline["runs"]}
    result["compared_with"] = baseline["engine"]
    for run in result["runs"]:
        other = others.get(run["concurrency"])
        if other is not None:
            if None not in (other["tpot_ms"], run["tpot_ms"]):
                run["times_faster_decode"] = other["tpot_ms"] / run["tpot_ms"]
            run["times_faster_prefill"] = other["prefill_seconds"] / run["prefill_seconds"]


def table(result: Run, spec: ModelSpec) -> Table:
    """Make a table with a column per batch size. Omit the metrics that no run has."""
    runs = [dict(run) for run in result["runs"]]
    for run in runs:
        if run.get("spec_decode_synthetic"):
            run["synthetic_acceptance_length"] = run.pop("spec_decode_acceptance_length")
        if run.get("distinct_experts") is not None:
            run["expected_distinct_experts"] = expected_distinct_experts(
                spec, run.get("step_rows", run["concurrency"])
            )
    title = (
        f"{result['model']}, {result['num_layers']} layers, {label(result)}, "
        f"{result['input_len']} prompt and {result['output_len']} output tokens, start "
        f"{result['start_seconds']:.1f} s"
    )
    rows = [
        [
            heading.format(other=result.get("compared_with")),
            *("" if run.get(key) is None else format(run[key], form) for run in runs),
        ]
        for heading, key, form in _ROWS
        if any(run.get(key) is not None for run in runs)
    ]
    return rows_table(["requests", *(str(run["concurrency"]) for run in runs)], rows, title=title)


def rows_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> Table:
    """Make a table whose first column is text and whose other columns are numbers."""
    shown = Table(title=title or None, title_justify="left")
    for index, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    return shown
