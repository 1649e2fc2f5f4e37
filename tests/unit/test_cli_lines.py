import io
import json
import sys
from types import SimpleNamespace

import pytest

from negamax.base.errors import ConfigError
from negamax.cli.chat_session import talk
from negamax.cli.io import print_json, print_line, read_text
from negamax.cli.main import main

TEXT = "  ok    hub   /a/folder/that-is-not-broken, 60 GiB free"


def test_lines_wrap_in_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_characters_outside_the_locale_do_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = locale_of("ascii", monkeypatch)
    assert main(["--version"]) == 0
    print("世 é")
    sys.stdout.flush()
    assert written.getvalue().endswith(b"\\u4e16 \\xe9\n")


def test_input_that_is_no_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    locale_of("utf-8", monkeypatch, b"hi \xff")
    with pytest.raises(ConfigError, match="standard input is no UTF-8: byte 3 is 0xff"):
        read_text()
    locale_of("utf-8", monkeypatch, b"hi \xff")
    with pytest.raises(ConfigError, match="standard input is no UTF-8"):
        talk(SimpleNamespace(awaited_call=None), SimpleNamespace(is_interactive=False))
