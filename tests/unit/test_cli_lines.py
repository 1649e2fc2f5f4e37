import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from negamax.base.errors import ConfigError
from negamax.cli.chat_session import talk
from negamax.cli.chat_view import MarkdownStream, split_blocks
from negamax.cli.io import print_json, print_line, read_text
from negamax.cli.main import main

TEXT = "  ok    hub   /a/folder/that-is-not-broken, 60 GiB free"


def test_lines_wrap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    print_line(TEXT, indent=14)
    assert capsys.readouterr().out == f"{TEXT}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "44")
    print_line(TEXT, indent=14)
    first, second = TEXT[:43].rstrip(), " " * 14 + TEXT[43:].lstrip()
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def locale_of(encoding: str, monkeypatch: pytest.MonkeyPatch, text: bytes = b"") -> io.BytesIO:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    return written


def test_json_is_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    written = locale_of("ascii", monkeypatch, "世界 😀".encode())
    print("first")
    print_json({"text": read_text(), "broken": "\udcff"})
    print_json({"text": "世界 😀"})
    first, broken, whole = written.getvalue().splitlines()
    assert first == b"first" and whole.decode() == '{"text": "世界 😀"}'
    assert json.loads(broken) == {"text": "世界 😀", "broken": "\udcff"}


def test_characters_outside_the_locale_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = locale_of("ascii", monkeypatch)
    assert main(["--version"]) == 0
    print("世 é")
    sys.stdout.flush()
    assert written.getvalue().endswith(b"\\u4e16 \\xe9\n")


def test_input_that_is_no_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    locale_of("utf-8", monkeypatch, b"hi \xff")
    with pytest.raises(ConfigError, match="standard input is not UTF-8: byte 3 is 0xff"):
        read_text()
    locale_of("utf-8", monkeypatch, b"hi \xff")
    with pytest.raises(ConfigError, match="standard input is not UTF-8"):
        talk(SimpleNamespace(awaited_call=None), SimpleNamespace(is_interactive=False))


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("One\n\nTwo", "One\n\n"),
        ("One\n\n", ""),  # The next characters may belong to this block.
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
    text = "# H\n\nOne *two*\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```c\nint i;\n\n```\n\n"
    text += "<div>\nx\n</div>\n\nend"
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
