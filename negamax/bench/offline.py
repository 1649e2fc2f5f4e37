"""`negamax bench offline`: speed of prefill and decode without a server.

For each batch size, the command runs four batches. The first batch is a short warm-up. The second
batch counts how many experts are selected. A batch of one output token measures the prefill time,
and a batch of `output_len` tokens measures decoding. The time per output token is the decoding time
divided by `output_len - 1`. The decoding time starts when all requests have their first token.

With `cached_prompts`, the last batch repeats prompts whose KV cache is stored, to measure decode
steps after long contexts.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import msgspec

from negamax.base.errors import ConfigError
from negamax.bench.drafts import NO_DRAFTS, DraftCounts
from negamax.bench.group import Group, label, sizes
from negamax.bench.offline_options import OfflineWorkload
from negamax.bench.report import environment
from negamax.bench.workload import RandomPrompts, Write, run_batch
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.setup import start_loop
from negamax.engine.core.source import locate
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import DECODE_SECONDS, DISTINCT_EXPERTS, OBSERVE_ROUTING

WARM_UP_TOKENS = 8
# output tokens per request while experts are counted; more than there are prefill steps
OBSERVED_TOKENS = 24
SCHEMA = "negamax-bench-offline/1"


@dataclass(frozen=True)
class Repeat:
    """One measurement of one batch size. Times are in seconds."""

    prefill_seconds: float  # Duration of a batch with one output token per request.
    ttft: tuple[float, ...]  # Time to first token of each request, ascending.
    total_seconds: float  # Duration of the timed batch.
    tpot: float  # (end of the batch - latest first token) / (output_len - 1).
    step_median: float
    step_p99: float
    busy: float
    idle: float
    cached_tokens: int
    preemptions: int
    drafts: DraftCounts = NO_DRAFTS  # draft tokens of the timed batch


def conditions(options: EngineOptions, workload: OfflineWorkload) -> dict[str, Any]:
    """Return the settings that two comparable results must have in common."""
    return {
        "model": options.model,
        "num_layers": locate(options).spec.num_layers,
        **sizes(options),
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "cached_prompts": workload.cached_prompts,
    }


def run(options: EngineOptions, workload: OfflineWorkload, *, say: Write) -> dict[str, Any]:
    """Measure all batch sizes with a new engine. Return a JSON document. Raises `ConfigError`."""
    if workload.cached_prompts and not options.enable_prefix_caching:
        raise ConfigError(
            "--cached-prompts needs the prefix cache, which is disabled",
            hint="remove --cached-prompts or --no-enable-prefix-caching",
        )
    started = time.perf_counter()
    loop, info = start_loop(options)
    start_seconds = time.perf_counter() - started
    gc.freeze()  # exclude current objects from garbage collection, as the engine process does
    split = label(sizes(options))
    say(f"{info.model}, {split} on {info.device}: ready after {start_seconds:.1f} s")
    group = Group(ParallelLayout.of(options.parallel))
    try:
        runs = _measure_all(loop, info, workload, group, say=say)
    finally:
        loop.shutdown()
        gc.unfreeze()  # at exit, Triton 3.9 reports frozen objects as leaks
    result = {
        "engine": "negamax",
        **conditions(options, workload),
        **_filters(workload),
        "repeat": workload.repeat,
        "start_seconds": start_seconds,
        "runs": runs,
        "options": asdict(options),
        "info": msgspec.to_builtins(info),
        "environment": environment(info.device),
    }
    return {"schema": SCHEMA, "results": [result]}


def _filters(workload: OfflineWorkload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in ("temperature", "top_k", "top_p")}


def _measure_all(
    loop: EngineLoop, info: ModelInfo, workload: OfflineWorkload, group: Group, *, say: Write
) -> list[dict[str, Any]]:
    prompts = RandomPrompts(info, seed=workload.seed, **_filters(workload))
    runs = []
    for num_requests in workload.concurrency:
        distinct = None
        if not workload.cached_prompts:
            distinct = _warm_up(loop, prompts, workload, group, num_requests=num_requests)
        repeats = [
            _measure(loop, prompts, workload, num_requests=num_requests)
            for _ in range(workload.repeat)
        ]
        summary = summarize(repeats, num_requests=num_requests, input_len=workload.input_len)
        answers = loop.run_debug_command(DECODE_SECONDS, group.rank_rows(num_requests))
        of_stages = group.stage_milliseconds(answers)
        runs.append(
            summary
            | {
                "step_rows": group.step_rows(num_requests),
                "distinct_experts": distinct,
                "device_step_ms": max(of_stages, default=None),
                "device_step_ms_of_stages": of_stages,
            }
        )
        say(_progress(runs[-1]))
    return runs


def _warm_up(
    loop: EngineLoop,
    prompts: RandomPrompts,
    workload: OfflineWorkload,
    group: Group,
    *,
    num_requests: int,
) -> float | None:
    """Run short batches. Return the mean number of experts used per layer and step, or None."""
    seen: list[float] = []

    def observe() -> None:
        answers = loop.run_debug_command(DISTINCT_EXPERTS, group.rank_rows(num_requests))
        distinct = group.distinct_experts(answers)
        if distinct is not None:
            seen.append(distinct)

    batch = partial(prompts.batch, num_requests, input_len=workload.input_len)
    run_batch(loop, batch(output_len=WARM_UP_TOKENS))
    if not workload.no_distinct_experts:
        loop.run_debug_command(OBSERVE_ROUTING, 1)
        run_batch(loop, batch(output_len=OBSERVED_TOKENS), on_decode=observe)
        loop.run_debug_command(OBSERVE_ROUTING, 0)
    return statistics.mean(seen) if seen else None


def _measure(
    loop: EngineLoop, prompts: RandomPrompts, workload: OfflineWorkload, *, num_requests: int
) -> Repeat:
    size = {"input_len": workload.input_len, "output_len": workload.output_len}
    first = prompts.batch(num_requests, **size)

    def drafts() -> DraftCounts:
        return DraftCounts.of_stats(loop.stats(), prompts.speculation)

    prefill = run_batch(loop, prompts.again(first, output_len=1))
    if workload.cached_prompts:
        run_batch(loop, prompts.again(first, output_len=WARM_UP_TOKENS))
        second = prompts.again(first, output_len=workload.output_len)
    else:
        second = prompts.batch(num_requests, **size)
    before = drafts()
    full = run_batch(loop, second)
    steps = sorted(full.steps)
    return Repeat(
        prefill_seconds=prefill.seconds,
        ttft=full.ttft,
        total_seconds=full.seconds,
        tpot=(full.seconds - full.ttft[-1]) / (workload.output_len - 1),
        step_median=statistics.median(steps),
        step_p99=steps[int(0.99 * (len(steps) - 1))],
        busy=full.busy,
        idle=full.idle,
        cached_tokens=prefill.cached_tokens
        + (0 if workload.cached_prompts else full.cached_tokens),
        preemptions=prefill.preemptions + full.preemptions,
        drafts=drafts().subtract(before),
    )


def summarize(repeats: Sequence[Repeat], *, num_requests: int, input_len: int) -> dict[str, Any]:
    """Return medians over `repeats`, as an entry of "runs" in the JSON document."""

    def median(of: Callable[[Repeat], float]) -> float:
        return statistics.median(of(repeat) for repeat in repeats)

    prefill, tpot = median(lambda r: r.prefill_seconds), median(lambda r: r.tpot)
    measured = sum(r.busy + r.idle for r in repeats)
    is_found = tpot > 0  # tpot is 0 if one step with drafts yielded all tokens
    return {
        "concurrency": num_requests,
        "ttft_ms_median": 1e3 * median(lambda r: statistics.median(r.ttft)),
        "ttft_ms_max": 1e3 * median(lambda r: r.ttft[-1]),
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": num_requests * input_len / prefill,
        "tpot_ms": 1e3 * tpot if is_found else None,
        "decode_tokens_per_second": num_requests / tpot if is_found else None,
        "step_ms_median": 1e3 * median(lambda r: r.step_median),
        "step_ms_p99": 1e3 * median(lambda r: r.step_p99),
        "gpu_idle_share": sum(r.idle for r in repeats) / measured if measured else None,
        "cached_tokens": sum(r.cached_tokens for r in repeats),
        "preemptions": sum(r.preemptions for r in repeats),
        **sum((r.drafts for r in repeats), NO_DRAFTS).summary(),
        "repeats": [asdict(repeat) for repeat in repeats],
    }


def _progress(run: dict[str, Any]) -> str:
    words = [f"concurrency {run['concurrency']}: prefill {run['prefill_seconds']:.3f} s"]
    if run["tpot_ms"] is None:
        words.append("--output-len is too short to measure the time per output token")
    else:
        words.append(f"{run['tpot_ms']:.2f} ms per token and request")
        words.append(f"{run['decode_tokens_per_second']:.0f} tokens/s")
    if run["cached_tokens"]:
        cached = f"{run['cached_tokens']} prompt tokens came from the prefix cache"
        words.append(f"{cached}, so the prefill time is too short")
    if "spec_decode_num_drafts" in run:
        kind = "SYNTHETIC acceptance" if run["spec_decode_synthetic"] else "acceptance"
        words.append(f"{kind} length {run['spec_decode_acceptance_length']:.2f}")
    if run["preemptions"]:
        words.append(f"{run['preemptions']} preemptions: the KV cache is too small for this batch")
    return ", ".join(words)
