"""Read examples.toml for the help of each command and for the command reference."""

from negamax.base.tables import read_table

EXAMPLES: dict[str, list[str]] = read_table(__file__)


def make_epilog(command: str) -> str:
    """Return the end of a command's help: its examples, in Markdown."""
    return "\n".join(["Examples:", "", "```text", *EXAMPLES[command], "```"])
