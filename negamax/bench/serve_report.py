"""Convert the records of `negamax bench serve` to metrics, vLLM's text report, and JSON."""

import math
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from negamax import __version__
from negamax.base import env
from negamax.base.tables import read_table
from negamax.bench.serve import Measurement, first_start
from negamax.bench.serve_client import ResponseRecord
from negamax.bench.serve_options import METRICS, BenchOptions
from negamax.engine.shape import SHAPE

SCHEMA = "negamax-bench-serve/1"
WIDTH, LABEL_WIDTH = 50, 40
_LABELS: dict[str, dict[str, str]] = read_table(__file__, "labels.toml")
WORKLOAD_PREFIXES = (
    "random_", "prefix_", "sharegpt_", "custom_", "agent_", "prompt_format", "dataset_path",
)  # fmt: skip


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return the mean, median, standard deviation, percentiles and maximum of `values`, if any."""
    if not values:
        return {}
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{percent:g}": np.percentile(values, percent) for percent in percentiles}
    return {name: float(value) for name, value in found.items()} | {"max": max(values)}


# Metrics of one request, in seconds


def ttft(record: ResponseRecord) -> float:
    """Return the time from sending to the first output, or to the end if there is no output."""
    return (record.arrivals[0] if record.arrivals else record.ended) - record.started


def e2el(record: ResponseRecord) -> float:
    """Return the time from sending to the last chunk of the answer."""
    return record.ended - record.started


def output_tokens(record: ResponseRecord) -> int:
    """Return the output tokens that the server reported, or else the number of output chunks."""
    return len(record.arrivals) if record.output_tokens is None else record.output_tokens


def tpot(record: ResponseRecord) -> float | None:
    """Return the mean time of the output tokens after the first, or None if there are none."""
    tokens = output_tokens(record)
    return (e2el(record) - ttft(record)) / (tokens - 1) if tokens > 1 else None


def inter_token(record: ResponseRecord, *, rule: str) -> list[float]:
    """Return the gaps between chunks with output.

    The rule "gap" returns each gap once. If the server reports running token counts, the rule
    "token" divides the gap before a chunk of n tokens into n equal values.
    """
    gaps = [later - earlier for earlier, later in pairwise(record.arrivals)]
    if rule == "gap":
        return gaps
    values: list[float] = []
    for gap, (before, after) in zip(gaps, pairwise(record.running_tokens), strict=True):
        tokens = max(1, after - before)
        values += [gap / tokens] * tokens
    return values


# All requests


def summarize(measured: Measurement, options: BenchOptions) -> dict[str, Any]:
    """Return a run's metrics, without values of single requests. Times are in ms, rates in 1/s."""
    good = measured.good
    failures = Counter(record.error for record in measured.records if record.error is not None)
    total_input = sum(record.prompt_tokens or 0 for record in good)
    total_output = sum(output_tokens(record) for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    chunks = sum(len(record.arrivals) for record in good)
    seconds = measured.seconds
    values = metric_values(good, rule=options.itl_rule)
    summary: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(measured.records) - len(good),
        "failures": dict(failures.most_common()),
        "failure_examples": {
            record.error: record.detail
            for record in reversed(measured.records)
            if record.error is not None and record.detail
        },
        "interrupted": measured.interrupted,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_output_tokens_retokenized": measured.retokenized,
        "request_throughput": len(good) / seconds,
        "input_throughput": total_input / seconds,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "concurrency": sum(map(e2el, good)) / seconds,  # mean number of running requests
        "max_output_tokens_per_s": max(output_per_second(good), default=0.0),
        "max_concurrent_requests": peak_concurrency(measured.records),
        "total_cached_tokens": sum(cached) if cached else None,
        "finish_reasons": dict(Counter(one.finish_reason or "none" for one in good).most_common()),
        "tokens_per_chunk": total_output / chunks if chunks else None,
        "input_tokens_not_reported": sum(
            not record.prompt_reported or record.prompt_tokens is None for record in good
        ),
        "output_tokens_not_reported": sum(record.output_tokens is None for record in good),
        "running_tokens_reported": sum(any(record.running_tokens) for record in good),
        "request_goodput": _goodput(good, options.goodput) / seconds if options.goodput else None,
        "notes": list(measured.notes),
        **measured.drafts.summary(),
    }
    for metric in METRICS:
        milliseconds = [1e3 * value for value in values[metric]]
        for name, value in distribution(milliseconds, options.metric_percentiles).items():
            summary[f"{name}_{metric}_ms"] = value
    return summary


def metric_values(records: Sequence[ResponseRecord], *, rule: str) -> dict[str, list[float]]:
    """Return the values of each metric over `records`, in seconds."""
    return {
        "ttft": [ttft(record) for record in records],
        "tpot": [value for record in records if (value := tpot(record)) is not None],
        "itl": [value for record in records for value in inter_token(record, rule=rule)],
        "e2el": [e2el(record) for record in records],
    }


def _goodput(records: Sequence[ResponseRecord], limits: dict[str, float]) -> int:
    """Count requests that meet all `limits` in ms. A one-token answer meets any TPOT limit."""
    times = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    return sum(
        all(1e3 * (times[name](record) or 0.0) <= limit for name, limit in limits.items())
        for record in records
    )


def peak_concurrency(records: Sequence[ResponseRecord]) -> int:
    """Return the largest number of concurrent requests."""
    return max((running for _, running in concurrency_steps(records)), default=0)


def concurrency_steps(records: Sequence[ResponseRecord]) -> list[tuple[float, int]]:
    """Return pairs: a time, and the number of concurrent requests from this time on."""
    sent = [record for record in records if record.started]
    changes = [(record.started, 1) for record in sent] + [(record.ended, -1) for record in sent]
    times, steps = zip(*sorted(changes), strict=True) if changes else ((), ())
    return list(zip(times, accumulate(steps), strict=True))


def output_per_second(records: Sequence[ResponseRecord]) -> list[float]:
    """Return the output tokens in each second; an answer's tokens are divided among its chunks."""
    begin = min((record.started for record in records), default=0.0)
    bins: list[float] = []
    for record in records:
        share = output_tokens(record) / len(record.arrivals) if record.arrivals else 0.0
        for at in record.arrivals:
            second = int(at - begin)
            bins.extend([0.0] * (second + 1 - len(bins)))
            bins[second] += share
    return bins


# Text


def block(summary: dict[str, Any], options: BenchOptions) -> str:
    """Return a report in vLLM's and SGLang's format, with remarks on how metrics were counted."""
    values = summary | {"max_concurrency": options.max_concurrency}
    if math.isfinite(options.request_rate):
        values["request_rate"] = options.request_rate
    if summary["total_cached_tokens"] is not None:
        share = summary["total_cached_tokens"] / max(1, summary["total_input_tokens"])
        values["total_cached_tokens"] = f"{summary['total_cached_tokens']} ({share:.1%})"
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_lines(_LABELS["totals"], values)]
    for metric in options.percentile_metrics:
        lines += _metric_lines(metric, summary, options)
    lines += _draft_lines(summary)
    if summary["failures"]:
        lines.append(f"{'Failures':-^{WIDTH}}")
        for reason, count in summary["failures"].items():
            lines.append(_line(f"{reason}:", count))
            if reason in summary["failure_examples"]:
                lines.append(f"    {summary['failure_examples'][reason]}")
    return "\n".join([*lines, "=" * WIDTH, *remarks(summary, options)])


def _lines(labels: Mapping[str, str], values: Mapping[str, Any]) -> list[str]:
    """Return a line with label and value for each of `values` that is not None."""
    found = {label: values.get(name) for name, label in labels.items()}
    return [_line(f"{label}:", value) for label, value in found.items() if value is not None]


def _draft_lines(summary: dict[str, Any]) -> list[str]:
    """Return the lines about draft tokens in vLLM's format, or [] without draft tokens."""
    if "spec_decode_num_drafts" not in summary:
        return []
    is_synthetic = summary["spec_decode_synthetic"]
    title = "SYNTHETIC Acceptance of Drafts" if is_synthetic else "Speculative Decoding"
    shares = summary["spec_decode_per_position_acceptance_rates"]
    positions = [_line(f"  Position {i} (%):", 100.0 * share) for i, share in enumerate(shares)]
    return [f"{title:-^{WIDTH}}", *_lines(_LABELS["drafts"], summary), *positions]


def _metric_lines(metric: str, summary: dict[str, Any], options: BenchOptions) -> list[str]:
    short = metric.upper()
    names = ["mean", "median", *(f"p{at:g}" for at in options.metric_percentiles), "max"]
    shown = [
        _line(f"{name.capitalize()} {short} (ms):", summary[f"{name}_{metric}_ms"])
        for name in names
        if f"{name}_{metric}_ms" in summary
    ]
    return [f"{_LABELS['titles'][metric]:-^{WIDTH}}", *(shown or [_line(f"{short} (ms):", "none")])]


def _line(label: str, value: float | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{LABEL_WIDTH}} {text:<10}".rstrip()


def remarks(summary: dict[str, Any], options: BenchOptions) -> list[str]:
    """Return remarks on how the metrics were counted."""
    said = [f"Note: {note}." for note in summary["notes"]]
    if not summary["completed"]:
        return said
    if summary["output_tokens_not_reported"]:
        said.append(
            f"Output tokens: counted as chunks for {summary['output_tokens_not_reported']} "
            f"requests without reported usage; a chunk may contain several tokens."
        )
    else:
        said.append("Output tokens: as the server's usage reports them.")
    if summary["input_tokens_not_reported"]:
        said.append(
            f"Input tokens: {summary['input_tokens_not_reported']} requests have no reported usage "
            f"and are counted only if their prompt is token ids."
        )
    per_chunk = summary["tokens_per_chunk"]
    per_chunk = None if per_chunk is None else f"{per_chunk:.2f} tokens per chunk on average"
    chunks = per_chunk or "no chunk had output"
    is_counted = summary["running_tokens_reported"] == summary["completed"]
    if is_counted:
        said.append("TTFT and ITL: timed when the server's running token count rises.")
    else:
        said.append(
            "TTFT and ITL: timed by chunks with text, reasoning or tool calls; the server reports "
            "no running token count, so tokens without visible text arrive with the next chunk."
        )
    if options.itl_rule == "token" and is_counted:
        said.append(f"ITL: each gap is divided by the tokens of the later chunk ({chunks}).")
    else:
        said.append(f"ITL: each gap between chunks counts once ({chunks}).")
    if summary["interrupted"]:
        said.append(
            "Interrupted: running requests are failures, and remaining requests were not sent."
        )
    return said


# JSON


def document(
    measured: Measurement, options: BenchOptions, summary: dict[str, Any], *, detailed: bool
) -> dict[str, Any]:
    """Return the JSON result with vLLM's keys. `detailed` adds the times of each request."""
    found = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "endpoint": options.path,
        "label": options.label,
        "model_id": measured.model,
        SHAPE: measured.shape,
        "tokenizer_id": options.tokenizer or measured.model,
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "itl_rule": options.itl_rule,
        "workload": {
            key: value for key, value in vars(options).items() if key.startswith(WORKLOAD_PREFIXES)
        },
        "sampling": {"ignore_eos": options.ignores_eos, "temperature": options.temperature}
        | options.extra_body,
        "environment": {
            "negamax": __version__,
            "python": platform.python_version(),
            "system": platform.system(),
            "cores": env.usable_cores(),
        },
        **options.metadata,
        **summary,
    }
    return found | (details(measured, options) if detailed else {})


def details(measured: Measurement, options: BenchOptions) -> dict[str, Any]:
    """Return lists with an entry per request, in sending order. Times are in seconds."""
    records = sorted(measured.records, key=lambda record: record.started or record.ended)
    begin = first_start(records)
    return {
        "start_times": [record.started - begin if record.started else None for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [output_tokens(record) for record in records],
        "cached_lens": [record.cached_tokens for record in records],
        "ttfts": [ttft(record) if record.error is None else None for record in records],
        "latencies": [e2el(record) if record.error is None else None for record in records],
        "itls": [inter_token(record, rule=options.itl_rule) for record in records],
        "sessions": [record.session for record in records],
        "finish_reasons": [record.finish_reason for record in records],
        "errors": [record.error or "" for record in records],
    }


def file_name(measured: Measurement, options: BenchOptions) -> str:
    """Return a name such as 'openai-infqps-concurrency8-nano-20260101-120000.json'."""
    rate = f"{options.request_rate:g}qps"
    limit = options.max_concurrency
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = re.sub(r"[^A-Za-z0-9._-]", "_", measured.model.rstrip("/").rpartition("/")[2])
    when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{options.label or options.backend}-{rate}{concurrency}-{model}-{when}.json"
