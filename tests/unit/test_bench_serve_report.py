import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.drafts import NO_DRAFTS, DraftCounts
from negamax.bench.serve import Measurement
from negamax.bench.serve_client import ResponseRecord
from negamax.bench.serve_compare import check_shapes, group, load_of, read_results, table
from negamax.bench.serve_options import BenchOptions
from negamax.bench.serve_report import (
    block,
    concurrency_steps,
    details,
    distribution,
    document,
    inter_token,
    output_per_second,
    peak_concurrency,
    summarize,
    tpot,
    ttft,
)
from negamax.engine.shape import hash_shape
from tests.tables import read_table

OPTIONS = BenchOptions()


def record(
    *arrivals: float, started: float = 10.0, output: Any = None, running: tuple[int, ...] = ()
) -> ResponseRecord:
    """Make a successful request. `arrivals` count from the start; the last arrival is the end."""
    return ResponseRecord(
        0, started=started, ended=started + arrivals[-1],
        arrivals=array("d", [started + at for at in arrivals]),
        running_tokens=array("q", running or [0] * len(arrivals)), prompt_tokens=100,
        output_tokens=output, cached_tokens=25, finish_reason="length",
    )  # fmt: skip


def failed(reason: str, detail: str = "") -> ResponseRecord:
    return ResponseRecord(0, started=10.0, ended=10.5, error=reason, detail=detail)


def measured(*records: ResponseRecord, seconds: float = 2.0) -> Measurement:
    return Measurement("nano", records, seconds, notes=())


def test_metrics_of_one_request_and_percentiles_of_many() -> None:
    request = record(0.5, 0.6, 0.9, 1.3, output=9)
    assert ttft(request) == pytest.approx(0.5)
    # The time per token is divided by the server's count of nine tokens, not by four chunks.
    assert tpot(request) == pytest.approx(0.8 / 8)
    assert inter_token(request, rule="gap") == pytest.approx([0.1, 0.3, 0.4])

    # The token rule divides a gap among the tokens of the chunk that ends the gap.
    request = record(0.5, 0.6, 0.9, 1.3, output=9, running=(2, 3, 6, 9))
    assert inter_token(request, rule="token") == pytest.approx([0.1] * 4 + [0.4 / 3] * 3)
    # one token has no time per output token
    assert tpot(record(0.5, output=1)) is None
    assert "mean_tpot_ms" not in summarize(measured(record(0.5, output=1)), OPTIONS)
    # an answer without visible text has its first token at its end
    assert ttft(ResponseRecord(0, started=1.0, ended=3.0, output_tokens=5)) == 2.0
    found = distribution([4.0, 1.0, 3.0, 2.0], (95, 99.9))
    expected = {
        "mean": 2.5, "median": 2.5, "std": 1.25**0.5, "p95": 3.85, "p99.9": 3.997, "max": 4.0,
    }  # fmt: skip
    assert list(found) == list(expected)
    assert found == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())  # JSON has no NumPy values
    assert distribution([], (95,)) == {}


def test_totals_count_good_requests_only() -> None:
    runs = measured(record(0.5, 1.0, output=4), record(0.5, 1.0, output=6), failed("HTTP 500"))
    summary = summarize(runs, OPTIONS)
    assert (summary["completed"], summary["failed"], summary["failures"]) == (2, 1, {"HTTP 500": 1})
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (200, 10)
    assert summary["total_cached_tokens"] == 50
    names = ("request_throughput", "output_throughput", "total_token_throughput")
    assert [summary[name] for name in names] == [1.0, 5.0, 105.0]
    assert (summary["input_throughput"], summary["concurrency"]) == (100.0, 1.0)
    times = ((0.1, 0.2), (0.9, 1.0), (0.1, 2.1))  # fast, slow to start, slow tokens
    runs = measured(*(record(*each, output=11) for each in times))
    options = BenchOptions(goodput={"ttft": 500.0, "tpot": 50.0})
    assert summarize(runs, options)["request_goodput"] == 0.5


def test_peak_concurrency_and_output_per_second() -> None:
    """A request that ends when another begins does not count twice."""
    back_to_back = [record(1.0, started=10.0), record(1.0, started=11.0)]
    assert peak_concurrency(back_to_back) == 1
    assert peak_concurrency([*back_to_back, record(1.0, started=10.5)]) == 2
    assert [count for _, count in concurrency_steps(back_to_back)] == [1, 0, 1, 0]
    assert peak_concurrency([ResponseRecord(0, ended=12.0, error="not sent")]) == 0
    assert output_per_second([record(0.5, 1.5, 2.5, 2.6, output=8)]) == [2.0, 2.0, 4.0]


def test_block_has_the_lines_that_scripts_look_for_and_says_what_it_counted() -> None:
    options = BenchOptions(max_concurrency=8, request_rate=2.5, goodput={"ttft": 500.0})
    full = failed("HTTP 429", "Retry-After 1: full")
    runs = measured(record(0.5, 0.7, output=3), full, failed("HTTP 429"))
    lines = block(summarize(runs, options), options).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     1"
    for start in read_table("bench_serve_report.lines_of_the_block"):
        assert start in lines
    reported = block(summarize(measured(record(0.5, 0.7, output=3)), OPTIONS), OPTIONS)
    assert "Output tokens: as the server's usage reports them." in reported
    assert "each gap between chunks counts once (1.50 tokens per chunk on average)" in reported
    assert "tokens without visible text arrive with the next chunk" in reported
    running = summarize(measured(record(0.5, 0.7, output=3, running=(1, 3))), OPTIONS)
    assert "timed when the server's running token count rises" in block(running, OPTIONS)
    counted = summarize(measured(record(0.5, 0.7)), OPTIONS)
    assert counted["total_output_tokens"] == 2
    assert "Output tokens: counted as chunks for 1 requests" in block(counted, OPTIONS)

    # nothing worked
    text = block(summarize(measured(failed("connection refused")), OPTIONS), OPTIONS)
    assert "Successful requests:                     0" in text
    assert "TTFT (ms):                               none" in text


def test_document_is_json_and_keeps_requests_on_demand_only() -> None:
    options = BenchOptions(metadata={"gpu": "none"}, label="x")
    runs = measured(
        record(0.5, 0.7, started=12.0, output=3),
        record(0.5, 0.7, started=11.0, output=2),
        failed("HTTP 500"),
    )
    summary = summarize(runs, options)
    short = json.loads(json.dumps(document(runs, options, summary, detailed=False)))
    assert short["model_id"] == "nano" and short["gpu"] == "none" and short["request_rate"] == "inf"
    assert short["p99_ttft_ms"] == pytest.approx(500.0)
    assert "ttfts" not in short
    lists = details(runs, options)
    assert lists["start_times"] == pytest.approx([0.0, 1.0, 2.0])
    assert lists["output_lens"] == [0, 2, 3]
    assert lists["errors"] == ["HTTP 500", "", ""]
    assert lists["itls"][1] == pytest.approx([0.2])
    json.dumps(document(runs, options, summary, detailed=True))


# --- comparison of files -------------------------------------------------------------------------


def result(**changes: Any) -> dict[str, Any]:
    load = {"request_rate": "inf", "max_concurrency": 4, "completed": 10}
    times = {"median_ttft_ms": 20.0, "p99_ttft_ms": 30.0, "median_tpot_ms": 5.0}
    names = {"backend": "vllm", "label": None, "model_id": "m"}
    return names | load | times | {"output_throughput": 1234.5} | changes


def test_runs_of_a_label_are_a_series_and_a_line_each_in_the_table() -> None:
    runs = [
        result(label="a", max_concurrency=16),
        result(label="b", max_concurrency=None, request_rate=2.0),
        result(label="a", max_concurrency=4),
        result(label="b", max_concurrency=None),
        result(label="b", max_concurrency=None, request_rate=0.5),
    ]
    found = {series.name: [load_of(run) for run in series.runs] for series in group(runs)}
    assert found == {"a": ["4", "16"], "b": ["0.5/s", "2/s", "all at once"]}
    names = [series.name for series in group([result(), result(model_id="n")])]
    assert names == ["vllm, m", "vllm, n"]
    lines = table(group([result(), result(max_concurrency=8, failed=2, p99_tpot_ms=9.0)]))
    assert [line.split() for line in lines.splitlines()[1:]] == [
        ["vllm", "4", "10", "-", "1,234.5", "20.00", "30.00", "5.00", "-"],
        ["8", "10", "2", "1,234.5", "20.00", "30.00", "5.00", "9.00"],
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"output_throughput": 1.0})])
def test_files_that_are_no_results_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_results([file])


def test_different_serving_shapes_are_not_compared() -> None:
    one = hash_shape({"model": "m", "parallel": {"tensor": 2}, "kernels": {"moe.route": "triton"}})
    other = hash_shape(one | {"parallel": {"tensor": 4}})
    assert len(one["hash"]) == 12 and one["hash"] != other["hash"]
    assert hash_shape(dict(reversed(one.items())))["hash"] == one["hash"]
    check_shapes([{"serving_shape": one}, {"serving_shape": dict(one)}, {}])
    with pytest.raises(ConfigError, match=r"settings: parallel \(.*2.*4.*--allow-different-shapes"):
        check_shapes([{"serving_shape": one}, {"serving_shape": other}])


# --- drafts --------------------------------------------------------------------------------------


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3.0e+02
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 72.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
"""


def test_draft_counts_are_added_subtracted_and_summarized() -> None:
    counts = DraftCounts.of_metrics(METRICS)
    assert counts == DraftCounts(120, 360, 180, (108, 72))
    assert counts.subtract(NO_DRAFTS) == counts
    assert counts.subtract(DraftCounts(100, 300, 150, (90,))) == DraftCounts(20, 60, 30, (18, 72))
    assert sum((counts, counts), NO_DRAFTS).drafts == 240
    summary = DraftCounts.of_metrics(METRICS).summary()
    assert summary["spec_decode_acceptance_rate"] == 50.0
    assert summary["spec_decode_acceptance_length"] == 2.5
    assert summary["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.9, 0.6])
    assert summary["spec_decode_synthetic"] is False
    synthetic = f'{METRICS}negamax:synthetic_acceptance_length{{model_name="m"}} 2.5\n'
    assert DraftCounts.of_metrics(synthetic).summary()["spec_decode_synthetic"] is True


@pytest.mark.parametrize("value", ["3.7e-05", "1E-7", "NaN", "+Inf", "-2.5", "3 1395066363000"])
def test_other_metrics_may_have_any_value(value: str) -> None:
    other = f'other_metric{{name="a b"}} {value}\n'
    assert DraftCounts.of_metrics(other + METRICS) == DraftCounts.of_metrics(METRICS)


@pytest.mark.parametrize("text", read_table("bench_serve_report.servers_without_drafts_have_none"))
def test_servers_without_drafts_have_none(text: str) -> None:
    assert DraftCounts.of_metrics(text).summary() == {}
