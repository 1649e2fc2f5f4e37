"""`negamax bench kernels`: microseconds and percent of the roofline of every kernel."""

from __future__ import annotations

from typing import Annotated

from negamax.base.errors import EngineError
from negamax.cli.bench_options import JsonFile, parse_counts
from negamax.cli.options import setting
from negamax.options.engine import DEVICES, DTYPES

HELP = (
    "Time every kernel at the sizes of the real models (CPU: small ones), with cold caches, "
    "against the machine's limits."
)


def command(
    op: Annotated[
        list[str] | None,
        setting("Time this op, such as norm.add_rms; may be repeated. Default: all."),
    ] = None,
    provider: Annotated[
        str | None,
        setting("Time only this provider; 'reference' is timed only when named here."),
    ] = None,
    dtype: Annotated[
        str, setting("Compute in bfloat16, float16 or float32.", choices=DTYPES[1:])
    ] = "bfloat16",
    device: Annotated[str, setting("Run on auto, cuda or cpu.", choices=DEVICES)] = "auto",
    tp: Annotated[str, setting("Use the shapes of these tensor-parallel sizes.")] = "1,2,4",
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
