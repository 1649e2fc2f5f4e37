"""`negamax bench compare`: results of several serving benchmarks in one table and one picture."""

from pathlib import Path

import typer

from negamax.cli.bench_options import picture
from negamax.cli.options import setting

HELP = "Compare results of `bench serve` (or of vLLM's): a table, and throughput against latency."


def command(
    files: list[Path] = typer.Argument(
        ..., metavar="RESULT.json...", help="Files of --save-result."
    ),
    plot: Path | None = picture("Draw throughput against latency into this file (png, svg, pdf)."),
    allow_different_shapes: bool = setting(
        False,
        "Compare results of different models, splits, formats, kernels or versions.",
        "--allow-different-shapes",
    ),
    title: str | None = setting(None, "Set the title of the picture. Default: the model."),
) -> None:
    """Runs with the same label (else backend) make one line, by rising concurrency or rate."""
    from negamax.bench import serve_compare

    results = serve_compare.read_results(files)
    if not allow_different_shapes:
        serve_compare.check_shapes(results)
    series = serve_compare.group(results)
    print(serve_compare.table(series))
    if plot is not None:
        from negamax.bench import plots

        plots.plot_comparison(plot, series, title=title or str(results[0].get("model_id")))
        print(f"Plot: {plot}")
