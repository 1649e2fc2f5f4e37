"""Print the reference of the command line as Markdown.

    python -m tools.cli_reference

`make docs` renders the reference as the page cli.md.
"""

import sys
from collections.abc import Iterator
from typing import Any

import typer

from negamax.cli.examples import EXAMPLES
from negamax.cli.main import app
from negamax.cli.resolve import options_of
from negamax.cli.words import Option
from negamax.options.flags import Kind
from negamax.options.foreign import BENCH, SERVER, foreign_options
from tools.api_reference import table_cell

PAGE = "cli.md"  # name of the rendered page in docs/
INTRODUCTION = """# Command line

An option is set by its flag, else by the environment variable `NEGAMAX_<OPTION>`
(`NEGAMAX_MAX_NUM_SEQS=64`), else by the TOML file that `--config` or `NEGAMAX_CONFIG` names, else
by its default. The keys of the file are option names, with dashes or underscores:

```toml
model = "MiniMaxAI/MiniMax-M2.5"
tensor-parallel-size = 4
max-model-len = "128k"
served-model-name = ["minimax", "default"]
enable-prefix-caching = false
```

`--explain` checks a command line, prints each option with its value and its source, and exits.
Switches have a `--no-` form. Underscores count as dashes. `negamax --install-completion` sets up
the shell. Numbers may have units: `128k` is 128,000, `128K` is 131,072, and `auto` is the default.
Sizes are in bytes, or have `K`, `M`, `G` (powers of 1,000) or `Ki`, `Mi`, `Gi`. An error is one
line on standard error with exit code 2, also if the output cannot be written. If the reader of the
output has closed it, as after `| head`, the exit code is 141.
"""
FOREIGN = """## Options of vLLM and SGLang

The tables above list other servers' names of the same options in the column "also". These are the
remaining options of `vllm serve` 0.33 and `sglang.launch_server` 0.5.23, and some older ones. At
start, the server logs a line for each option without effect. The server refuses options that would
change its answers or its model, and names an alternative. It accepts values that request nothing,
such as `--pipeline-parallel-size 1`, without a log line. JSON options may be given in parts, as in
`--compilation-config.cudagraph_mode NONE`.
"""
BENCHMARKS = """## Options of their benchmarks

`negamax bench serve` treats the remaining options of `vllm bench serve` 0.33 and
`sglang.bench_serving` 0.5.23 in the same way. A unique beginning of a name counts as the name.
"""


def render() -> str:
    parts = [INTRODUCTION]
    seen: set[str] = set()
    for name, command in _commands(typer.main.get_command(app)):
        parts += [f"## negamax {name}\n", f"{table_cell(command.help or '')}\n"]
        parts += ["```sh", *EXAMPLES[name], "```", ""]
        parts += _panels(command, seen)
    return "\n".join([*parts, FOREIGN, *_foreign(SERVER), BENCHMARKS, *_foreign(BENCH)])


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _panels(command: Any, seen: set[str]) -> Iterator[str]:
    """Make a table per panel. Options of earlier commands, which `seen` lists, are only named."""
    options = {option.name: option for option in options_of(command)}
    panels: dict[str, list[str]] = {}
    known = []
    for parameter in command.params:
        row = _row(parameter, options.get(parameter.name))
        if row in seen:
            option = options.get(parameter.name)
            known.append(f"`{option.flag if option else parameter.metavar}`")
        elif not getattr(parameter, "hidden", False):
            seen.add(row)
            panel = getattr(parameter, "rich_help_panel", None) or "General"
            panels.setdefault(panel, []).append(row)
    head = ["", "| option | also | default | |", "|---|---|---|---|"]
    for panel, rows in panels.items():
        yield "\n".join([f"**{panel}**", *head, *rows, ""])
    if known:
        yield f"As above: {', '.join(known)}.\n"


def _row(parameter: Any, option: Option | None) -> str:
    help_text = (parameter.help or "").partition(" [also: ")[0]
    if option is None:
        return f"| `{parameter.metavar}` | | | {table_cell(help_text)} |"
    listed = " ".join(f"`{name}`" for name in parameter.opts)
    also = " ".join(f"`{name}`" for name in option.names if name not in parameter.opts)
    hidden = option.kind is Kind.SWITCH or parameter.default in (None, ())
    default = "" if hidden else f"`{parameter.default}`"
    return f"| {listed} | {also} | {default} | {table_cell(help_text)} |"


def _foreign(table: str) -> Iterator[str]:
    """Make a table per treatment, with one row per reason."""
    titles = {"ignored": "Without effect", "refused": "Refused", "by value": "By their value"}
    rows: dict[str, dict[tuple[str, str | None], list[str]]] = {title: {} for title in titles}
    for name, entry in foreign_options(table).items():
        treatment = "ignored" if entry.remedy is None else "refused"
        reason = entry.reason
        if entry.rule is not None:
            treatment, reason = "by value", entry.about
        rows[treatment].setdefault((reason, entry.remedy), []).append(name)
    for treatment, title in titles.items():
        yield f"### {title}{' in benchmarks' if table == BENCH else ''}\n"
        refused = treatment == "refused"
        full, short = "| because | instead | options |\n|---|---|---|", "| | options |\n|---|---|"
        yield full if refused else short
        for (reason, remedy), names in rows[treatment].items():
            options = " ".join(f"`{name}`" for name in names)
            cells = [reason, *([remedy or ""] if refused else []), options]
            yield f"| {' | '.join(map(table_cell, cells))} |"
        yield ""


if __name__ == "__main__":
    sys.stdout.write(render())
