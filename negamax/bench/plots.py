"""Pictures of measurements. matplotlib is asked for only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError


def plot_offline(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Time per output token over batch size, one line per result and the limit where the first one has it.

    The suffix of `file` says the format (png, svg, pdf). Errors: `ConfigError` where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed", hint="pip install 'negamax[plot]'") from error
    first = results[0]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        runs = result["runs"]
        axes.plot([run["concurrency"] for run in runs], [run["tpot_ms"] for run in runs], marker="o", label=result["engine"])
    limits = [(run["concurrency"], run["limit_tpot_ms"]) for run in first["runs"] if "limit_tpot_ms" in run]
    if limits:
        label = f"limit at {first['bandwidth_tb_s']:.2f} TB/s"
        axes.plot(*zip(*limits, strict=True), linestyle="--", color="grey", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [run["concurrency"] for run in first["runs"]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("ms per output token")
    axes.set_title(f"{first['model']}, {first['num_layers']} layers, TP{first['tensor_parallel_size']}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(file, dpi=150)
