"""`negamax bench serve`: load a running OpenAI-compatible server and print the block of latencies
and rates.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from negamax.base import env
from negamax.base.errors import ConfigError, NegamaxError
from negamax.bench.serve_options import (
    BACKENDS,
    DATASET_ALIASES,
    DATASETS,
    HISTORIES,
    ITL_RULES,
    METRICS,
    PROMPT_FORMATS,
    RANGE_RULES,
    BenchOptions,
)
from negamax.cli.bench_options import (
    OUTPUT,
    WORKLOAD,
    check_result,
    parse_counts,
    parse_numbers,
    picture,
)
from negamax.cli.flags import Flag, chosen_fields, flag_parameters, json_object
from negamax.config.embedded import QUOTED_NAMES

if TYPE_CHECKING:
    from negamax.bench.serve import Measurement, RunProgress

HELP = (
    "Load an OpenAI-compatible server, any one, and report time to first token, token rates "
    "and latencies."
)

SERVER, LOAD, SAMPLING = "Server", "Load", "Sampling"
_REFRESH_SECONDS = 0.2


_TABLE = (
    Flag("base_url", SERVER, "Such as http://127.0.0.1:8000; instead of --host and --port."),
    Flag("host", SERVER, "Where the server listens."),
    Flag("port", SERVER, "Where the server listens."),
    Flag("backend", SERVER, "Name of the API; those with -chat are chat.", choices=tuple(BACKENDS)),
    Flag(
        "endpoint",
        SERVER,
        "/v1/completions or /v1/chat/completions; default: by --backend and dataset.",
    ),
    Flag(
        "model",
        SERVER,
        "Name in the API; default: the first of /v1/models.",
        also=("--served-model-name",),
    ),
    Flag("api_key", SERVER, "Bearer token; default: OPENAI_API_KEY."),
    Flag("request_timeout", SERVER, "Seconds after which a request counts as failed."),
    Flag("ready_check_timeout_sec", SERVER, "Seconds to wait for a server that is starting."),
    Flag(
        "request_rate",
        LOAD,
        "Arrivals per second (of sessions, where there are turns); inf sends all at once.",
    ),
    Flag(
        "burstiness", LOAD, "Of arrivals: 1 is a Poisson process, less is burstier, more steadier."
    ),
    Flag("num_warmups", LOAD, "Requests before the timed ones.", also=("--warmup-requests",)),
    Flag("seed", LOAD, "Of prompts and arrivals."),
    Flag("dataset_name", WORKLOAD, f"One of {', '.join(DATASETS)}."),
    Flag(
        "dataset_path", WORKLOAD, "ShareGPT JSON, or a JSONL of recorded requests (custom, agent)."
    ),
    Flag(
        "tokenizer",
        WORKLOAD,
        f"Folder, hub id, or {QUOTED_NAMES}: whose ids prompts are drawn from, and who counts "
        "ShareGPT answers.",
    ),
    Flag(
        "prompt_format",
        WORKLOAD,
        "ids: exact lengths, /v1/completions; text: sized by the server's own counts.",
        choices=PROMPT_FORMATS,
    ),
    Flag("random_input_len", WORKLOAD, "Prompt tokens.", also=("--input-len", "--random-input")),
    Flag("random_output_len", WORKLOAD, "Output tokens.", also=("--output-len", "--random-output")),
    Flag(
        "random_range_ratio",
        WORKLOAD,
        "Lengths vary evenly by this share, up and down; as in SGLang: from this share up.",
    ),
    Flag(
        "random_range_rule",
        WORKLOAD,
        "Whose --random-range-ratio; auto: by --backend.",
        choices=RANGE_RULES,
    ),
    Flag("random_prefix_len", WORKLOAD, "Tokens that all prompts begin with, on top."),
    Flag(
        "prefix_repetition_prefix_len",
        WORKLOAD,
        "Tokens of each prefix.",
        also=("--gsp-system-prompt-len",),
    ),
    Flag(
        "prefix_repetition_suffix_len", WORKLOAD, "Tokens after it.", also=("--gsp-question-len",)
    ),
    Flag("prefix_repetition_num_prefixes", WORKLOAD, "Prefixes.", also=("--gsp-num-groups",)),
    Flag("prefix_repetition_output_len", WORKLOAD, "Output tokens.", also=("--gsp-output-len",)),
    Flag(
        "sharegpt_output_len", WORKLOAD, "Output tokens; default: as long as the recorded answer."
    ),
    Flag(
        "sharegpt_context_len",
        WORKLOAD,
        "Leave longer conversations out; default: the model's context length.",
    ),
    Flag("custom_output_len", WORKLOAD, "Output tokens of recorded requests that name none."),
    Flag(
        "agent_turns", WORKLOAD, "Requests per session, unless the context length ends it earlier."
    ),
    Flag("agent_system_len", WORKLOAD, "Tokens of the system prompt, without the tools."),
    Flag("agent_tools", WORKLOAD, "Tools declared."),
    Flag("agent_result_len", WORKLOAD, "Tokens of a step's tool results, on average."),
    Flag("agent_reasoning_len", WORKLOAD, "Tokens of thinking per turn that are sent back."),
    Flag("agent_output_len", WORKLOAD, "Output tokens of each turn."),
    Flag("agent_pause", WORKLOAD, "Seconds between an answer and the next turn."),
    Flag(
        "agent_history",
        WORKLOAD,
        "recorded: the same requests each time; live: the server's answers are sent back.",
        choices=HISTORIES,
    ),
    Flag(
        "ignore_eos",
        SAMPLING,
        "Generate exactly the output tokens asked for (vLLM, SGLang, Negamax).",
    ),
    Flag("temperature", SAMPLING, "Default of this and the others: not sent."),
    Flag("top_p", SAMPLING, "Nucleus."),
    Flag("top_k", SAMPLING, "Candidates."),
    Flag("min_p", SAMPLING, "Smallest share of the best."),
    Flag("frequency_penalty", SAMPLING, "By count."),
    Flag("presence_penalty", SAMPLING, "By presence."),
    Flag("repetition_penalty", SAMPLING, "By factor."),
    Flag(
        "itl_rule",
        OUTPUT,
        "gap: each gap between chunks once; token: divided by the chunk's tokens.",
        choices=ITL_RULES,
    ),
    Flag("label", OUTPUT, "In the result and its file's name."),
)


def _listed(flag: str, panel: str, help: str) -> Any:
    return typer.Option(flag, rich_help_panel=panel, help=help, show_default=False)


def _run(
    *,
    goodput_words: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    num_prompts: Annotated[
        str,
        typer.Option(
            "--num-prompts",
            rich_help_panel=LOAD,
            help="Requests that are timed; in a sweep one number, or one per run.",
        ),
    ] = str(BenchOptions.num_prompts),
    max_concurrency: Annotated[
        str | None,
        _listed(
            "--max-concurrency",
            LOAD,
            "The most requests under way at once; 1,4,16 runs one after the other and compares.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None, _listed("--header", SERVER, "NAME=VALUE; may be repeated.")
    ] = None,
    extra_body: Annotated[
        str | None, _listed("--extra-body", SAMPLING, "JSON object, merged into each request.")
    ] = None,
    percentile_metrics: Annotated[
        str | None,
        _listed("--percentile-metrics", OUTPUT, "Metrics to print; default: ttft,tpot,itl,e2el."),
    ] = None,
    metric_percentiles: Annotated[
        str, typer.Option("--metric-percentiles", rich_help_panel=OUTPUT, help="Percentiles.")
    ] = "95,99",
    goodput: Annotated[
        list[str] | None,
        _listed(
            "--goodput", OUTPUT, "Limits such as ttft:500 tpot:50 (ms); counts requests within all."
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        _listed("--metadata", OUTPUT, "KEY=VALUE for the result; may be repeated."),
    ] = None,
    save_result: Annotated[
        bool, _listed("--save-result", OUTPUT, "Write the result as JSON.")
    ] = False,
    save_detailed: Annotated[
        bool, _listed("--save-detailed", OUTPUT, "With lists of all requests and gaps.")
    ] = False,
    result_dir: Annotated[
        Path | None, _listed("--result-dir", OUTPUT, "Folder of the result; default: this one.")
    ] = None,
    result_filename: Annotated[
        str | None, _listed("--result-filename", OUTPUT, "Default: made of the run's settings.")
    ] = None,
    plot: Annotated[
        Path | None, picture("Draw distributions and timelines into this file (png, svg, pdf).")
    ] = None,
    disable_tqdm: Annotated[
        bool,
        typer.Option(
            "--disable-tqdm", "--no-progress", rich_help_panel=OUTPUT, help="No progress."
        ),
    ] = False,
    **values: Any,
) -> None:
    """Measure, print the block, write what was asked for."""
    words = _sorted_words(
        goodput_words or [], goodput=goodput is not None, metadata=metadata is not None
    )
    loads = _loads(max_concurrency, num_prompts)
    options = BenchOptions(
        **_chosen(values),
        headers=_pairs(header or [], flag="--header"),
        extra_body=json_object("--extra-body", extra_body),
        percentile_metrics=_metrics(percentile_metrics),
        metric_percentiles=_percentiles(metric_percentiles),
        goodput=_goodput([*(goodput or []), *words[0]]),
        metadata=dict(
            pair.split("=", 1) for pair in _pairs([*(metadata or []), *words[1]], flag="--metadata")
        ),
    )
    is_saved = save_result or save_detailed or result_filename is not None
    files = _Files(
        folder=(result_dir or Path()) if is_saved else None,
        name=result_filename,
        detailed=save_detailed,
        plot=plot,
    )
    if files.folder is not None:
        check_result(files.folder / (files.name or "negamax.json"), flag="--result-dir")
    _run_all(options, loads, files, shows_progress=not disable_tqdm)


@dataclass(frozen=True)
class _Files:
    """Where results go."""

    folder: Path | None  # None: they are not saved
    name: str | None  # None: made of the run's settings
    detailed: bool
    plot: Path | None


def _run_all(
    options: BenchOptions,
    loads: Sequence[tuple[int | None, int]],
    files: _Files,
    *,
    shows_progress: bool,
) -> None:
    """Measure each load, print and write its results; of several also the comparison."""
    from negamax.bench import plots, serve_report

    is_sweep = len(loads) > 1
    documents: list[dict[str, Any]] = []
    for number, (concurrency, count) in enumerate(loads):
        # another seed for each run: its prompts must not be in the cache from the one before
        seed = options.seed + number
        one = dataclasses.replace(
            options, max_concurrency=concurrency, num_prompts=count, seed=seed
        )
        measured, summary = _measure(one, shown=shows_progress)
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
    """One run and its figures, with progress on standard error where `shown`."""
    from negamax.bench import serve, serve_report

    progress = serve.RunProgress()
    with _display(progress, shown=shown):
        measured = serve.run(options, progress, loop_factory=_loop_factory())
    return measured, serve_report.summarize(measured, options)


def _compare(documents: Sequence[dict[str, Any]], *, plot: Path | None) -> None:
    """The runs of a sweep in one table and picture; those of single tokens have no TPOT."""
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
    """(max_concurrency, num_prompts) of each run."""
    counts = parse_numbers(num_prompts, flag="--num-prompts")
    if concurrency is None:
        limits: list[int | None] = [None]
    else:
        limits = [*parse_counts(concurrency, flag="--max-concurrency")]
    if len(counts) not in (1, len(limits)):
        raise ConfigError(
            f"--num-prompts has {len(counts)} numbers and --max-concurrency {len(limits)}",
            hint="give one number of prompts, or one for each concurrency",
        )
    return list(zip(limits, counts * (len(limits) if len(counts) == 1 else 1), strict=True))


def _judge(measured: Measurement, summary: dict[str, Any]) -> None:
    """End with the exit code of a run that was interrupted or in which nothing worked."""
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
        raise ConfigError(
            f"the result cannot be written to {str(file)!r}: {error}",
            hint="give another --result-dir",
        ) from None
    print(f"Result: {file}")


# The command line


def _command() -> Any:
    """`_run` with an option per flag of the table."""
    own = Signature.from_callable(_run, eval_str=True).parameters
    parameters = [parameter for name, parameter in own.items() if name != "values"]
    parameters += flag_parameters(BenchOptions, _TABLE, defaults={})

    def run(**values: Any) -> None:
        _run(**values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.flags = _TABLE  # type: ignore[attr-defined]
    return run


command = _command()


def _chosen(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `BenchOptions` that stand in the table."""
    chosen = chosen_fields(_TABLE, values)
    chosen["dataset_name"] = DATASET_ALIASES.get(chosen["dataset_name"], chosen["dataset_name"])
    chosen["api_key"] = chosen["api_key"] or env.get("OPENAI_API_KEY")
    return chosen


def _sorted_words(
    words: list[str], *, goodput: bool, metadata: bool
) -> tuple[list[str], list[str]]:
    """Words that stand after the first value of --goodput or --metadata, as vLLM takes them."""
    found: tuple[list[str], list[str]] = ([], [])
    for word in words:
        if goodput and word.partition(":")[0] in METRICS:
            found[0].append(word)
        elif metadata and "=" in word:
            found[1].append(word)
        else:
            raise ConfigError(
                f"unexpected argument {word[:60]!r}", hint="give the model as --model NAME"
            )
    return found


def _pairs(texts: Sequence[str], *, flag: str) -> tuple[str, ...]:
    for text in texts:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise ConfigError(f"{flag} is {text[:60]!r}; allowed: NAME=VALUE")
    return tuple(texts)


def _metrics(text: str | None) -> tuple[str, ...]:
    names = (
        METRICS if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
    )
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics has {name[:60]!r}; allowed: {', '.join(METRICS)}"
            )
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = (-1.0,)
    if not all(0 < value <= 100 for value in found):
        raise ConfigError(
            f"--metric-percentiles is {text[:60]!r}; allowed: numbers above 0, up to 100, "
            f"separated by commas"
        )
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
    """uvloop's loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


# Progress


@contextmanager
def _display(progress: RunProgress, *, shown: bool) -> Iterator[None]:
    """Show `progress` on standard error, from a thread of its own, until the block ends."""
    if not shown or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    ended = threading.Event()
    with Bars(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        task = bars.add_task("connecting", total=None, rates="")

        def refresh() -> None:
            while not ended.wait(_REFRESH_SECONDS):
                total = progress.total or None
                bars.update(
                    task,
                    description=progress.stage,
                    total=total,
                    completed=progress.done,
                    rates=_rates(progress),
                )
                bars.refresh()

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _rates(progress: RunProgress) -> str:
    """'12.3 req/s, 1,234 tok/s, 2 failed'."""
    if progress.started is None:
        return ""
    seconds = max(time.perf_counter() - progress.started, 1e-3)
    text = f"{progress.done / seconds:.1f} req/s, {progress.output_tokens / seconds:,.0f} tok/s"
    return text + (f", {progress.failed} failed" if progress.failed else "")
