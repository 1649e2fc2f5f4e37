"""`negamax bench kernels`: measure microseconds and percent of the roofline of every kernel."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import negamax
from negamax.base.errors import ConfigError, EngineError
from negamax.cli.bench_options import json_option, parse_counts, write_json
from negamax.cli.options import setting
from negamax.options.engine import DEVICES, DTYPES

HELP = (
    "Time every kernel with cold caches, and compare the times with the machine's limits. GPUs "
    "use sizes of published models; CPUs use small sizes. The command needs a repository clone."
)


def command(
    op: list[str] | None = setting(
        None, "Time this op, such as norm.add_rms; may be repeated. Default: all ops."
    ),
    provider: str | None = setting(
        None, "Time only this provider. The provider 'reference' is not timed by default."
    ),
    dtype: str = setting(
        "bfloat16", "Compute in bfloat16, float16 or float32.", choices=DTYPES[1:]
    ),
    device: str = setting("auto", "Select the device: auto, cuda or cpu.", choices=DEVICES),
    tp: str = setting("1,2,4", "Use the matrix shapes of these tensor-parallel sizes."),
    json_file: Path | None = json_option(),
) -> None:
    """Print one line per kernel and case."""
    degrees = parse_counts(tp, flag="--tp")
    names = {"ops": op or (), "provider": provider, "dtype": dtype, "device": device}
    document = _import_tool().run(**names, ranks=degrees, say=partial(print, flush=True))
    write_json(json_file, document)
    if document["failures"]:
        raise EngineError(f"{len(document['failures'])} cases failed")


def _import_tool() -> ModuleType:
    """Import tools/bench_kernels.py, which is not in the wheel. Raises `ConfigError`."""
    root = Path(negamax.__file__).parents[1]
    if not (root / "tools" / "bench_kernels.py").is_file():
        raise ConfigError(
            "negamax bench kernels needs a clone of the repository; this is an installed wheel",
            hint="clone the repository and run `pip install -e .` there",
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("tools.bench_kernels")
