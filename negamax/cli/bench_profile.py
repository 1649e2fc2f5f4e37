"""`negamax bench profile MODEL`: measure microseconds and launches per layer of a decode step."""

from functools import partial
from pathlib import Path

from rich.console import Console

from negamax.base import log
from negamax.bench.serve_options import OUTPUT, WORKLOAD
from negamax.cli.bench_options import json_option, parse_counts, write_json
from negamax.cli.options import add_options, setting
from negamax.options.engine import EngineOptions

HELP = (
    "Record the kernels of decode steps, or on a CPU the operators. Print the microseconds and "
    "launches per layer for each operation."
)


@add_options(defaults={"log_level": "warning"})
def command(
    *,
    engine: EngineOptions,
    batch: str = setting("1,16,100", "Set the batch sizes, separated by commas.", panel=WORKLOAD),
    context: int = setting(1000, "Set the number of tokens in each sequence.", min=1),
    steps: int = setting(20, "Record this many steps.", min=1),
    list_kernels: bool = setting(
        False, "List the kernels of each operation by name.", "--list-kernels", panel=OUTPUT
    ),
    json_file: Path | None = json_option(),
) -> None:
    """Record a decode step, print a table, and write the requested files."""
    log.setup(engine.log_level, engine.log_format)
    batches = parse_counts(batch, flag="--batch")
    from negamax.bench import profile, report  # imports torch

    notes = Console(stderr=True, highlight=False)
    say = partial(notes.print, style="dim", soft_wrap=True)
    document = profile.run(engine, batches=batches, context=context, steps=steps, say=say)
    (result,) = document["results"]
    write_json(json_file, document)
    headings, rows = profile.table_rows(result)
    title = (
        f"{result['model']}, {result['num_layers']} layers, "
        f"TP{result['tensor_parallel_size']}, context {context}"
    )
    console = Console()
    console.print(report.rows_table(headings, rows, title=title))
    if list_kernels:
        entries = [entry for run in result["runs"] for entry in run["operations"]]
        for operation, found in {each["operation"]: each["kernels"] for each in entries}.items():
            console.print(f"{operation}: {', '.join(found)}", soft_wrap=True, markup=False)
