import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.text.tokenizer import Tokenizer
from tests.e2e.bench_command import Bench
from tests.e2e.conftest import Server, serving

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
