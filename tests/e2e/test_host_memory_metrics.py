from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import serving

OPTIONS = [
    "--num-kv-blocks=40",
    "--block-size=16",
    "--max-model-len=512",
    "--kv-offloading-size=0.05",
]


def test_a_returning_session_is_shown_in_usage_metrics_and_log(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with serving(*OPTIONS, log_file=log_file) as server, server.http() as http:
        cached = []
        for turn in (0, 1, 2, 0):
            prompt = [40 + (at * (turn + 3)) % 200 for at in range(300)]
            body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        text = http.get("/metrics").text
    assert cached == [0, 0, 0, 288]
    samples = {
        (sample.name, sample.labels.get("transfer_type")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
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
    assert "main memory keeps" in log_file.read_text()
