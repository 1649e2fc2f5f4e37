"""Examples of examples.toml, for the help of each command and for the command reference."""

import tomllib
from pathlib import Path

EXAMPLES: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def make_epilog(command: str) -> str:
    """Return the end of a command's help: its examples, in Markdown."""
    return "\n".join(["Examples:", "", "```text", *EXAMPLES[command], "```"])
