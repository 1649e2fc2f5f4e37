"""Plots of measurements. No other module imports matplotlib.

The suffix of a plot's file selects its format (png, svg, pdf). If matplotlib is missing, the
functions raise `ConfigError`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from negamax.base.errors import ConfigError
from negamax.bench import serve_report
from negamax.bench.serve import Measurement, first_start
from negamax.bench.serve_compare import Series, load_of

_STEPS: dict[str, Any] = {"where": "post", "color": "black", "linewidth": 1}


def blank_figure(size: tuple[float, float]) -> Any:
    """Make an empty figure of `size` inches. Raises `ConfigError` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed", hint="pip install 'negamax[plot]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def plot_offline(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Plot each result's time per output token over batch size, and the first result's limit."""
    figure = blank_figure((7, 4.5))
    first = results[0]
    axes = figure.add_subplot()
    for result in results:
        runs = [run for run in result["runs"] if run["tpot_ms"] is not None]
        axes.plot(*_columns(runs, "concurrency", "tpot_ms"), marker="o", label=result["engine"])
    if limits := [run for run in first["runs"] if "limit_tpot_ms" in run]:
        columns = _columns(limits, "concurrency", "limit_tpot_ms")
        label = f"limit at {first['bandwidth_tb_s']:.2f} TB/s"
        axes.plot(*columns, linestyle="--", color="grey", label=label)
    axes.set_xscale("log", base=2)
    ticks = [run["concurrency"] for run in first["runs"]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(
        yscale="log",
        xlabel="requests in the batch",
        ylabel="ms per output token",
        title=f"{first['model']}, {first['num_layers']} layers, TP{first['tensor_parallel_size']}",
    )
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(file, dpi=150)


def _columns(runs: Sequence[Mapping[str, Any]], *names: str) -> list[list[float]]:
    return [[run[name] for run in runs] for name in names]


def plot_serving(file: Path, measured: Measurement, *, rule: str, title: str) -> None:
    """Plot a run: distributions of TTFT and ITL, and latency and load over time."""
    figure = blank_figure((11, 7.5))
    (first, gaps), (latency, load) = figure.subplots(2, 2)
    values = serve_report.metric_values(measured.good, rule=rule)
    _histogram(first, values["ttft"], title="Time to first token")
    _histogram(gaps, values["itl"], title="Inter-token latency")
    _latency_over_time(latency, measured)
    _load_over_time(load, measured)
    figure.suptitle(title)
    figure.savefig(file, dpi=150)


def plot_comparison(file: Path, series: Sequence[Series], *, title: str) -> None:
    """Plot throughput over TPOT and over TTFT: one line per series, one point per load."""
    figure = blank_figure((11, 5))
    by_tpot, by_ttft = figure.subplots(1, 2, sharey=True)
    _throughput_over(by_tpot, series, "median_tpot_ms")
    by_tpot.set(xlabel="median time per output token (ms)", ylabel="output tokens per second")
    _throughput_over(by_ttft, series, "median_ttft_ms")
    by_ttft.set_xlabel("median time to first token (ms)")
    loads = "requests at once, or arrivals per second, beside each point"
    by_tpot.legend(fontsize="small", title=loads, title_fontsize="x-small", frameon=False)
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _throughput_over(axes: Any, series: Sequence[Series], latency_name: str) -> None:
    for one in series:
        latency, rate = _columns(one.runs, latency_name, "output_throughput")
        (line,) = axes.plot(latency, rate, marker="o", linewidth=2, label=one.name)
        for run, x, y in zip(one.runs, latency, rate, strict=True):
            style = {"fontsize": "small", "color": line.get_color()}
            place = {"textcoords": "offset points", "xytext": (7, -11)}
            axes.annotate(load_of(run), (x, y), **place, **style)
    axes.margins(0.08)
    axes.set(xscale="log", yscale="log")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with the numbers 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axis.set_minor_locator(NullLocator())


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _histogram(axes: Any, seconds: Sequence[float], *, title: str) -> None:
    """Plot a histogram, the cumulative fraction, median and p99 on a logarithmic time axis."""
    axes.set(title=title, xlabel="ms")
    ordered = sorted(1e3 * max(value, 1e-6) for value in seconds)
    if not ordered:
        return
    low, high = ordered[0] * 0.99, ordered[-1] * 1.01
    edges = [low * (high / low) ** (step / 50) for step in range(51)]
    axes.hist(ordered, bins=edges, color="tab:blue", alpha=0.6)
    axes.set(xscale="log", ylabel="count")
    _plain_numbers(axes.xaxis)
    _whole_numbers(axes.yaxis)
    share = axes.twinx()
    shares = [place / len(ordered) for place in range(len(ordered) + 1)]
    share.step([ordered[0], *ordered], shares, **_STEPS)
    share.set(ylim=(0, 1.02), ylabel="share at or below")
    for percent, style in ((50, "--"), (99, ":")):
        value = float(np.percentile(ordered, percent))
        label = f"p{percent} {value:,.1f} ms"
        share.axvline(value, color="tab:red", linestyle=style, linewidth=1, label=label)
    share.legend(loc="upper left", fontsize="small")


def _latency_over_time(axes: Any, measured: Measurement) -> None:
    begin, good = first_start(measured.records), measured.good
    failed = [record for record in measured.records if record.error is not None and record.started]
    sent = [record.started - begin for record in good]
    for metric, color, label in (
        (serve_report.e2el, "tab:green", "whole answer"),
        (serve_report.ttft, "tab:blue", "first token"),
    ):
        axes.scatter(sent, list(map(metric, good)), s=8, color=color, label=label)
    if failed:
        times = [record.started - begin for record in failed]
        seconds = [serve_report.e2el(record) for record in failed]
        axes.scatter(times, seconds, s=16, color="tab:red", marker="x", label="failed")
    axes.set(title="Latency by time of sending", ylabel="s", ylim=(0, None))
    axes.set_xlabel("s since the start")
    axes.grid(visible=True, alpha=0.2)
    axes.legend(fontsize="small")


def _load_over_time(axes: Any, measured: Measurement) -> None:
    begin = first_start(measured.records)
    per_second = serve_report.output_per_second(measured.good)
    middles = [second + 0.5 for second in range(len(per_second))]
    axes.bar(middles, per_second, width=1.0, color="tab:orange", alpha=0.6)
    axes.set(title="Output tokens and requests under way", xlabel="s since the start")
    axes.set_ylabel("output tokens in the second")
    running = axes.twinx()
    steps = serve_report.concurrency_steps(measured.records)
    running.step([at - begin for at, _ in steps], [count for _, count in steps], **_STEPS)
    running.set(ylabel="requests under way", ylim=(0, None))
    _whole_numbers(running.yaxis)
