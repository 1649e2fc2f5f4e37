"""`negamax bench serve` against a real server, and against one that fails in every way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from negamax.bench.serve import arrivals
from negamax.bench.serve_options import BenchOptions
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.conftest import Server
from tests.e2e.faulty_server import STREAM, chunk, faulty_server, good_stream, text_chunk, whole


class Bench:
    """Runs the command in this process; its result as JSON, and what it printed."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._captured = captured
        self.code = 0
        self.out = self.err = ""

    def __call__(self, url: str, *options: str) -> dict[str, Any]:
        file = self._folder / "result.json"
        file.unlink(missing_ok=True)
        saved = (
            "--save-detailed",
            "--result-dir",
            str(self._folder),
            "--result-filename",
            file.name,
        )
        self.code = main(["bench", "serve", "--base-url", url, *saved, *options])
        gc.freeze()  # again, after the command: what is imported is in no collection
        self.out, self.err = self._captured.readouterr()
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


# A real server


def test_random_ids_are_counted_exactly_by_the_server(
    server: Server, bench: Bench, tmp_path: Path
) -> None:
    plot = tmp_path / "plots" / "run.png"
    wanted = (
        "--num-prompts",
        "6",
        "--random-input-len",
        "40",
        "--random-output-len",
        "5",
        "--ignore-eos",
    )
    options = (
        *wanted,
        "--max-concurrency",
        "3",
        "--goodput",
        "e2el:60000",
        "ttft:60000",
        "--temperature",
        "1",
    )
    drawn = ("--plot", str(plot)) if _has_matplotlib() else ()
    found = bench(f"{server.url}/v1", *options, *drawn)
    assert bench.code == 0, bench.err
    assert found["model_id"] == "nano"
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["input_lens"] == [40] * 6 and found["output_lens"] == [5] * 6
    assert found["cached_lens"] == [0] * 6
    assert found["max_concurrent_requests"] == 3
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["finish_reasons"] == ["length"] * 6
    for first, whole_answer, gaps in zip(
        found["ttfts"], found["latencies"], found["itls"], strict=True
    ):
        assert 0 < first <= whole_answer < found["duration"]
        assert sum(gaps) <= whole_answer - first + 1e-6
    assert "============ Serving Benchmark Result ============" in bench.out
    assert "Output tokens: as the server's usage reports them." in bench.out
    assert not drawn or plot.read_bytes().startswith(b"\x89PNG")


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_tokens_without_visible_text_are_timed_when_they_arrive(
    server: Server, bench: Bench, backend: str
) -> None:
    """Parts of a character have no text: the model may only write the first byte of an emoji."""
    first_byte = Tokenizer.from_folder(EMBEDDED["nano"]).encode("\U0001f600")[0]
    only = json.dumps({"allowed_token_ids": [first_byte]})
    options = ("--backend", backend, "--num-prompts", "2", "--input-len", "40", "--ignore-eos")
    for _ in range(10):  # on a machine that stands still all may arrive together
        found = bench(server.url, *options, "--output-len", "60", "--extra-body", only)
        assert bench.code == 0, bench.err
        if arrive_apart := all(5 <= len(gaps) < 60 for gaps in found["itls"]):
            break
    assert arrive_apart
    for first, whole_answer in zip(found["ttfts"], found["latencies"], strict=True):
        assert first < whole_answer - 0.001
    assert "timed where the server's running token count rises" in bench.out


def test_sweep_runs_every_concurrency_and_compares(
    server: Server, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--input-len",
        "20",
        "--output-len",
        "4",
        "--ignore-eos",
        "--label",
        "ours",
        "--seed",
        "900",
    )
    drawn = ("--plot", str(tmp_path / "sweep.png")) if _has_matplotlib() else ()
    bench(server.url, *options, "--max-concurrency", "1,2", "--num-prompts", "2,4", *drawn)
    assert bench.code == 0, bench.err
    assert bench.out.count("Serving Benchmark Result") == 2
    files = [tmp_path / f"result-concurrency{count}.json" for count in (1, 2)]
    first, second = (json.loads(file.read_text()) for file in files)
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 2)
    assert (first["completed"], second["completed"]) == (2, 4)
    assert first["total_cached_tokens"] == second["total_cached_tokens"] == 0
    assert not drawn or (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    assert main(["bench", "compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["ours", "1"], ["2", "4"]]
    assert bench.out.splitlines()[-len(lines) - bool(drawn) :][: len(lines)] == lines


def test_same_seed_sends_the_same_prompts_again(server: Server, bench: Bench) -> None:
    options = (
        "--num-prompts",
        "2",
        "--input-len",
        "64",
        "--output-len",
        "1",
        "--seed",
        "77",
        "--num-warmups",
        "0",
    )
    assert bench(server.url, *options)["total_cached_tokens"] == 0
    assert bench(server.url, *options)["total_cached_tokens"] >= 2 * 48


def test_chat_texts_have_about_the_length_asked_for(server: Server, bench: Bench) -> None:
    options = (
        "--backend",
        "openai-chat",
        "--num-prompts",
        "3",
        "--input-len",
        "200",
        "--output-len",
        "6",
        "--ignore-eos",
    )
    for _ in range(5):  # where others want the cores all tokens of an answer may come at once
        found = bench(server.url, *options, "--itl-rule", "token", "--request-rate", "20")
        assert bench.code == 0, bench.err
        assert found["input_lens"] == [pytest.approx(200, rel=0.1)] * 3
        assert found["output_lens"] == [6] * 3
        if all(found["itls"]):
            break
    assert [1 <= len(gaps) <= 5 for gaps in found["itls"]] == [True] * 3
    assert found["running_tokens_reported"] == 3


def test_prefixes_are_found_in_the_cache(server: Server, bench: Bench) -> None:
    lengths = (
        "--prefix-repetition-prefix-len",
        "64",
        "--prefix-repetition-suffix-len",
        "8",
        "--prefix-repetition-output-len",
        "1",
    )
    options = (
        "--dataset-name",
        "prefix_repetition",
        "--prefix-repetition-num-prefixes",
        "2",
        "--num-prompts",
        "6",
    )
    found = bench(server.url, *options, *lengths, "--max-concurrency", "1", "--seed", "5")
    assert found["input_lens"] == [72] * 6
    assert sorted(found["cached_lens"])[2:] == [64] * 4
    assert "Cached input tokens:" in bench.out


@pytest.mark.parametrize("history", ["recorded", "live"])
def test_agent_sessions_run_turn_by_turn(server: Server, bench: Bench, history: str) -> None:
    sizes = (
        "--agent-system-len",
        "150",
        "--agent-tools",
        "2",
        "--agent-result-len",
        "80",
        "--agent-reasoning-len",
        "20",
    )
    options = (
        "--dataset-name",
        "agent",
        "--num-prompts",
        "7",
        "--agent-turns",
        "4",
        "--agent-output-len",
        "8",
        *sizes,
    )
    found = bench(
        server.url,
        *options,
        "--agent-history",
        history,
        "--max-concurrency",
        "2",
        "--agent-pause",
        "0.01",
    )
    assert bench.code == 0, bench.out + bench.err
    assert (found["completed"], found["failed"]) == (7, 0)
    assert found["endpoint"] == "/v1/chat/completions"
    for session in (0, 1):
        lengths = [
            length
            for length, number in zip(found["input_lens"], found["sessions"], strict=True)
            if number == session
        ]
        assert len(lengths) == (4, 3)[session] and lengths == sorted(set(lengths))
    assert found["total_cached_tokens"] > 0.5 * found["total_input_tokens"]


def test_sharegpt_questions_and_recorded_requests(
    server: Server, bench: Bench, tmp_path: Path
) -> None:
    said = [
        {"from": "human", "value": "What is the capital of France?"},
        {"from": "gpt", "value": "The capital is Paris. " * 2},
    ]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": said}]))
    options = (
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(file),
        "--num-prompts",
        "2",
        "--ignore-eos",
    )
    found = bench(server.url, *options, "--tokenizer", "nano")
    assert bench.code == 0, bench.err
    assert len(set(found["output_lens"])) == 1 and 8 <= found["output_lens"][0] <= 30
    assert "the file's 1 requests were repeated" in bench.out
    assert bench(server.url, *options)["output_lens"][0] == pytest.approx(
        found["output_lens"][0], rel=0.6
    )

    recorded = tmp_path / "requests.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
    recorded.write_text(
        "".join(json.dumps({"session": "a", "delay": 0.01, "body": body}) + "\n" for _ in range(3))
    )
    custom = (
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(recorded),
        "--num-prompts",
        "3",
        "--backend",
        "openai-chat",
    )
    found = bench(server.url, *custom)
    assert (found["output_lens"], found["sessions"]) == ([3] * 3, [0] * 3)


def test_prompts_longer_than_the_window_are_refused_before_they_are_sent(
    server: Server, bench: Bench
) -> None:
    assert bench(server.url, "--input-len", "4000", "--output-len", "200") == {}
    assert bench.code == 2
    assert "4200 tokens exceed the model's window of 4096 tokens" in bench.err


def test_refusals_by_the_server_end_the_run_at_the_warm_up(server: Server, bench: Bench) -> None:
    assert (
        bench(
            server.url,
            "--model",
            "other",
            "--num-prompts",
            "2",
            "--input-len",
            "4",
            "--output-len",
            "2",
        )
        == {}
    )
    assert bench.code == 1
    assert "the server refuses the warm-up: HTTP 404" in bench.err


# A faulty server


SMALL = (
    "--num-prompts",
    "4",
    "--num-warmups",
    "0",
    "--input-len",
    "8",
    "--output-len",
    "6",
    "--max-concurrency",
    "1",
)


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
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL, "--num-prompts", "10")
    assert bench.code == 0
    assert (found["completed"], found["failed"], found["output_lens"][0]) == (2, 8, 6)
    assert found["failures"] == {
        "connection closed before the answer ended": 2,
        "HTTP 500": 1,
        "HTTP 429": 1,
        "error in the stream": 1,
        "malformed HTTP answer: Expected HTTP/, RTSP/ or ICE/": 1,
        "no event stream but nothing": 1,
        "unreadable chunk": 1,
    }
    assert found["failure_examples"]["HTTP 429"] == "Retry-After 7: full"
    assert found["errors"][1] == "HTTP 500" and found["ttfts"][1] is None
    assert re.search(r"HTTP 500: +1\n    kaput", bench.out)


def test_exit_code_is_one_when_every_request_fails(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(whole(503, {"error": {"message": "draining"}}))

    with faulty_server(fault) as server:
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL)
    assert bench.code == 1
    assert found["failed"] == 4
    assert "Serving Benchmark Result" in bench.out
    assert bench.err.strip() == "negamax: error: all 4 requests failed: HTTP 503 (4)"


def test_without_usage_chunks_are_counted_and_that_is_said(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(good_stream(5, usage=False))

    with faulty_server(fault) as server:
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL)
    assert found["output_lens"] == [5] * 4
    assert found["input_lens"] == [8] * 4  # of the token ids that were sent
    assert "counted as chunks for 4 requests" in bench.out
    assert found["total_cached_tokens"] is None and "Cached" not in bench.out


def test_connections_are_kept_and_a_stale_one_is_replaced_without_a_failure(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            writer.close()  # just as the kept connection is used again
        else:
            writer.write(good_stream())

    with faulty_server(fault) as server:
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL)
        assert found["failed"] == 0
        assert server.connections == 2
        assert server.bodies[2] == server.bodies[3]  # sent again
        assert [body["max_tokens"] for body in server.bodies] == [6] * 5
        assert [body["stream_options"] for body in server.bodies] == [{"include_usage": True}] * 5


def test_requests_are_sent_when_the_rate_says(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(good_stream())

    options = (
        "--num-prompts",
        "8",
        "--max-concurrency",
        "8",
        "--request-rate",
        "10",
        "--seed",
        "3",
    )
    with faulty_server(fault) as server:
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL, *options)
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
        found = bench(f"http://127.0.0.1:{server.port}", *SMALL, "--request-timeout", "1.5")
    # on a machine that stands still the others may be as late
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
        return all(
            0.09 < first < total - 0.14
            and len(gaps) == 3
            and 0.14 < sum(gaps) <= total - first + 1e-6
            for first, gaps, total in zip(
                found["ttfts"], found["itls"], found["latencies"], strict=True
            )
        )

    with faulty_server(fault) as server:
        url, options = f"http://127.0.0.1:{server.port}", (*SMALL, "--max-concurrency", "4")
        # once at least: what arrives while the machine stands still arrives together
        assert any(are_those_of_the_arrivals(bench(url, *options)) for _ in range(10))


def test_a_failed_turn_ends_a_live_session_and_the_rest_counts_as_not_sent(bench: Bench) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(whole(500, {"error": "no"}) if number > 3 else good_stream())

    options = (
        "--dataset-name",
        "agent",
        "--agent-history",
        "live",
        "--agent-turns",
        "4",
        "--num-prompts",
        "4",
        "--num-warmups",
        "0",
    )
    with faulty_server(fault) as server:
        found = bench(f"http://127.0.0.1:{server.port}", *options, "--agent-system-len", "200")
    assert found["completed"] + found["failed"] == 4
    assert found["failures"] == {
        "HTTP 500": 1,
        "not sent: an earlier turn of the session failed": 1,
    }
    assert found["start_times"][-1] is None


def test_key_headers_and_extra_fields_reach_the_server(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(good_stream())

    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")
    sent = ("--header", "x-team=a b", "--extra-body", '{"top_k": 3}', "--top-p", "0.5")
    with faulty_server(fault) as server:
        bench(f"http://127.0.0.1:{server.port}/prefix", *SMALL, *sent)
        assert server.headers[0].startswith("POST /prefix/v1/completions HTTP/1.1\r\n")
        assert "authorization: Bearer sk-from-environment" in server.headers[0]
        assert "x-team: a b" in server.headers[0]
        assert (server.bodies[0]["top_k"], server.bodies[0]["top_p"]) == (3, 0.5)
        assert "temperature" not in server.bodies[0]
        bench(f"http://127.0.0.1:{server.port}", *SMALL, "--api-key", "sk-given")
        assert "Bearer sk-given" in server.headers[-1]


def test_interrupt_shows_what_was_measured() -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        if number < 2:
            writer.write(good_stream())
        else:
            await asyncio.sleep(3600)

    with faulty_server(fault) as server:
        command = [
            sys.executable,
            "-m",
            "negamax",
            "bench",
            "serve",
            "--port",
            str(server.port),
            *SMALL,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 120
            while len(server.bodies) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            while process.poll() is None:
                # again where it came in the moment before the command began to wait, in which
                # Python does not notice it
                os.kill(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Successful requests:                     2" in out
    assert re.search(r"interrupted: +1\n", out)


# The command line


def test_the_client_starts_without_torch() -> None:
    modules = (
        "negamax.cli.bench_serve, negamax.bench.serve, negamax.bench.serve_report, "
        "negamax.bench.plots"
    )
    code = (
        f"import sys, {modules}; assert not {{'torch', 'numpy', 'matplotlib'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_server_is_one_line_and_exit_code_one(bench: Bench) -> None:
    bench("http://127.0.0.1:9", "--num-prompts", "1")
    assert bench.code == 1
    assert "http://127.0.0.1:9 does not answer: connection refused" in bench.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request-rate", "0"), "--request-rate is 0; allowed: above 0"),
        (("--request-rate", "nan"), "--request-rate is nan; allowed: above 0"),
        (("--num-prompts", "0"), "--num-prompts is '0'; allowed: numbers from 1"),
        (("--max-concurrency", "0"), "--max-concurrency is '0'; allowed: numbers from 1"),
        (("--random-range-ratio", "1"), "--random-range-ratio is 1; allowed: 0 up to"),
        (("--max-concurrency", "1,2", "--num-prompts", "4,4,4"), "--num-prompts has 3 numbers"),
        (("--dataset-name", "sonnet"), "--dataset-name is 'sonnet'; allowed: random"),
        (("--dataset-name", "mmmu"), "the models served here read text only"),
        (("--backend", "sglang", "--random-range-ratio", "1.1"), "allowed: 0 to 1"),
        (("--dataset-name", "sharegpt"), "--dataset-name sharegpt needs a file"),
        (("--dataset-name", "sharegpt", "--dataset-path", "/nowhere"), "cannot be read"),
        (("--backend", "tensorrt"), "--backend is 'tensorrt'; allowed"),
        (("--endpoint", "/generate"), "--endpoint is '/generate'; allowed"),
        (
            ("--endpoint", "/v1/chat/completions", "--prompt-format", "ids"),
            "needs a route that takes token ids",
        ),
        (
            ("--dataset-name", "agent", "--endpoint", "/v1/completions"),
            "agent sessions are conversations",
        ),
        (("--goodput", "ttft"), "--goodput has 'ttft'; allowed"),
        (("--goodput", "ttft:500", "tpot:-1"), "--goodput has 'tpot:-1'; allowed"),
        (("--percentile-metrics", "ttft,speed"), "--percentile-metrics has 'speed'; allowed"),
        (("--metric-percentiles", "99,101"), "--metric-percentiles is '99,101'; allowed"),
        (("--extra-body", "[]"), "--extra-body is a JSON list; an object is needed"),
        (("--header", "x"), "--header is 'x'; allowed: NAME=VALUE"),
        (("nano",), "unexpected argument 'nano'"),
        (("--request-rat", "5"), "no such option: --request-rat"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    bench: Bench, options: tuple[str, ...], message: str
) -> None:
    async def fault(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(good_stream())

    with faulty_server(fault) as server:
        bench(f"http://127.0.0.1:{server.port}", *options)
    assert bench.code == 2
    assert message in bench.err and bench.err.count("\n") == 1
