"""Fixed numbers of draft tokens against the number that the engine chooses.

    python tools/bench_draft_lengths.py [nano] [--rows 1 4 16 64 128] [--suite nano-math]
        [--device cpu]

For each number of sequences at once: output tokens per second without drafts, with nano's own draft
that rests all the time, with always 1, 2 and 3 of its tokens, and with `adaptive`. Engines answer
the same problems in turns; each figure is the median over the rounds, the first of which only warms
up. A share is that of `adaptive` in the best of the others, by the median of the ratios.

On the CPU engines have one thread, and time is processor time, that of steps, too: what else runs
on the machine changes no choice. On a GPU it is the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nano.suites import arithmetic, tool_calls
from negamax import LLM, SamplingParams
from negamax.engine.core import loop
from negamax.scheduler.draft_length import FixedDraftLength

MOST = 3
KV_CACHE_MEMORY = 2**30  # of each engine on a GPU
PROBLEMS = {"nano-math": arithmetic.problems, "nano-tools": tool_calls.problems}
# what is drafted, by the engine's options; None: no draft is loaded
MODES: dict[str, dict[str, Any] | None] = {
    "no drafts": None,
    "rests": {"num_speculative_tokens": MOST},
    **{f"k = {k}": {"num_speculative_tokens": k, "adaptive": False} for k in range(1, MOST + 1)},
    "adaptive": {"num_speculative_tokens": MOST},
}


def engine(model: str, fields: dict[str, Any] | None, rows: int, *, device: str) -> LLM:
    options: dict[str, Any] = (
        {"num_threads": 1}
        if device == "cpu"
        else {"kv_cache_memory": KV_CACHE_MEMORY, "max_cudagraph_capture_size": rows}
    )
    if fields is not None:
        draft = {"method": "eagle3", "model": f"{model}-draft", **fields}
        options["speculative_config"] = draft
    return LLM(
        model, device=device, max_num_seqs=rows, max_model_len=1024,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def run(llm: LLM, suite: str, count: int, *, seed: int, clock: Callable[[], float]) -> float:
    """Output tokens per second of `clock`."""
    prompts = [
        llm.render(list(one.messages), tools=list(getattr(one, "tools", ())) or None)
        for one in PROBLEMS[suite](count, seed)
    ]
    began = clock()
    done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=256))
    seconds = clock() - began
    return sum(len(one.outputs[0].token_ids) for one in done) / seconds


def bench(model: str, suite: str, rows: int, *, rounds: int, device: str) -> None:
    clock = time.process_time if device == "cpu" else time.perf_counter
    engines = {name: engine(model, fields, rows, device=device) for name, fields in MODES.items()}
    for scheduler in engines["rests"]._loop._scheduler.ranks:
        scheduler._draft_length = FixedDraftLength(0)
    found: dict[str, list[float]] = {name: [] for name in MODES}
    count = max(8, 2 * rows)
    for number in range(rounds + 1):
        for name, llm in engines.items():
            rate = run(llm, suite, count, seed=number, clock=clock)
            if number:
                found[name].append(rate)
    for llm in engines.values():
        llm.shutdown()
    rates = {name: statistics.median(each) for name, each in found.items()}
    best = max((name for name in MODES if name != "adaptive"), key=rates.__getitem__)
    ratios = [one / other for one, other in zip(found["adaptive"], found[best], strict=True)]
    shown = "".join(f"{rate:>11,.0f}" for rate in rates.values())
    print(f"{rows:>5}{shown}   {statistics.median(ratios):.3f} of {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fixed and chosen numbers of draft tokens.")
    parser.add_argument("model", nargs="?", default="nano", help="nano, nano-m3")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--suite", choices=PROBLEMS, default="nano-math")
    parser.add_argument("--rounds", type=int, default=3, help="behind the one that warms up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        loop.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]
    print(" rows" + "".join(f"{name:>11}" for name in MODES) + "   share of adaptive")
    for rows in options.rows:
        bench(options.model, options.suite, rows, rounds=options.rounds, device=options.device)


if __name__ == "__main__":
    main()
