"""`negamax bench serve`: send load to an OpenAI-compatible server and print latencies."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError
from negamax.bench.serve_options import LOAD, METRICS, OUTPUT, BenchOptions
from negamax.cli.bench_options import check_result, parse_counts, parse_numbers, picture
from negamax.cli.options import add_options, setting
from negamax.options.foreign import BENCH

if TYPE_CHECKING:
    from negamax.bench.serve import Measurement, RunProgress

HELP = "Send load to an OpenAI-compatible server; report time to first token, rates and latencies."

_REFRESH_SECONDS = 0.2


@add_options(foreign=BENCH)
def command(
    *,
    bench: BenchOptions,
    goodput_words: list[str] | None = typer.Argument(None, hidden=True, metavar=""),
    num_prompts: str = setting(
        str(BenchOptions.num_prompts),
        "Send this many timed requests; for a sweep, pass one number, or one number per run.",
        panel=LOAD,
    ),
    max_concurrency: str | None = setting(
        None, "Limit the concurrent requests. With several limits (1,4,16), each limit is one run."
    ),
    percentile_metrics: str | None = setting(
        None, "Print these metrics. Default: ttft,tpot,itl,e2el.", panel=OUTPUT
    ),
    metric_percentiles: str = setting("95,99", "Print these percentiles."),
    goodput: list[str] | None = setting(
        None, "Count requests that meet limits in ms, such as ttft:500 tpot:50."
    ),
    metadata: list[str] | None = setting(None, "Add KEY=VALUE to the result; may be repeated."),
    save_result: bool = setting(False, "Write the result as JSON.", "--save-result"),
    save_detailed: bool = setting(
        False, "Add the figures of each request and token gap to the result.", "--save-detailed"
    ),
    result_dir: Path | None = setting(None, "Set the result folder (default: the current folder)."),
    result_filename: str | None = setting(None, "Set the result's file name (default: generated)."),
    plot: Path | None = picture("Plot distributions and timelines into this file (png, svg, pdf)."),
    disable_tqdm: bool = setting(False, "Hide the progress.", "--disable-tqdm", "--no-progress"),
) -> None:
    """Send the load, print the result and write the files."""
    given = {"goodput": goodput is not None, "metadata": metadata is not None}
    words = _sorted_words(goodput_words or [], **given)
    loads = _loads(max_concurrency, num_prompts)
    options = dataclasses.replace(
        bench,
        api_key=bench.api_key or env.get("OPENAI_API_KEY"),
        percentile_metrics=_metrics(percentile_metrics),
        metric_percentiles=_percentiles(metric_percentiles),
        goodput=_goodput([*(goodput or []), *words[0]]),
        metadata=_metadata([*(metadata or []), *words[1]]),
    )
    is_saved = save_result or save_detailed or result_filename is not None
    folder = (result_dir or Path()) if is_saved else None
    files = _Files(folder, result_filename, detailed=save_detailed, plot=plot)
    if files.folder is not None:
        check_result(files.folder / (files.name or "negamax.json"), flag="--result-dir")
    _run_all(options, loads, files, shown=not disable_tqdm)


@dataclass(frozen=True)
class _Files:
    """The files and the folder to which a run writes its results."""

    folder: Path | None  # Folder for the JSON result; None: write no result.
    name: str | None  # File name of the JSON result; None: choose a name from the settings.
    detailed: bool
    plot: Path | None


def _run_all(
    options: BenchOptions, loads: Sequence[tuple[int | None, int]], files: _Files, *, shown: bool
) -> None:
    """Measure each load, print and write its result, and compare the results of all loads."""
    from negamax.bench import plots, serve_report

    is_sweep = len(loads) > 1
    documents: list[dict[str, Any]] = []
    for number, (concurrency, count) in enumerate(loads):
        # Each run has a new seed, so that the server has not cached the run's prompts.
        seed = options.seed + number
        load: dict[str, Any] = {"max_concurrency": concurrency, "num_prompts": count}
        one = dataclasses.replace(options, **load, seed=seed)
        measured, summary = _measure(one, shown=shown)
        print(serve_report.block(summary, one))
        document = serve_report.document(measured, one, summary, detailed=files.detailed)
        if files.folder is not None:
            file = files.folder / (files.name or serve_report.file_name(measured, one))
            if is_sweep and files.name is not None:
                file = file.with_stem(f"{file.stem}-concurrency{concurrency}")
            indent = None if files.detailed else 2
            _write(file, json.dumps(document, indent=indent, ensure_ascii=False) + "\n")
        if files.plot is not None and not is_sweep:
            rates = f"{summary['completed']} requests, {summary['output_throughput']:,.0f} tokens/s"
            title = f"{measured.model}: {one.dataset_name}, {rates}"
            plots.plot_serving(files.plot, measured, rule=one.itl_rule, title=title)
            print(f"Plot: {files.plot}")
        _judge(measured, summary)
        documents.append(document)
    if is_sweep:
        _compare(documents, plot=files.plot)


def _measure(options: BenchOptions, *, shown: bool) -> tuple[Measurement, dict[str, Any]]:
    """Run the benchmark once and summarize its result. With `shown`, display progress."""
    from negamax.bench import serve, serve_report

    progress = serve.RunProgress()
    with _display(progress, shown=shown):
        measured = serve.run(options, progress, loop_factory=_loop_factory())
    return measured, serve_report.summarize(measured, options)


def _compare(documents: Sequence[dict[str, Any]], *, plot: Path | None) -> None:
    """Print and plot the runs of a sweep, unless a run lacks a metric that the plot needs."""
    from negamax.bench import plots, serve_compare

    if not all(name in document for document in documents for name in serve_compare.NEEDED):
        return
    series = serve_compare.group(documents)
    print(serve_compare.table(series))
    if plot is not None:
        title = f"{documents[0]['model_id']}: {documents[0]['dataset_name']}"
        plots.plot_comparison(plot, series, title=title)
        print(f"Plot: {plot}")


def _loads(concurrency: str | None, num_prompts: str) -> list[tuple[int | None, int]]:
    """Return the pair (max_concurrency, num_prompts) of each run."""
    counts = parse_numbers(num_prompts, flag="--num-prompts")
    if concurrency is None:
        limits: list[int | None] = [None]
    else:
        limits = [*parse_counts(concurrency, flag="--max-concurrency")]
    if len(counts) not in (1, len(limits)):
        refusal = f"--num-prompts has {len(counts)} numbers; --max-concurrency has {len(limits)}"
        raise ConfigError(refusal, hint="pass one number of prompts, or one for each concurrency")
    return list(zip(limits, counts * (len(limits) if len(counts) == 1 else 1), strict=True))


def _judge(measured: Measurement, summary: dict[str, Any]) -> None:
    """Exit with an error if the run was interrupted or all requests failed."""
    if measured.interrupted:
        raise typer.Exit(130)
    if not summary["completed"]:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in summary["failures"].items())
        raise NegamaxError(f"all {summary['failed']} requests failed: {reasons}")


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        refusal = f"the result cannot be written to {str(file)!r}: {error}"
        raise ConfigError(refusal, hint="pass another --result-dir") from None
    print(f"Result: {file}")


# Helpers for option values


def _sorted_words(
    words: list[str], *, goodput: bool, metadata: bool
) -> tuple[list[str], list[str]]:
    """Split `words` into values of --goodput (METRIC:MS) and of --metadata (KEY=VALUE)."""
    found: tuple[list[str], list[str]] = ([], [])
    for word in words:
        if goodput and word.partition(":")[0] in METRICS:
            found[0].append(word)
        elif metadata and "=" in word:
            found[1].append(word)
        else:
            hint = "pass the model as --model NAME"
            raise ConfigError(f"unexpected argument {word[:60]!r}", hint=hint)
    return found


def _metadata(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise ConfigError(f"--metadata is {text[:60]!r}; allowed: NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _metrics(text: str | None) -> tuple[str, ...]:
    words = METRICS if text is None else text.split(",")
    names = tuple(word.strip() for word in words if word.strip())
    for name in names:
        if name not in METRICS:
            allowed = ", ".join(METRICS)
            raise ConfigError(f"--percentile-metrics has {name[:60]!r}; allowed: {allowed}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = (-1.0,)
    if not all(0 < value <= 100 for value in found):
        allowed = "numbers above 0, up to 100, separated by commas"
        raise ConfigError(f"--metric-percentiles is {text[:60]!r}; allowed: {allowed}")
    return found


def _goodput(texts: Sequence[str]) -> dict[str, float]:
    limits = {}
    for text in (word for group in texts for word in group.replace(",", " ").split()):
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ConfigError(f"--goodput has {text[:60]!r}; allowed: ttft:MS, tpot:MS, e2el:MS")
    return limits


def _loop_factory() -> Any:
    """Return uvloop's loop class, or None if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


# Progress


@contextmanager
def _display(progress: RunProgress, *, shown: bool) -> Iterator[None]:
    """Show `progress` on standard error from a thread until the `with` block ends."""
    if not shown or not sys.stderr.isatty():
        yield
        return
    from rich import progress as rich_progress
    from rich.console import Console
    from rich.live import Live

    bars = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[rates]}"),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    task = bars.add_task("connecting", total=None, rates="")

    def current() -> rich_progress.Progress:
        counts: dict[str, Any] = {"total": progress.total or None, "completed": progress.done}
        bars.update(task, description=progress.stage, rates=_rates(progress), **counts)
        return bars

    rate = 1 / _REFRESH_SECONDS
    console = Console(stderr=True)
    with Live(get_renderable=current, console=console, transient=True, refresh_per_second=rate):
        yield


def _rates(progress: RunProgress) -> str:
    """Format rates such as '12.3 req/s, 1,234 tok/s, 2 failed'."""
    if progress.started is None:
        return ""
    seconds = max(time.perf_counter() - progress.started, 1e-3)
    text = f"{progress.done / seconds:.1f} req/s, {progress.output_tokens / seconds:,.0f} tok/s"
    return text + (f", {progress.failed} failed" if progress.failed else "")
