"""`negamax convert SRC DST --to FORMAT`: write a checkpoint in another weight format."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from negamax import __version__
from negamax.base import log
from negamax.base.errors import ConfigError, NegamaxError, check_choice
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.hub import resolve_model
from negamax.checkpoint.split import is_split
from negamax.cli.options import setting
from negamax.config.embedded import QUOTED_NAMES
from negamax.convert.targets import TARGETS, find_target
from negamax.options.engine import SOURCES
from negamax.options.parallel import ParallelOptions

if TYPE_CHECKING:
    from negamax.convert.convert import Conversion
    from negamax.convert.verify import Difference

HELP = f"""Write a checkpoint in another weight format.

SRC is a folder, a hub id, or {QUOTED_NAMES}; DST is a new folder. Each layer becomes one file. The
same command, run again, continues an interrupted conversion. Tokenizer, chat template and
generation config are copied. Quantized weights are rounded a second time only with `--allow-lossy`.
"""
_WORST = 10


def command(
    *,
    source: str = typer.Argument(
        ..., metavar="SRC", help=f"A local folder, a hub id, or {QUOTED_NAMES}."
    ),
    destination: Path = typer.Argument(..., metavar="DST", help="The folder for the result."),
    to: str | None = setting(
        None,
        f"Write this format: {', '.join(TARGETS)}. Default: the format of SRC.",
        choices=TARGETS,
    ),
    tensor_parallel_size: int = setting(
        1,
        "Split the files for this many ranks, so that a rank reads only its own files.",
        *("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        min=1,
    ),
    expert_parallel_size: int = setting(
        1,
        "Split the experts over this many ranks; `negamax serve` needs the same size.",
        *("--expert-parallel-size", "--ep-size", "--ep"),
        min=1,
    ),
    allow_lossy: bool = setting(
        False, "Allow rounding of weights that are already quantized.", "--allow-lossy"
    ),
    verify: bool = setting(
        False, "Compare the written weights with SRC and print the errors.", "--verify"
    ),
    revision: str | None = setting(None, "Read this branch, tag or commit of a hub model."),
    hub: str = setting(
        "auto",
        "Choose the hub: huggingface, modelscope, or auto. auto selects huggingface, or modelscope "
        "if NEGAMAX_USE_MODELSCOPE is 1.",
        "--source",
        choices=SOURCES,
    ),
    download_dir: str | None = setting(None, "Download to this folder (default: the hub's cache)."),
) -> None:
    """Exit with 1 if `--verify` finds a weight whose error is too large for its format."""
    log.setup()
    if to is None and tensor_parallel_size == 1 and not is_split(Path(source).expanduser()):
        allowed = ", ".join(TARGETS)
        raise ConfigError(f"--to is missing; allowed: {allowed}", hint="pass --to NAME or -tp N")
    splits = ParallelOptions(tensor_parallel_size, expert_parallel_size=expert_parallel_size)
    target = None if to is None else find_target(to)
    check_choice("--source", hub, SOURCES)

    def conversion_of(folder: Path) -> Conversion:
        from negamax.convert.convert import Conversion

        return Conversion(
            model=source,
            folder=folder,
            destination=destination.expanduser(),
            target=target,
            tp=splits.tensor_parallel_size,
            ep=splits.num_expert_ranks,
            revision=revision,
            allow_lossy=allow_lossy,
            version=__version__,
            command=shlex.join(["negamax", *sys.argv[1:]]),
        )

    def check(folder: Path) -> None:
        from negamax.convert.convert import check_description

        check_description(conversion_of(folder))

    conversion = conversion_of(resolve_model(source, revision, download_dir, hub, check=check))
    # Importing torch takes seconds, and the checks above do not need it.
    from negamax.checkpoint.reader import list_first
    from negamax.convert.convert import convert
    from negamax.convert.verify import compare

    with Progress("converting", unit=format_bytes) as progress:
        checkpoint = convert(conversion, progress=progress)
    ranks = f", split for {tensor_parallel_size} ranks" if tensor_parallel_size > 1 else ""
    print(f"{destination}: {source} as {target.summary if target else 'it is stored'}{ranks}")
    if verify:
        with Progress("comparing", unit=format_bytes) as progress:
            differences = compare(checkpoint, conversion.destination, progress=progress)
        _show(differences)
        if damaged := [one.name for one in differences if one.error > one.limit(target)]:
            raise NegamaxError(
                f"{len(damaged)} weights have errors that are too large for their format: "
                f"{list_first(damaged)}",
                hint=f"remove {destination} and convert again",
            )


def _show(differences: list[Difference]) -> None:
    from negamax.convert.verify import group_by_kind

    changed = [one for one in differences if one.error]
    table = Table("weights", "format", "count", "mean error", "largest", title="|W' - W| / |W|")
    for column in table.columns[:2]:
        column.overflow = "fold"
    for kind in group_by_kind(changed):
        name = kind.kind.removesuffix(".weight").removeprefix("model.layers.*.")
        numbers = (str(kind.count), f"{kind.mean:.3%}", f"{kind.largest:.3%}")
        table.add_row(name, kind.format, *numbers)
    worst = Table("farthest from the source", "error")
    for one in sorted(changed, key=lambda one: -one.error)[:_WORST]:
        worst.add_row(one.name, f"{one.error:.3%}")
    console = Console()
    if changed:
        console.print(table, worst)
    console.print(f"{len(differences) - len(changed)} of {len(differences)} weights are unchanged")
