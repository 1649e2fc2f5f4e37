import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import eventually, serving

OPTIONS = [
    "--num-kv-blocks=40",
    "--block-size=16",
    "--max-model-len=512",
    "--kv-offloading-size=0.05",
]


Samples = dict[tuple[str, str | None], float]


def ask(http: httpx.Client, turn: int) -> tuple[int, str]:
    prompt = [40 + (at * (turn + 3)) % 200 for at in range(300)]
    body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], answer["choices"][0]["text"]


def read_metrics(http: httpx.Client) -> Samples:
    return {
        (sample.name, sample.labels.get("transfer_type")): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


def test_a_returning_session_is_shown_in_usage_metrics_and_log(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with serving(*OPTIONS, log_file=log_file) as server, server.http() as http:
        cached = [ask(http, turn)[0] for turn in (0, 1, 2, 0)]
        samples = read_metrics(http)
    assert cached == [0, 0, 0, 288]
    hits = samples["vllm:external_prefix_cache_hits_total", None]
    assert 0 < hits <= 288 < samples["vllm:external_prefix_cache_queries_total", None]
    stored, loaded = (
        samples["vllm:kv_offload_total_bytes_total", direction]
        for direction in ("GPU_to_CPU", "CPU_to_GPU")
    )
    assert loaded * 16 % hits == 0 and stored > loaded > 0
    assert samples["sglang:hicache_host_used_tokens", None] >= 3 * 288
    assert 0 < samples["vllm:cpu_cache_usage_perc", None] < 1
    assert samples["negamax:kv_offload_evictions_total", None] == 0
    assert "main memory has room for" in log_file.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_returns_after_the_server_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Kill an idle server; its engine has written its blocks into files, so that none is lost."""
    options = [*OPTIONS, f"--kv-offloading-path={tmp_path / 'kv'}", "--kv-offloading-path-size=1"]
    with serving(*options, log_file=tmp_path / "first") as server, server.http() as http:
        first = ask(http, 0)
        written = "sglang:backuped_tokens_total", None
        if number is signal.SIGKILL:
            assert eventually(lambda: read_metrics(http)[written] == 288)
            assert read_metrics(http)["negamax:kv_file_bytes_total", "write"] > 18 * 64 * 1024
        server.stop(number)
    with serving(*options, log_file=tmp_path / "second") as server, server.http() as http:
        assert ask(http, 0) == (288, first[1])
        samples = read_metrics(http)
        assert ask(http, 1)[0] == 0
    assert samples["sglang:prefetched_tokens_total", None] == 288
    assert samples["negamax:kv_file_bytes_total", "read"] > 18 * 64 * 1024
    for counter in ("evictions", "errors"):
        assert samples[f"negamax:kv_file_{counter}_total", None] == 0
    assert 0 < samples["negamax:kv_file_usage_perc", None] < 1
    assert "existing files hold 288" in (tmp_path / "second").read_text()
