"""Compare results of `negamax bench serve`: read files, group them, print a table.

A result is the JSON file of `--save-result`. Negamax and vLLM use the same names in result files.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError
from negamax.engine.shape import HASH, SHAPE

_SHOWN = ("median_ttft", "p99_ttft", "median_tpot", "p99_tpot")
NEEDED = ("output_throughput", "median_ttft_ms", "median_tpot_ms")


@dataclass(frozen=True)
class Series:
    """The runs of one server, sorted by load."""

    name: str
    runs: tuple[Mapping[str, Any], ...]  # results in the format of `document`


def read_json(file: Path) -> Any:
    """Read a result file. Raises `ConfigError` for an unreadable file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} is not a readable result: {error}") from None


def is_accuracy(result: Any) -> bool:
    """Return whether `result` is from `bench accuracy --json`."""
    return isinstance(result, list) and all(
        isinstance(each, dict) and "solved" in each for each in result
    )


def read_results(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the serving results in `files`. Raises `ConfigError` for an unusable file."""
    results = []
    for file in files:
        found = read_json(file)
        missing = [name for name in NEEDED if not isinstance(found, dict) or name not in found]
        if missing:
            raise ConfigError(
                f"{str(file)!r} is not a benchmark result: {missing[0]} is missing",
                hint="use files of `bench serve --save-result` with answers of two or more tokens",
            )
        results.append(found)
    return results


def check_shapes(results: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `ConfigError` that lists the differing settings if the servers of `results` differ.

    A result that does not contain settings is accepted, for example a result of vLLM.
    """
    shapes = [shape for result in results if isinstance(shape := result.get(SHAPE), dict)]
    fields = sorted({key for shape in shapes for key in shape} - {HASH})
    differing = []
    for field in fields:
        values = list(dict.fromkeys(json.dumps(shape.get(field)) for shape in shapes))
        if len(values) > 1:
            differing.append(f"{field} ({', '.join(value[:60] for value in values)})")
    if differing:
        raise ConfigError(
            f"the results are from servers with different settings: {'; '.join(differing)}",
            hint="add --allow-different-shapes to compare the results anyway",
        )


def group(results: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Group results by model and label, or by backend without a label. Sort series by load."""
    models = {result.get("model_id") for result in results}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        name = str(result.get("label") or result.get("endpoint_type") or result.get("backend"))
        if len(models) > 1:
            name += f", {result.get('model_id')}"
        found.setdefault(name, []).append(result)
    return [Series(name, tuple(sorted(runs, key=_load))) for name, runs in found.items()]


def _load(result: Mapping[str, Any]) -> tuple[float, float]:
    return float(result.get("max_concurrency") or "inf"), float(result.get("request_rate") or "inf")


def load_of(result: Mapping[str, Any]) -> str:
    """Return the load, such as "16" (concurrent requests at most) or "4/s" (arrival rate)."""
    concurrency, rate = _load(result)
    if concurrency != float("inf"):
        return f"{concurrency:g}"
    return f"{rate:g}/s" if rate != float("inf") else "all at once"


def table(series: Sequence[Series]) -> str:
    """Return a text table with one line per run."""
    head = ("", "load", "done", "failed", "output tok/s", "TTFT p50", "p99", "TPOT p50", "p99 ms")
    rows = [head]
    for one in series:
        for number, run in enumerate(one.runs):
            failed, shown = run.get("failed"), [run.get(f"{name}_ms") for name in _SHOWN]
            rows.append(
                (
                    "" if number else one.name,
                    load_of(run),
                    str(run.get("completed", 0)),
                    "-" if failed is None else str(failed),
                    f"{run['output_throughput']:,.1f}",
                    *("-" if value is None else f"{value:,.2f}" for value in shown),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            word.rjust(width) if column else word.ljust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
