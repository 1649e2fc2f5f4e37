"""`negamax bench offline MODEL`: prefill and decode speed by batch size, beside the physical
limit.
"""

from pathlib import Path

from rich.console import Console

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.bench.serve_options import WORKLOAD
from negamax.cli.bench_options import json_option, parse_counts, picture
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
    input_len: int = setting(1000, "Set the tokens of each prompt.", panel=WORKLOAD, min=1),
    output_len: int = setting(129, "Set the tokens generated for each.", min=2),
    concurrency: str = setting("1,4,16,64,100", "Set the batch sizes, separated by commas."),
    repeat: int = setting(1, "Measure each this often and keep the median.", min=1),
    temperature: float = setting(1.0, "Set the temperature; 0 is greedy.", min=0.0, max=2.0),
    top_k: int = setting(0, "Set the number of candidates; 0 is off.", min=0),
    top_p: float = setting(1.0, "Set the nucleus; 1 is off.", min=0.0, max=1.0),
    no_distinct_experts: bool = setting(
        False,
        "Do not count the selected experts, which takes a batch of its own without CUDA graphs.",
        "--no-distinct-experts",
    ),
    cached_prompts: bool = setting(
        False,
        "Compute the prompts once and time what follows their cached blocks; for long contexts.",
        "--cached-prompts",
    ),
    json_file: Path | None = json_option(),
    compare: Path | None = setting(None, "Show the ratio to an earlier run's JSON file."),
    plot: Path | None = picture("Draw the times into this file (png, svg, pdf)."),
    bandwidth: float | None = setting(
        None,
        "Set the memory bandwidth of one GPU in TB/s for the limit. Default: that of a copy.",
        "--bandwidth-tb-s",
        min=0.001,
    ),
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
