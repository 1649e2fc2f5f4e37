"""`negamax bench offline MODEL`: measure prefill and decode speed by batch size."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.bench.offline_options import OfflineWorkload
from negamax.bench.serve_options import WORKLOAD
from negamax.cli.bench_options import json_option, parse_counts, picture, write_json
from negamax.cli.options import add_options, setting
from negamax.options.engine import EngineOptions

HELP = (
    "Time batches of random prompts. Print the prefill speed, the time to first token, the time "
    "per output token, and the percentage of the physical limit that decoding reaches."
)


@add_options(defaults={"log_level": "warning"})
def command(
    *,
    engine: EngineOptions,
    workload: OfflineWorkload,
    concurrency: str = setting(
        "1,4,16,64,100", "Set the batch sizes, separated by commas.", panel=WORKLOAD
    ),
    json_file: Path | None = json_option(),
    compare: Path | None = setting(None, "Compare with the results in this JSON file."),
    plot: Path | None = picture("Plot the times into this file (png, svg, pdf)."),
    bandwidth: float | None = setting(
        None,
        "Set a GPU's memory bandwidth in TB/s for the limit (default: measure the bandwidth).",
        "--bandwidth-tb-s",
        min=0.001,
    ),
) -> None:
    """Measure the model, print a table, and write the requested files."""
    log.setup(engine.log_level, engine.log_format)
    counts = parse_counts(concurrency, flag="--concurrency")
    if engine.max_num_seqs is not None and engine.max_num_seqs < max(counts):
        raise ConfigError(
            f"--concurrency {max(counts)} needs --max-num-seqs {max(counts)} or more; it is "
            f"{engine.max_num_seqs}"
        )
    from negamax.bench import offline, plots, report  # imports torch
    from negamax.engine.core.source import locate

    workload = replace(workload, concurrency=counts, seed=engine.seed)
    baseline = None
    if compare is not None:
        baseline = report.read_baseline(compare, offline.conditions(engine, workload))
    notes = Console(stderr=True, highlight=False)
    say = partial(notes.print, style="dim", soft_wrap=True)
    document = offline.run(engine, workload, say=say)
    (result,) = document["results"]
    spec = locate(engine).spec
    if bandwidth is not None:
        report.add_limits(result, spec, bytes_per_second=bandwidth * 1e12)
    elif result["info"]["device"].startswith("cuda"):
        report.add_limits(result, spec, bytes_per_second=report.copy_bytes_per_second())
    if baseline is not None:
        report.add_comparison(result, baseline)
    write_json(json_file, document)
    Console().print(report.table(result, spec))
    if plot is not None:
        plots.plot_offline(plot, [result] if baseline is None else [result, baseline])
