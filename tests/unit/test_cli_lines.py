"""Long lines of text in a terminal."""

from __future__ import annotations

import sys

import pytest

from negamax.cli.lines import print_line

TEXT = "  ok    hub   /a/folder/that-is-not-broken, 60 GiB free"


def test_lines_break_between_words_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_line(TEXT, indent=14)
    assert capsys.readouterr().out == f"{TEXT}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "44")
    print_line(TEXT, indent=14)
    first, second = TEXT[:43].rstrip(), " " * 14 + TEXT[43:].lstrip()
    assert capsys.readouterr().out == f"{first}\n{second}\n"
