import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from negamax.api.load_report import LoadReport
from negamax.api.measurements import NUM_COLUMNS, Measurements
from negamax.api.recorder import ChoiceRecord, RequestRecord
from negamax.base import env, log, log_output, progress
from negamax.base.errors import RequestTimeoutError
from negamax.base.log_output import RateLimit, StderrHandler, TextFormatter
from negamax.base.progress import Progress, format_bytes
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.wire import EngineStats
from negamax.scheduler.request import SamplingParams

FORMATTER = TextFormatter("%(levelname)s %(name)s: %(message)s")


def record(
    message: str, *args: object, level: int = logging.WARNING, name: str = "negamax.test"
) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, message, args, None)


def test_control_characters_and_exceptions_forge_no_line() -> None:
    path = "/a\nERROR negamax: forged\r\x1b[2J\x7f\x9b\u2028\u202e"
    escaped = r"/a\nERROR negamax: forged\r\x1b[2J\x7f\x9b\u2028\u202e"
    line = FORMATTER.format(record("path %s", f"{path}\u00e9"))
    assert line == f"WARNING negamax.test: path {escaped}\u00e9"
    line = FORMATTER.format(record("table:\n%s", "a\nb\x07"))
    assert line == "WARNING negamax.test: table:\n    a\n    b\\x07"
    try:
        raise ValueError("bad\nERROR negamax: forged\x1b[2J")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    first, *others = FORMATTER.format(failed).splitlines()
    assert first == "WARNING negamax.test: failed"
    assert all(line.startswith("    ") and "\x1b" not in line for line in others)


def test_warnings_of_one_kind_are_rate_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RateLimit()
    passed = sum(bool(limit.filter(record("bad request from %s", number))) for number in range(500))
    assert passed == 20
    assert limit.filter(record("another kind"))
    assert all(limit.filter(record("request %s", 1, level=logging.INFO)) for _ in range(500))
    now = time.monotonic()
    monkeypatch.setattr(log_output.time, "monotonic", lambda: now + 11.0)
    later = record("bad request from %s", "100 % of them")
    assert limit.filter(later)
    assert later.getMessage() == "bad request from 100 % of them (and 480 more of this kind before)"


def test_an_unread_pipe_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        handler = StderrHandler()
        handler.setFormatter(FORMATTER)
        for number in range(5000):  # The lines are far longer than the 64 KiB that a pipe holds.
            handler.emit(record("line %d %s", number, "x" * 200))
        assert os.get_blocking(write)  # Other users of the pipe may need it to block.
        text = b""
        while b"line 4999 " not in text:
            text += os.read(read, 65536)
            handler.flush()
    lines = text.decode().splitlines()
    assert lines[0].startswith("WARNING negamax.test: line 0 ")
    assert any(line.endswith("log lines are lost: standard error was not read)") for line in lines)
    os.close(read)


def test_a_replaced_standard_error_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    handler = StderrHandler()
    handler.setFormatter(FORMATTER)
    handler.emit(record("one"))
    assert first.getvalue() == "WARNING negamax.test: one\n"
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    handler.emit(record("two"))
    assert second.getvalue() == "WARNING negamax.test: two\n"


def test_the_last_lines_of_a_process_are_written() -> None:
    warn = "log.get_logger('negamax.x').warning('the end of %s', 'it')"
    code = f"from negamax.base import log; log.setup(); {warn}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("WARNING negamax.x: the end of it\n")


# --- progress ------------------------------------------------------------------------------------


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


def test_progress_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    load(monkeypatch, seconds=20)
    drawn = terminal.getvalue()
    assert "loading weights: 2.0 GiB of 10.0 GiB, 512.0 MiB/s, 16 s left" in drawn
    assert "\n" not in drawn and drawn.endswith("\r\x1b[K")
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


def stats(**fields: Any) -> EngineStats:
    empty: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__[:9], 0)
    return EngineStats(**{**empty, "num_kv_blocks": 100, "num_free_kv_blocks": 100, **fields})


def test_load_covers_the_time_between_two_reports() -> None:
    report = LoadReport(stats(), now=0.0)
    assert report.next(stats(), now=10.0) is None
    busy = stats(
        num_running=3, num_waiting=1, num_free_kv_blocks=75, step_count=40, prompt_tokens=1000,
        cached_prompt_tokens=400, generated_tokens=200, prefill_tokens=600,
    )  # fmt: skip
    assert report.next(busy, now=20.0) == {
        "running": 3, "waiting": 1, "kv_cache_usage": 0.25, "prefill_tokens_per_s": 60.0,
        "decode_tokens_per_s": 20.0, "prefix_cache_hit_rate": 0.4,
    }  # fmt: skip
    stuck = report.next(busy, now=30.0)  # A sequence without progress still counts as load.
    assert stuck is not None and stuck["decode_tokens_per_s"] == 0.0
    later = report.next(stats(step_count=42, generated_tokens=210), now=40.0)
    assert later is not None and later["decode_tokens_per_s"] == 1.0
    assert report.next(stats(step_count=42, generated_tokens=210), now=50.0) is None


@pytest.mark.parametrize(
    ("reasons", "error", "expected"),
    [
        ({0: "stop", 1: "length"}, None, "stop,length"),
        ({0: "stop"}, None, "abort"),
        ({0: "stop"}, asyncio.CancelledError(), "abort"),
        ({}, RequestTimeoutError("late", code="request_timeout"), "request_timeout"),
        ({}, ValueError("x"), "error"),
    ],
)
def test_record_holds_the_end_of_a_request(
    reasons: dict[int, str], error: BaseException | None, expected: str
) -> None:
    record = RequestRecord(
        request_id="r", http_request_id="h", route="/", model="m", headers={}, num_prompt_tokens=1,
        is_stream=False, arrival=0.0, sampling=SamplingParams(n=2), error=error,
        measured=Measurements(SharedNumbers(NUM_COLUMNS), index=0),
        choices={index: ChoiceRecord(finish_reason=reason) for index, reason in reasons.items()},
    )  # fmt: skip
    assert record.finish_reason == expected


@pytest.mark.parametrize("replica", [None, 1])
@pytest.mark.parametrize(("level", "log_format"), [("debug", "json"), ("error", "text")])
def test_child_logs_as_its_parent(level: str, log_format: str, replica: int | None) -> None:
    parent = (
        "from negamax.base import log; from negamax.base.supervision import spawn;"
        f"log.setup({level!r}, {log_format!r});"
        f"number = {{log.CHILD_VARIABLE: log.settings({replica})}};"
        "spawn('tests.unit.test_log_output', variables=number).wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert len(lines) == {"debug": 2, "error": 1}[level]
    if log_format == "json":
        assert [json.loads(line)["level"] for line in lines] == ["debug", "error"]
        assert json.loads(lines[1])["tokens"] == 3 and "ZeroDivisionError" in lines[1]
        assert [json.loads(line).get("replica") for line in lines] == [replica] * 2
    else:
        assert ("replica 1: negamax.test: second" in lines[0]) == (replica == 1)


def test_uncaught_errors_of_all_threads_are_json_lines() -> None:
    code = (
        "import threading; from negamax.base import log; log.setup('info', 'json');"
        "thread = threading.Thread(target=lambda: 1 // 0); thread.start(); thread.join();"
        "raise ValueError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    first, second = [json.loads(line) for line in done.stderr.splitlines()]
    assert first["level"] == "critical" and "ZeroDivisionError" in first["exception"]
    assert second["message"] == "uncaught ValueError" and "the end" in second["exception"]


def in_the_child() -> None:
    log.setup_as_parent()
    logger = logging.getLogger("negamax.test")
    logger.debug("first")
    try:
        _ = 1 // 0
    except ZeroDivisionError as error:
        assert log.settings() == env.get(log.CHILD_VARIABLE)
        shown = error if log.settings().endswith("json") else None
        logger.error("second", exc_info=shown, extra={"fields": {"tokens": 3}})


if __name__ == "__main__":
    in_the_child()
