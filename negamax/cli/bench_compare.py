"""`negamax bench compare`: compare serving benchmarks or accuracies."""

from pathlib import Path

import typer

from negamax.cli.bench_options import picture
from negamax.cli.options import setting

HELP = (
    "Compare result files of `bench serve` or vLLM in a table and a plot of rate over latency, or "
    "two files of `bench accuracy --json` problem by problem."
)


def command(
    files: list[Path] = typer.Argument(
        ...,
        metavar="RESULT.json...",
        help="Files of `bench serve --save-result` or `bench accuracy --json`.",
    ),
    plot: Path | None = picture("Plot throughput over latency into this file (png, svg, pdf)."),
    allow_different_shapes: bool = setting(
        False,
        "Compare results even if models, splits, formats, kernels or versions differ.",
        "--allow-different-shapes",
    ),
    title: str | None = setting(None, "Set the title of the plot (default: the model's name)."),
) -> None:
    """Print a table of runs. Runs with equal label or backend form a series, sorted by load."""
    from negamax.bench import accuracy_compare, serve_compare

    if all(map(serve_compare.is_accuracy, found := [serve_compare.read_json(f) for f in files])):
        print("\n".join(accuracy_compare.compare(files, found)))
        return
    results = serve_compare.read_results(files)
    if not allow_different_shapes:
        serve_compare.check_shapes(results)
    series = serve_compare.group(results)
    print(serve_compare.table(series))
    if plot is not None:
        from negamax.bench import plots

        plots.plot_comparison(plot, series, title=title or str(results[0].get("model_id")))
        print(f"Plot: {plot}")
