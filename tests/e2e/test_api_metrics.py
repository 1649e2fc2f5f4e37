import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from negamax.api import measurements, metrics
from negamax.cli.main import main
from tests.e2e.api_support import (
    COMPLETIONS,
    FUNCTION,
    WEATHER_QUESTION,
    Dialect,
    error_of,
    every_dialect,
    post,
    stream,
)
from tests.e2e.conftest import MODEL, eventually, serving
from tests.tables import read_table

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "negamax.json"
ALERTS = DEPLOY / "alerts.yml"
METRIC = re.compile(r"\b(?:vllm|sglang|negamax):\w+")
VLLM = read_table("api_metrics.vllm")
# These metrics have no samples at first.
WITHOUT_SAMPLES = ("vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:admission_rejections")
SGLANG = read_table("api_metrics.sglang")


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_the_table_has_the_help_texts_of_the_metrics_in_the_code() -> None:
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    assert set(METRIC.findall(source)) == measurements.METRICS["texts"].keys()


def value(text: str, name: str, **labels: str) -> float:
    only = {"engine": "0", "replica": "0"}  # labels of the only rank of the only engine
    (found,) = [
        number
        for given, number in samples(text)[name]
        if given | only == {"model_name": MODEL} | only | labels
    ]
    return found


def test_all_metrics_of_the_dashboards_exist(http: httpx.Client) -> None:
    post(http, COMPLETIONS, prompt="x", max_tokens=2)
    text = http.get("/metrics").text
    found = samples(text)
    assert [name for name in VLLM if f"vllm:{name}" not in found] == []
    assert [name for name in SGLANG if f"sglang:{name}" not in found] == []
    assert [name for name in WITHOUT_SAMPLES if f"# TYPE {name}_total counter" not in text] == []
    assert {labels["model_name"] for entries in found.values() for labels, _ in entries} == {MODEL}
    accepted = {"accept": "application/openmetrics-text; version=1.0.0"}
    open_metrics = http.get("/metrics", headers=accepted)
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_counts_and_times_of_one_request_add_up(http: httpx.Client) -> None:
    """A delay between two clock readings affects one of the times only, so try several times."""
    assert any(times_add_up(http) for _ in range(10))


def times_add_up(http: httpx.Client) -> bool:
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
    body |= {"cache_salt": str(time.monotonic()), "return_token_ids": True}
    before = http.get("/metrics").text
    first, *_, last = stream(http, COMPLETIONS, **body, stream_options={"include_usage": True})
    after = http.get("/metrics").text
    usage = last["usage"]
    num_first = len(first["choices"][0]["token_ids"])  # A busy machine may send several at once.

    def gain(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert gain("vllm:generation_tokens_total") == usage["completion_tokens"] == 100
    num_prompt = gain("vllm:prompt_tokens_total")
    assert num_prompt == gain("vllm:request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert gain("vllm:request_generation_tokens_sum") == 100
    assert gain("vllm:request_max_num_generation_tokens_sum") == 100
    assert gain("vllm:inter_token_latency_seconds_count") == 100 - num_first
    assert gain("vllm:request_success_total", finished_reason="length") == 1
    assert gain("sglang:num_requests_total") == 1
    assert gain("vllm:iteration_tokens_total_sum") == num_prompt + 99
    queue, prefill, decode = (
        gain(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")
    )
    assert min(queue, prefill) > 0
    assert decode > 0 or num_first == 100
    totals = {
        "time_to_first_token": queue + prefill,
        "e2e_request_latency": queue + prefill + decode,
        "request_inference_time": prefill + decode,
    }
    return all(
        total == pytest.approx(gain(f"vllm:{name}_seconds_sum"), abs=2e-3)
        for name, total in totals.items()
    )


def test_board_and_alerts_use_existing_metrics(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    known = {
        line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")
    }
    known |= {f"{name}_total" for name in WITHOUT_SAMPLES}
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    asked = set()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            asked |= set(METRIC.findall(target["expr"]))
    assert len(asked) > 25
    alerting = set(METRIC.findall(ALERTS.read_text(encoding="utf-8")))
    assert len(alerting) > 6
    asked |= alerting
    assert sorted(asked - known) == []


@every_dialect
def test_tool_calls_of_all_dialects_are_counted(http: httpx.Client, dialect: Dialect) -> None:
    name = "vllm:tool_call_parser_invocations_total"
    before = value(http.get("/metrics").text, name)
    said = dialect.ask(http, dialect.body(WEATHER_QUESTION, functions=(FUNCTION,)))
    assert said.calls[0][0] == "get_weather"
    assert value(http.get("/metrics").text, name) - before == 1


OPTIONS = ("--num-kv-blocks=40", "--block-size=16", "--max-model-len=512")
OPTIONS += ("--kv-offloading-size=0.05",)
Samples = dict[tuple[str, str | None], float]


def ask_turn(http: httpx.Client, turn: int) -> tuple[int, str]:
    prompt = [40 + (at * (turn + 3)) % 200 for at in range(300)]
    body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], answer["choices"][0]["text"]


def by_label(text: str, label: str) -> Samples:
    """Map the name and the `label` of each sample in `text` to the sample's value."""
    return {
        (name, labels.get(label)): value
        for name, entries in samples(text).items()
        for labels, value in entries
    }


def read_metrics(http: httpx.Client) -> Samples:
    return by_label(http.get("/metrics").text, "transfer_type")


def test_a_returning_session_is_shown_in_usage_metrics_and_log(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with serving(*OPTIONS, log_file=log_file) as server, server.http() as http:
        cached = [ask_turn(http, turn)[0] for turn in (0, 1, 2, 0)]
        found = read_metrics(http)
    assert cached == [0, 0, 0, 288]
    hits = found["vllm:external_prefix_cache_hits_total", None]
    assert 0 < hits <= 288 < found["vllm:external_prefix_cache_queries_total", None]
    stored, loaded = (
        found["vllm:kv_offload_total_bytes_total", direction]
        for direction in ("GPU_to_CPU", "CPU_to_GPU")
    )
    assert loaded * 16 % hits == 0 and stored > loaded > 0
    assert found["sglang:hicache_host_used_tokens", None] >= 3 * 288
    assert 0 < found["vllm:cpu_cache_usage_perc", None] < 1
    assert found["negamax:kv_offload_evictions_total", None] == 0
    assert "main memory has room for" in log_file.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_returns_after_the_server_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Kill an idle server; its engine has written its blocks into files, so that none is lost."""
    options = [*OPTIONS, f"--kv-offloading-path={tmp_path / 'kv'}", "--kv-offloading-path-size=1"]
    with serving(*options, log_file=tmp_path / "first") as server, server.http() as http:
        first = ask_turn(http, 0)
        written = "sglang:backuped_tokens_total", None
        if number is signal.SIGKILL:
            assert eventually(lambda: read_metrics(http)[written] == 288)
            assert read_metrics(http)["negamax:kv_file_bytes_total", "write"] > 18 * 64 * 1024
        server.stop(number)
    with serving(*options, log_file=tmp_path / "second") as server, server.http() as http:
        assert ask_turn(http, 0) == (288, first[1])
        found = read_metrics(http)
        assert ask_turn(http, 1)[0] == 0
    assert found["sglang:prefetched_tokens_total", None] == 288
    assert found["negamax:kv_file_bytes_total", "read"] > 18 * 64 * 1024
    for counter in ("evictions", "errors"):
        assert found[f"negamax:kv_file_{counter}_total", None] == 0
    assert 0 < found["negamax:kv_file_usage_perc", None] < 1
    assert "existing files hold 288" in (tmp_path / "second").read_text()


NAMES = ("start", "stop", "dump")
RESTARTS = "negamax:engine_restarts_total"
NO_RECORD = "no expert distribution recording was started"


def ask(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(f"/{name}_expert_distribution_record")


def generate(http: httpx.Client, count: int) -> Any:
    sampling = {"max_new_tokens": 24, "temperature": 0.8, "ignore_eos": True}
    return post(http, "/generate", text=["Tom has 47 apples"] * count, sampling_params=sampling)


def test_without_the_option_nothing_is_counted(http: httpx.Client) -> None:
    option = "--expert-distribution-recorder-mode stat"
    for name in NAMES:
        assert option in error_of(ask(http, name), 400)["message"]
        assert http.get(f"/{name}_expert_distribution_record").status_code == 405
    assert "expert_balancedness" not in http.get("/metrics").text


def test_a_record_holds_what_ran_between_start_and_stop(tmp_path: Path) -> None:
    options = ("--expert-distribution-recorder-mode", "stat", "--device", "cpu")
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        assert NO_RECORD in error_of(ask(http, "dump"), 400)["message"]
        assert "--profile-dir" in error_of(http.post("/start_profile"), 400)["message"]
        generate(http, 1)
        assert ask(http, "start").text == "Start recording expert distribution.\n"
        answers = generate(http, 2)
        assert ask(http, "stop").text == "Stop recording expert distribution.\n"
        first = ask(http, "dump").json()
        generate(http, 1)
        assert ask(http, "dump").json() == first
        totals = {sum(layer) for layer in first["logical_count"]}
        usage = [answer["meta_info"] for answer in answers]
        num_tokens = sum(
            each["prompt_tokens"] - each["cached_tokens"] + each["completion_tokens"] - 1
            for each in usage
        )
        (total,) = totals
        assert total % num_tokens == 0 and total // num_tokens in (1, 2, 4)  # experts per token
        assert server.gauge("negamax:expert_balancedness") == 1.0


@pytest.mark.full
def test_experts_move_under_load_and_after_a_restart(tmp_path: Path) -> None:
    options = (
        "--device", "cpu", "-tp", "2", "--enable-expert-parallel", "--enable-eplb",
        "--eplb-config", '{"step_interval": 6, "window_size": 6}', "--num-redundant-experts", "4",
        "--api-server-count", "2",
    )  # fmt: skip
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        for number in range(2):
            assert ask(http, "start").status_code == 200
            for _ in range(4):
                generate(http, 6)
            found = ask(http, "dump").json()
            assert found["engines"][0]["balancedness"] > 0.8
            assert sum(map(sum, found["logical_count"])) > 0
            assert server.gauge("negamax:experts_moved_total") > 0
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert eventually(lambda number=number: server.gauge(RESTARTS) > number)
            assert eventually(lambda: NO_RECORD in ask(http, "dump").text)


CONFIG = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
CONFIG |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


def test_drafts_are_counted_by_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--speculative-config", json.dumps(CONFIG))
    file = tmp_path / "bench.json"
    with serving(*options, log_file=tmp_path / "log") as server, server.http() as http:
        benchmark = (
            f"bench serve --base-url {server.url} --num-prompts 4 --random-input-len 8 "
            f"--random-output-len 40 --ignore-eos --save-result --result-filename {file}"
        )
        assert main(benchmark.split()) == 0
        text = http.get("/metrics").text
        body = {"text": "one two", "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
        meta = http.post("/generate", json=body).json()["meta_info"]
        info = http.get("/server_info").json()
    assert "SYNTHETIC ACCEPTANCE of 2.00 tokens per row" in (tmp_path / "log").read_text()
    by_position, counts = by_label(text, "position"), "vllm:spec_decode_num"
    drafts = by_position[f"{counts}_drafts_total", None]
    assert drafts > 40
    assert by_position[f"{counts}_draft_tokens_total", None] == pytest.approx(2 * drafts, abs=8)
    assert by_position[f"{counts}_accepted_tokens_total", None] == pytest.approx(drafts, abs=8)
    position = f"{counts}_accepted_tokens_per_pos_total"
    # The labels are those of the counters that they are divided by.
    labels = {f'{position}{{engine="0",model_name="nano",position="{place}"}}' for place in (0, 1)}
    assert labels == {line.split()[0] for line in text.splitlines() if line.startswith(position)}
    assert by_position[position, "0"] == pytest.approx(drafts, abs=8)
    assert by_position[position, "1"] == 0
    assert by_position["sglang:spec_accept_length", None] == pytest.approx(2.0, abs=0.1)
    assert by_position["negamax:synthetic_acceptance_length", None] == 2.0
    assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("NGRAM", 3)
    assert info["synthetic_acceptance_length"] == 2.0
    assert info["avg_spec_accept_length"] == pytest.approx(2.0, abs=0.1)
    assert meta["spec_accept_token_num"] == pytest.approx(meta["spec_verify_ct"], abs=1)
    assert meta["spec_accept_length"] == pytest.approx(2.0, abs=0.2)
    assert meta["spec_accept_rate"] == pytest.approx(0.5, abs=0.1)
    found = json.loads(file.read_text())
    assert found["spec_decode_synthetic"] is True
    assert 0 < found["spec_decode_num_drafts"] <= drafts
    assert found["spec_decode_acceptance_length"] == pytest.approx(2.0, abs=0.1)
    assert "SYNTHETIC Acceptance of Drafts" in capsys.readouterr().out
