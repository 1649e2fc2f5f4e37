import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from negamax.api import measurements, metrics
from tests.e2e.api_support import (
    COMPLETIONS,
    FUNCTION,
    WEATHER_QUESTION,
    Dialect,
    every_dialect,
    post,
    stream,
)
from tests.e2e.conftest import MODEL

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "negamax.json"
ALERTS = DEPLOY / "alerts.yml"
METRIC = re.compile(r"\b(?:vllm|sglang|negamax):\w+")
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "gpu_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total", "prompt_tokens_total",
    "prompt_tokens_cached_total", "generation_tokens_total", "request_success_total",
    "num_preemptions_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_params_max_tokens_bucket", "request_params_n_bucket",
    "iteration_tokens_total_bucket", "cache_config_info", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "tool_call_parser_invocations_total", "request_max_num_generation_tokens_bucket",
    "num_requests_swapped", "lora_requests_info",
)  # fmt: skip
# These metrics have no samples at first.
WITHOUT_SAMPLES = ("vllm:spec_decode_num_accepted_tokens_per_pos", "vllm:admission_rejections")
SGLANG = (
    "num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens",
    "max_total_num_tokens", "gen_throughput", "cache_hit_rate", "prompt_tokens_total",
    "generation_tokens_total", "cached_tokens_total", "num_requests_total",
    "num_aborted_requests_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "queue_time_seconds_bucket", "spec_accept_length", "spec_accept_rate", "num_retracted_reqs",
    "utilization", "cache_config_info",
)  # fmt: skip


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
