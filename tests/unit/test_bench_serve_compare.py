import json
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.bench.serve_compare import group, load_of, read_results, table


def result(**changes: Any) -> dict[str, Any]:
    """The used fields of `vllm bench serve --save-result`."""
    load = {"request_rate": "inf", "max_concurrency": 4, "completed": 10}
    times = {"median_ttft_ms": 20.0, "p99_ttft_ms": 30.0, "median_tpot_ms": 5.0}
    names = {"backend": "vllm", "label": None, "model_id": "m"}
    return names | load | times | {"output_throughput": 1234.5} | changes


def test_runs_of_one_label_are_a_series_by_rising_load() -> None:
    runs = [
        result(label="a", max_concurrency=16),
        result(label="b", max_concurrency=None, request_rate=2.0),
        result(label="a", max_concurrency=4),
        result(label="b", max_concurrency=None),
        result(label="b", max_concurrency=None, request_rate=0.5),
    ]
    found = {series.name: [load_of(run) for run in series.runs] for series in group(runs)}
    assert found == {"a": ["4", "16"], "b": ["0.5/s", "2/s", "all at once"]}


def test_other_models_are_other_series() -> None:
    names = [series.name for series in group([result(), result(model_id="n")])]
    assert names == ["vllm, m", "vllm, n"]


def test_table_has_a_line_per_run() -> None:
    lines = table(group([result(), result(max_concurrency=8, failed=2, p99_tpot_ms=9.0)]))
    rows = [line.split() for line in lines.splitlines()[1:]]
    assert rows == [
        ["vllm", "4", "10", "-", "1,234.5", "20.00", "30.00", "5.00", "-"],
        ["8", "10", "2", "1,234.5", "20.00", "30.00", "5.00", "9.00"],
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"output_throughput": 1.0})])
def test_files_that_are_no_results_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_results([file])
