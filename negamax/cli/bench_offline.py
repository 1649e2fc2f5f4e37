"""`negamax bench offline MODEL`: prefill and decode speed by batch size, beside the physical
limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.bench.serve_options import OUTPUT, WORKLOAD
from negamax.cli.bench_options import JsonFile, parse_counts, picture
from negamax.cli.options import setting, with_options
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
        int, setting("Set the tokens of each prompt.", panel=WORKLOAD, min=1)
    ] = 1000,
    output_len: Annotated[
        int, setting("Set the tokens generated for each.", panel=WORKLOAD, min=2)
    ] = 129,
    concurrency: Annotated[
        str, setting("Set the batch sizes, separated by commas.", panel=WORKLOAD)
    ] = "1,4,16,64,100",
    repeat: Annotated[
        int, setting("Measure each this often and keep the median.", panel=WORKLOAD, min=1)
    ] = 1,
    temperature: Annotated[
        float, setting("Set the temperature; 0 is greedy.", panel=WORKLOAD, min=0.0, max=2.0)
    ] = 1.0,
    top_k: Annotated[
        int, setting("Set the number of candidates; 0 is off.", panel=WORKLOAD, min=0)
    ] = 0,
    top_p: Annotated[
        float, setting("Set the nucleus; 1 is off.", panel=WORKLOAD, min=0.0, max=1.0)
    ] = 1.0,
    no_distinct_experts: Annotated[
        bool,
        setting(
            "Do not count the selected experts, which takes a batch of its own without CUDA "
            "graphs.",
            "--no-distinct-experts",
            panel=WORKLOAD,
        ),
    ] = False,
    cached_prompts: Annotated[
        bool,
        setting(
            "Compute the prompts once and time what follows their cached blocks; for long "
            "contexts.",
            "--cached-prompts",
            panel=WORKLOAD,
        ),
    ] = False,
    json_file: JsonFile = None,
    compare: Annotated[
        Path | None, setting("Show the ratio to an earlier run's JSON file.", panel=OUTPUT)
    ] = None,
    plot: Annotated[Path | None, picture("Draw the times into this file (png, svg, pdf).")] = None,
    bandwidth: Annotated[
        float | None,
        setting(
            "Set the memory bandwidth of one GPU in TB/s for the limit. Default: that of a copy.",
            "--bandwidth-tb-s",
            panel=OUTPUT,
            min=0.001,
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
