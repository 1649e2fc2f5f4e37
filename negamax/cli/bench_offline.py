"""`negamax bench offline MODEL`: prefill and decode speed by batch size, beside the physical
limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.bench.serve_options import OUTPUT, WORKLOAD
from negamax.cli.bench_options import JsonFile, parse_counts, picture
from negamax.cli.options import with_options
from negamax.options.engine import EngineOptions

HELP = (
    "Time batches of random prompts: prefill, time to first token, time per output token, and "
    "how far that is from the limit."
)


@with_options(defaults={"log_level": "warning"})
def command(
    *,
    engine: EngineOptions,
    input_len: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt.", rich_help_panel=WORKLOAD)
    ] = 1000,
    output_len: Annotated[
        int, typer.Option(min=2, help="Tokens generated for each.", rich_help_panel=WORKLOAD)
    ] = 129,
    concurrency: Annotated[
        str, typer.Option(help="Batch sizes, separated by commas.", rich_help_panel=WORKLOAD)
    ] = "1,4,16,64,100",
    repeat: Annotated[
        int,
        typer.Option(
            min=1, help="Measurements of each; the median counts.", rich_help_panel=WORKLOAD
        ),
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 is greedy.", rich_help_panel=WORKLOAD)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.", rich_help_panel=WORKLOAD)] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="1 is off.", rich_help_panel=WORKLOAD)
    ] = 1.0,
    no_distinct_experts: Annotated[
        bool,
        typer.Option(
            "--no-distinct-experts",
            help="Do not count the experts that are hit, which takes a batch of its own without "
            "CUDA graphs.",
            rich_help_panel=WORKLOAD,
        ),
    ] = False,
    cached_prompts: Annotated[
        bool,
        typer.Option(
            "--cached-prompts",
            help="Read the prompts once, and time tokens behind what the prefix cache has of them: "
            "for long contexts.",
            rich_help_panel=WORKLOAD,
        ),
    ] = False,
    json_file: JsonFile = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="The JSON file of an earlier run, to show the ratio to.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    plot: Annotated[Path | None, picture("Draw the times into this file (png, svg, pdf).")] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth-tb-s",
            min=0.001,
            help="Memory bandwidth of one GPU in TB/s for the limit; default: that of a copy.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure, print a table, write what was asked for."""
    log.setup(engine.log_level, engine.log_format)
    counts = parse_counts(concurrency, flag="--concurrency")
    if engine.max_num_seqs is not None and engine.max_num_seqs < max(counts):
        raise ConfigError(
            f"--max-num-seqs is {engine.max_num_seqs}; --concurrency needs {max(counts)}"
        )
    from negamax.bench import offline, plots, report  # torch
    from negamax.engine.core.source import locate

    workload = offline.OfflineWorkload(
        input_len=input_len,
        output_len=output_len,
        concurrency=counts,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repeat=repeat,
        seed=engine.seed,
        count_experts=not no_distinct_experts,
        cached_prompts=cached_prompts,
    )
    baseline = (
        None
        if compare is None
        else report.read_baseline(compare, offline.conditions(engine, workload))
    )
    notes = Console(stderr=True, highlight=False)
    document = offline.run(
        engine, workload, say=lambda line: notes.print(line, style="dim", soft_wrap=True)
    )
    (result,) = document["results"]
    spec = locate(engine).spec
    if bandwidth is not None:
        report.add_limits(result, spec, bytes_per_second=bandwidth * 1e12)
    elif result["info"]["device"].startswith("cuda"):
        report.add_limits(result, spec, bytes_per_second=report.copy_bytes_per_second())
    if baseline is not None:
        report.add_comparison(result, baseline)
    if json_file is not None:
        report.write_json(json_file, document)
    Console().print(report.table(result, spec))
    if plot is not None:
        plots.plot_offline(plot, [result] if baseline is None else [result, baseline])
