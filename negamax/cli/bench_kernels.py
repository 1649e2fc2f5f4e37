"""`negamax bench kernels`: microseconds and percent of the roofline of every kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from negamax.base.errors import EngineError
from negamax.cli.bench_options import JsonFile, parse_counts
from negamax.cli.options import completion
from negamax.options.engine import DEVICES, DTYPES

HELP = (
    "Time every kernel at the sizes of the real models (CPU: small ones), with cold caches, "
    "against the machine's limits."
)


def command(
    op: Annotated[
        list[str] | None,
        typer.Option(help="An op such as norm.add_rms; may be repeated. Default: all."),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            help="Only this provider; 'reference' is timed only when named here.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="bfloat16, float16 or float32.", autocompletion=completion(DTYPES[1:])),
    ] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="auto, cuda or cpu.", autocompletion=completion(DEVICES))
    ] = "auto",
    tp: Annotated[str, typer.Option(help="The slices of these tensor-parallel degrees.")] = "1,2,4",
    json_file: JsonFile = None,
) -> None:
    """Print one line per kernel and case."""
    degrees = parse_counts(tp, flag="--tp")
    from negamax.bench import kernels, report  # torch

    document = kernels.run(
        ops=op or (),
        provider=provider,
        dtype=dtype,
        device=device,
        ranks=degrees,
        say=lambda line: print(line, flush=True),
    )
    if json_file is not None:
        report.write_json(json_file, document)
    if document["failures"]:
        raise EngineError(f"{len(document['failures'])} cases failed")
