"""Split of streamed Markdown into a final part and one that may change."""

import io

import pytest
from rich.console import Console

from negamax.cli.chat_view import MarkdownStream, split_blocks


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("One\n\nTwo", "One\n\n"),
        ("One\n\n", ""),  # the next characters may belong to it
        ("One\nmore", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nText", "```\na\n\nb\n```\n\n"),
        ("~~~~\n```\n\n~~~~\n\nx", "~~~~\n```\n\n~~~~\n\n"),
        ("- one\n\n- two\n\n  more\n\nText", "- one\n\n- two\n\n  more\n\n"),
        ("1. one\n\n2", "1. one\n\n"),
        ("1. one\n\n2. two", ""),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
    ],
)
def test_only_complete_blocks_are_final(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text[len(complete) :])


def test_stream_shows_what_the_whole_would() -> None:
    text = (
        "# H\n\nOne *two*\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```c\nint "
        "i;\n\n```\n\n<div>\nx\n</div>\n\nend"
    )
    shown = []
    for step in (1, 7, len(text)):
        console = Console(file=io.StringIO(), width=60)
        stream = MarkdownStream(console)
        for start in range(0, len(text), step):
            stream.push(text[start : start + step])
        stream.finish()
        shown.append(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert shown[0] == shown[1] == shown[2]
    assert "<div>" in shown[0] and "int" in shown[0]
