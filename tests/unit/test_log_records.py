import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from negamax.api.load_report import LoadReport
from negamax.api.measurements import NUM_COLUMNS, Measurements
from negamax.api.recorder import ChoiceRecord, RequestRecord
from negamax.base import env, log
from negamax.base.errors import RequestTimeoutError
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.wire import EngineStats
from negamax.scheduler.request import SamplingParams


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
        "spawn('tests.unit.test_log_records', variables=number).wait()"
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
