import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from negamax.bench.serve import arrivals
from negamax.bench.serve_options import BenchOptions
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.bench_command import Bench
from tests.e2e.conftest import Server, serving
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

HAS_MATPLOTLIB = find_spec("matplotlib") is not None


def test_random_ids_are_counted_exactly(server: Server, bench: Bench, tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "run.png"
    line = (
        "--num-prompts 6 --random-input-len 40 --random-output-len 5 --ignore-eos "
        "--max-concurrency 3 --goodput e2el:60000 ttft:60000 --temperature 1"
    )
    drawn = ("--plot", str(plot)) if HAS_MATPLOTLIB else ()
    found = bench.measure(f"{server.url}/v1", line, *drawn)
    assert found["model_id"] == "nano"
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["input_lens"] == [40] * 6 and found["output_lens"] == [5] * 6
    assert found["cached_lens"] == [0] * 6
    assert found["max_concurrent_requests"] == 3
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["finish_reasons"] == ["length"] * 6
    times = (found["ttfts"], found["latencies"], found["itls"])
    for first, whole_answer, gaps in zip(*times, strict=True):
        assert 0 < first <= whole_answer < found["duration"]
        assert sum(gaps) <= whole_answer - first + 1e-6
    assert "============ Serving Benchmark Result ============" in bench.out
    assert "Output tokens: as the server's usage reports them." in bench.out
    assert not drawn or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("backend", ["openai-chat", pytest.param("openai", marks=pytest.mark.full)])
def test_tokens_without_text_are_timed_at_once(server: Server, bench: Bench, backend: str) -> None:
    """Let the model write only the first byte of an emoji, so that no token has text."""
    first_byte = Tokenizer.from_folder(EMBEDDED["nano"]).encode("\U0001f600")[0]
    only = json.dumps({"allowed_token_ids": [first_byte]})
    line = f"--backend {backend} --num-prompts 2 --input-len 40 --output-len 60 --ignore-eos"
    for _ in range(10):  # On a stalled machine all tokens may arrive together.
        found = bench.measure(server.url, line, "--extra-body", only)
        if arrive_apart := all(5 <= len(gaps) < 60 for gaps in found["itls"]):
            break
    assert arrive_apart
    for first, whole_answer in zip(found["ttfts"], found["latencies"], strict=True):
        assert first < whole_answer - 0.001
    assert "timed when the server's running token count rises" in bench.out


def test_sweep_runs_every_concurrency_and_compares(
    server: Server, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ("--plot", str(tmp_path / "sweep.png")) if HAS_MATPLOTLIB else ()
    sweep = "--max-concurrency 1,2 --num-prompts 2,4"
    line = f"--input-len 20 --output-len 4 --ignore-eos --label ours --seed 900 {sweep}"
    bench.measure(server.url, line, *drawn)
    assert bench.out.count("Serving Benchmark Result") == 2
    files = [tmp_path / f"result-concurrency{count}.json" for count in (1, 2)]
    first, second = (json.loads(file.read_text()) for file in files)
    assert (first["max_concurrency"], second["max_concurrency"]) == (1, 2)
    assert (first["completed"], second["completed"]) == (2, 4)
    shape = first["serving_shape"]
    assert f", shape {shape['hash']})" in server.ready_line
    assert shape == second["serving_shape"] and shape["kernels"]["moe.route"] and shape["weights"]
    assert first["total_cached_tokens"] == second["total_cached_tokens"] == 0
    assert not drawn or (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    assert main(["bench", "compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["ours", "1"], ["2", "4"]]
    assert bench.out.splitlines()[-len(lines) - bool(drawn) :][: len(lines)] == lines


def test_traces_hold_the_steps_of_the_run(server: Server, bench: Bench) -> None:
    line = "--num-prompts 1 --num-warmups 0 --input-len 8 --output-len 12 --ignore-eos --profile"
    bench.measure(server.url, line)
    (trace,) = (server.log_file.parent / "traces").glob("*-replica0-rank0.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "mkldnn::_linear_pointwise" for event in events) >= 12 * 31


def test_a_profile_ends_after_its_steps(bench: Bench, tmp_path: Path) -> None:
    folder = ("--profile-dir", str(tmp_path / "traces"))
    with serving(*folder, rate=1000, log_file=tmp_path / "log") as server, server.http() as http:
        assert http.post("/start_profile", json={"num_steps": 0}).status_code == 400
        http.post("/start_profile", json={"num_steps": 5, "activities": ["CPU"]})
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 8})
        assert "no profile is running" in http.post("/stop_profile").text
        assert http.post("/start_profile").text.startswith(f"Start profiling. Files: {folder[1]}/")
        line = "--num-prompts 1 --num-warmups 0 --input-len 8 --output-len 4 --prompt-format text"
        assert bench(server.url, f"{line} --profile") == {}
        assert bench.code == 1 and "a profile is already running" in bench.err
        assert http.post("/stop_profile").status_code == 200
        assert bench.measure(server.url, f"{line} --profile")["completed"] == 1


def test_same_seed_sends_the_same_prompts_again(server: Server, bench: Bench) -> None:
    line = "--num-prompts 2 --input-len 64 --output-len 1 --seed 77 --num-warmups 0"
    assert bench(server.url, line)["total_cached_tokens"] == 0
    assert bench(server.url, line)["total_cached_tokens"] >= 2 * 48


def test_chat_texts_have_about_the_length_asked_for(server: Server, bench: Bench) -> None:
    line = (
        "--backend openai-chat --num-prompts 3 --input-len 200 --output-len 6 --ignore-eos "
        "--itl-rule token --request-rate 20"
    )
    for _ in range(5):  # On a busy machine all tokens of an answer may arrive together.
        found = bench.measure(server.url, line)
        assert found["input_lens"] == [pytest.approx(200, rel=0.1)] * 3
        assert found["output_lens"] == [6] * 3
        if all(found["itls"]):
            break
    assert [1 <= len(gaps) <= 5 for gaps in found["itls"]] == [True] * 3
    assert found["running_tokens_reported"] == 3


def test_prefixes_are_found_in_the_cache(server: Server, bench: Bench) -> None:
    lengths = {"prefix-len": 64, "suffix-len": 8, "output-len": 1, "num-prefixes": 2}
    line = " ".join(f"--prefix-repetition-{name} {value}" for name, value in lengths.items())
    line += " --dataset-name prefix_repetition --num-prompts 6 --max-concurrency 1 --seed 5"
    found = bench(server.url, line)
    assert found["input_lens"] == [72] * 6
    assert sorted(found["cached_lens"])[2:] == [64] * 4
    assert "Cached input tokens:" in bench.out


@pytest.mark.parametrize("history", ["live", pytest.param("recorded", marks=pytest.mark.full)])
def test_agent_sessions_run_turn_by_turn(server: Server, bench: Bench, history: str) -> None:
    line = (
        "--dataset-name agent --num-prompts 7 --agent-turns 4 --agent-output-len 8 "
        "--agent-system-len 150 --agent-tools 2 --agent-result-len 80 --agent-reasoning-len 20 "
        f"--agent-history {history} --max-concurrency 2 --agent-pause 0.01"
    )
    found = bench.measure(server.url, line)
    assert (found["completed"], found["failed"]) == (7, 0)
    assert found["endpoint"] == "/v1/chat/completions"
    numbered = list(zip(found["sessions"], found["input_lens"], strict=True))
    for session, num_turns in ((0, 4), (1, 3)):
        lengths = [length for number, length in numbered if number == session]
        assert len(lengths) == num_turns and lengths == sorted(set(lengths))
    assert found["total_cached_tokens"] > 0.5 * found["total_input_tokens"]


def test_sharegpt_and_recorded_requests(server: Server, bench: Bench, tmp_path: Path) -> None:
    said = [{"from": "human", "value": "What is the capital of France?"}]
    said += [{"from": "gpt", "value": "The capital is Paris. " * 2}]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": said}]))
    line = f"--dataset-name sharegpt --dataset-path {file} --num-prompts 2 --ignore-eos"
    found = bench.measure(server.url, line, "--tokenizer", "nano")
    assert len(set(found["output_lens"])) == 1 and 8 <= found["output_lens"][0] <= 30
    assert "the file's 1 requests were repeated" in bench.out
    counts = found["total_output_tokens_retokenized"], found["total_output_tokens"]
    assert counts[0] == pytest.approx(counts[1], rel=0.3)
    assert f"Total generated tokens (retokenized):    {counts[0]}\n" in bench.out
    estimated = bench(server.url, line)["output_lens"][0]
    assert "retokenized" not in bench.out
    assert estimated == pytest.approx(found["output_lens"][0], rel=0.6)

    recorded = tmp_path / "requests.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
    entry = json.dumps({"session": "a", "delay": 0.01, "body": body})
    recorded.write_text(f"{entry}\n" * 3)
    line = f"--dataset-name custom --dataset-path {recorded} --num-prompts 3 --backend openai-chat"
    found = bench(server.url, line)
    assert (found["output_lens"], found["sessions"]) == ([3] * 3, [0] * 3)


UNKNOWN = "--model other --num-prompts 2 --input-len 4 --output-len 2"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--input-len 4000 --output-len 200", 2, "4200 tokens; the model's context length is 4096"),
        (UNKNOWN, 1, "the server refuses the warm-up request: HTTP 404"),
    ],
    ids=["context length", "unknown model"],
)
def test_refusal_ends_run(server: Server, bench: Bench, line: str, code: int, message: str) -> None:
    assert bench(server.url, line) == {}
    assert bench.code == code and message in bench.err


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


def test_without_usage_chunks_are_counted_and_the_report_says_so(bench: Bench) -> None:
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


def test_requests_are_sent_at_the_requested_rate(bench: Bench) -> None:
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


def test_a_server_that_starts_is_awaited(bench: Bench) -> None:
    with faulty_server(answering(good_stream())) as server:
        server.refusals = 2
        assert bench(url(server), SMALL) == {} and "/v1/models returns HTTP 503" in bench.err
        found = bench.measure(url(server), f"{SMALL} --ready-check-timeout-sec 60")
    assert (found["model_id"], found["failed"], server.refusals) == ("faulty", 0, 0)


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
