import io
import logging
import sys

import pytest

from negamax.base import log, progress
from negamax.base.progress import Progress, format_bytes

GIB = 2**30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(clock: pytest.MonkeyPatch, *, seconds: int, **options: object) -> None:
    now = [100.0]
    clock.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("loading weights", unit=format_bytes, **options) as shown:  # type: ignore[arg-type]
        for part in range(1, 11):
            now[0] += seconds / 10
            shown(part * GIB, 10 * GIB)


def test_a_terminal_gets_one_line_with_amount_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load(monkeypatch, seconds=20)
    drawn = terminal.getvalue()
    assert "loading weights: 2.0 GiB of 10.0 GiB, 512.0 MiB/s, 16 s left" in drawn
    assert "\n" not in drawn and drawn.endswith("\r\x1b[K")


def test_short_and_quiet_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load(monkeypatch, seconds=0)
    load(monkeypatch, seconds=60, enabled=False)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("level", "lines"), [("info", 5), ("warning", 5), ("error", 0)])
def test_off_a_terminal_lines_are_written_unless_only_errors_are_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, lines: int
) -> None:
    log.setup(level)
    load(monkeypatch, seconds=30)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == lines
    assert all("loading weights: " in line and "s left" in line for line in written)
    log.setup()


def test_a_json_log_on_a_terminal_stays_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    log.setup("info", "json")
    load(monkeypatch, seconds=30)
    written = terminal.getvalue().splitlines()
    assert written and all(line.startswith("{") for line in written)
    logging.getLogger().handlers[:] = []
    log.setup()


def test_of_several_ranks_all_log_and_the_first_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("info")
    load(monkeypatch, seconds=30, rank=3)
    assert "rank 3: loading weights: 2.0 GiB of 10.0 GiB" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load(monkeypatch, seconds=30, rank=3)
    assert terminal.getvalue() == ""
    load(monkeypatch, seconds=30, rank=0)
    assert "rank 0: loading weights" in terminal.getvalue()
