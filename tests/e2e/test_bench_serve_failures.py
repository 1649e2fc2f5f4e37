import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from negamax.bench.serve import arrivals
from negamax.bench.serve_options import BenchOptions
from tests.e2e.bench_command import Bench
from tests.e2e.faulty_server import (
    STREAM,
    Fault,
    FaultyServer,
    chunk,
    faulty_server,
    good_stream,
    text_chunk,
    whole,
)
from tests.tables import read_table

SMALL = "--num-prompts 4 --num-warmups 0 --input-len 8 --output-len 6 --max-concurrency 1"


def answering(*answers: bytes) -> Fault:
    """Send the answers in turn. The last answer also goes to all further requests."""

    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(answers[min(number, len(answers) - 1)])

    return fault


def url(server: FaultyServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def run(bench: Bench, *answers: bytes, line: str = SMALL) -> dict[str, Any]:
    with faulty_server(answering(*answers)) as server:
        return bench(url(server), line)


def test_every_kind_of_failure_is_counted_and_the_good_answers_are_measured(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        answers = [
            good_stream(),
            whole(500, {"error": {"message": "kaput"}}),
            whole(429, {"error": {"message": "full"}}, headers="retry-after: 7\r\n"),
            STREAM + text_chunk("x"),
            STREAM + chunk({"error": {"message": "engine died"}}) + b"0\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"",
            whole(200, {"choices": []}),
            good_stream(),
            STREAM + chunk("{broken") + b"0\r\n\r\n",
        ]
        writer.write(answers[number])
        if number in (3, 6):
            writer.close()

    with faulty_server(fault) as server:
        found = bench(url(server), f"{SMALL} --num-prompts 10")
    assert bench.code == 0
    assert (found["completed"], found["failed"], found["output_lens"][0]) == (2, 8, 6)
    assert found["failures"] == {
        "connection closed before the answer ended": 2, "HTTP 500": 1, "HTTP 429": 1,
        "error in the stream": 1, "malformed HTTP answer: Expected HTTP/, RTSP/ or ICE/": 1,
        "nothing instead of an event stream": 1, "unreadable chunk": 1,
    }  # fmt: skip
    assert found["failure_examples"]["HTTP 429"] == "Retry-After 7: full"
    assert found["errors"][1] == "HTTP 500" and found["ttfts"][1] is None
    assert re.search(r"HTTP 500: +1\n    kaput", bench.out)


def test_exit_code_is_one_without_answers(bench: Bench) -> None:
    found = run(bench, whole(503, {"error": {"message": "draining"}}))
    assert bench.code == 1
    assert found["failed"] == 4
    assert "Serving Benchmark Result" in bench.out
    assert bench.err.strip() == "negamax: error: all 4 requests failed: HTTP 503 (4)"
    bench("http://127.0.0.1:9", "--num-prompts 1")
    assert bench.code == 1
    assert "http://127.0.0.1:9 does not answer: connection refused" in bench.err


def test_without_usage_chunks_are_counted_and_that_is_said(bench: Bench) -> None:
    found = run(bench, good_stream(5, usage=False))
    assert found["output_lens"] == [5] * 4
    assert found["input_lens"] == [8] * 4  # The benchmark sends 8 token ids per prompt.
    assert "counted as chunks for 4 requests" in bench.out
    assert found["total_cached_tokens"] is None and "Cached" not in bench.out


def test_connections_are_kept_and_a_stale_one_is_replaced_without_a_failure(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.close()  # The server closes when the client uses the kept connection again.
        else:
            writer.write(good_stream())

    with faulty_server(fault) as server:
        assert bench(url(server), SMALL)["failed"] == 0
        assert server.connections == 2
        assert server.bodies[2] == server.bodies[3]  # sent again
        assert [body["max_tokens"] for body in server.bodies] == [6] * 5
        assert [body["stream_options"] for body in server.bodies] == [{"include_usage": True}] * 5


def test_requests_are_sent_when_the_rate_says(bench: Bench) -> None:
    more = "--num-prompts 8 --max-concurrency 8 --request-rate 10 --seed 3"
    found = run(bench, good_stream(), line=f"{SMALL} {more}")
    due = list(islice(arrivals(BenchOptions(request_rate=10.0, seed=3)), 8))
    late = [sent - planned for sent, planned in zip(found["start_times"], due, strict=True)]
    assert due[-1] > 0.2 and all(-0.02 < seconds < 60 for seconds in late)


def test_silence_ends_with_the_request_timeout(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        if number:
            writer.write(good_stream())
        else:
            writer.write(STREAM + text_chunk("x"))
            await writer.drain()
            await asyncio.sleep(3600)

    with faulty_server(fault) as server:
        found = bench(url(server), f"{SMALL} --request-timeout 1.5")
    # On a stalled machine the other requests may be as late.
    assert set(found["failures"]) == {"no end within 1.5 s"}


def test_times_are_those_of_the_arrivals(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        await asyncio.sleep(0.1)
        writer.write(STREAM + text_chunk("a"))
        for _ in range(3):
            await asyncio.sleep(0.05)
            writer.write(text_chunk("bc"))
        writer.write(text_chunk("", "length") + chunk("[DONE]") + b"0\r\n\r\n")

    def are_those_of_the_arrivals(found: dict[str, Any]) -> bool:
        times = zip(found["ttfts"], found["itls"], found["latencies"], strict=True)
        return all(
            0.09 < first < total - 0.14
            and len(gaps) == 3
            and 0.14 < sum(gaps) <= total - first + 1e-6
            for first, gaps, total in times
        )

    with faulty_server(fault) as server:
        # On a stalled machine several pieces arrive together, so try several times.
        results = (bench(url(server), f"{SMALL} --max-concurrency 4") for _ in range(10))
        assert any(map(are_those_of_the_arrivals, results))


def test_a_failed_turn_ends_a_live_session_and_the_rest_counts_as_not_sent(bench: Bench) -> None:
    line = "--dataset-name agent --agent-history live --agent-turns 4 --agent-system-len 200"
    answers = (*[good_stream()] * 4, whole(500, {"error": "no"}))
    found = run(bench, *answers, line=f"{line} --num-prompts 4 --num-warmups 0")
    assert found["completed"] + found["failed"] == 4
    unsent = "not sent: an earlier turn of the session failed"
    assert found["failures"] == {"HTTP 500": 1, unsent: 1}
    assert found["start_times"][-1] is None


def test_interrupt_shows_what_was_measured() -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        if number < 2:
            writer.write(good_stream())
        else:
            await asyncio.sleep(3600)

    with faulty_server(fault) as server:
        words = f"-m negamax bench serve --port {server.port} {SMALL}".split()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, *words], text=True, **pipes) as process:
            deadline = time.monotonic() + 120
            while len(server.bodies) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            while process.poll() is None:
                # Python ignores a Ctrl-C that arrives just before the command begins to wait, so
                # send another.
                os.kill(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Successful requests:                     2" in out
    assert re.search(r"interrupted: +1\n", out)


def test_the_client_starts_without_torch() -> None:
    modules = "negamax.cli.bench_serve, negamax.bench.serve, negamax.bench.plots"
    large = "{'torch', 'matplotlib'}"
    code = f"import sys, {modules}; assert not {large} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("line", "message"), read_table("bench_serve_failures.bad_input"))
def test_bad_input_is_one_line_and_exit_code_two(
    bench: Bench, quiet_server: FaultyServer, line: str, message: str
) -> None:
    bench(url(quiet_server), line)
    assert bench.code == 2
    assert message in bench.err and bench.err.count("\n") == 1


@pytest.fixture(scope="module")
def quiet_server() -> Iterator[FaultyServer]:
    with faulty_server(answering(good_stream())) as server:
        yield server


def test_key_headers_and_fields_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")
    sent = """--header 'x-team=a b' --extra-body '{"top_k": 3}' --top-p 0.5"""
    with faulty_server(answering(good_stream())) as server:
        bench(f"{url(server)}/prefix", f"{SMALL} {sent}")
        assert server.headers[0].startswith("POST /prefix/v1/completions HTTP/1.1\r\n")
        assert "authorization: Bearer sk-from-environment" in server.headers[0]
        assert "x-team: a b" in server.headers[0]
        assert (server.bodies[0]["top_k"], server.bodies[0]["top_p"]) == (3, 0.5)
        assert "temperature" not in server.bodies[0]
        bench(url(server), f"{SMALL} --api-key sk-given")
        assert "Bearer sk-given" in server.headers[-1]
