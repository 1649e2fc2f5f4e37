"""What the dependent launch of each kernel is worth in whole decode steps, on one GPU.

    python tools/bench_dependent_launches.py --model minimax-m2 --quantization int4 \
        --num-hidden-layers 14 --rows 1 4 16 [--kv-cache-dtype fp8] [--ranks 4] [--json FILE]

A step is captured as it is, and for each of its kernels twice more, in the other ways of these:
started before the kernel in front has ended (`early`), behind it, with the next one still early
(`behind`), and like any other kernel (`plain`). These graphs of one process are replayed in turns;
each figure is the median of the rounds, beside that of the step as it is. Steps at the limit of the
GPU's power differ by a tenth among themselves: look at the ranges.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench_rank_share import become_share
from triton import JITFunction

from negamax.bench.workload import RandomPrompts, run_batch
from negamax.engine.core.setup import start_loop
from negamax.kernels.launch.triton import compiling
from negamax.options.engine import EngineOptions
from negamax.worker.batch import StepColumns
from negamax.worker.config import DECODE_SECONDS
from negamax.worker.graphs import StepGraphs

CONTEXT, TOKENS = 1000, 24
ROUNDS, ROUND_SECONDS = 7, 0.1
AS_IS = "as it is"
# whether the next kernel may start early, and whether this one does
WAYS = {"early": (True, True), "behind": (True, False), "plain": (False, False)}


@contextmanager
def launches_of(kernel: str, way: str, seen: dict[str, tuple[bool, bool]]) -> Iterator[None]:
    """Inside, launches of `kernel` are of `way`; `seen` gets the names of dependent ones, and how
    they are launched.
    """
    launch = JITFunction.run

    def run(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        name = function.fn.__name__
        if kwargs.get("PDL"):
            seen[name] = True, kwargs.get("launch_pdl", False)
            if name == kernel:
                kwargs["PDL"], kwargs["launch_pdl"] = WAYS[way]
        return launch(function, *args, **kwargs)

    with patch.object(JITFunction, "run", run):
        yield


class Variants:
    """Takes the place of `StepGraphs.replay_seconds`, which runs where graphs are captured."""

    def __init__(self) -> None:
        self.microseconds: dict[str, list[float]] = {}
        self._seconds = StepGraphs.replay_seconds

    def replay_seconds(self, graphs: StepGraphs, num_rows: int, *, repeats: int) -> float | None:
        shape = graphs.find_decodes(num_rows)
        pool_of = graphs._runtime.graph_pool
        assert shape is not None and pool_of is not None, "no graph of so many rows"
        pool, captured = pool_of(), graphs._graphs[shape]
        seen: dict[str, tuple[bool, bool]] = {}

        def variant(kernel: str, way: str) -> Any:
            step = graphs._steps(shape, graphs._kv)[0]
            graphs._send(shape, StepColumns.of_decodes([], []))
            with launches_of(kernel, way, seen):
                with compiling(share=0, shares=1, threads=8):
                    step()
                return pool.capture(step)

        made = {AS_IS: variant("", AS_IS)}
        for kernel in sorted(seen):
            others = [way for way, launched in WAYS.items() if launched != seen[kernel]]
            made |= {f"{kernel} {way}": variant(kernel, way) for way in others}
        self.microseconds = {name: [] for name in made}
        seconds = self._seconds(graphs, num_rows, repeats=repeats)
        assert seconds is not None
        repeats = max(3, int(ROUND_SECONDS / seconds))
        for _ in range(ROUNDS):
            for name, graph in made.items():
                graphs._graphs[shape] = [graph]
                taken = self._seconds(graphs, num_rows, repeats=repeats)
                assert taken is not None
                self.microseconds[name].append(1e6 * taken)
        graphs._graphs[shape] = captured
        return seconds


def bench(options: EngineOptions, rows: list[int]) -> dict[int, dict[str, list[float]]]:
    """Microseconds of each round, by rows and variant."""
    loop, info = start_loop(options)
    prompts, found, variants = RandomPrompts(info, seed=0, temperature=1.0), {}, Variants()

    def replay_seconds(graphs: StepGraphs, num_rows: int, *, repeats: int) -> float | None:
        return variants.replay_seconds(graphs, num_rows, repeats=repeats)

    try:
        with patch.object(StepGraphs, "replay_seconds", replay_seconds):
            for num_rows in rows:
                run_batch(loop, prompts.batch(num_rows, input_len=CONTEXT, output_len=TOKENS))
                loop.run_debug_command(DECODE_SECONDS, num_rows)
                found[num_rows] = variants.microseconds
                show(num_rows, variants.microseconds)
    finally:
        loop.shutdown()
    return found


def show(num_rows: int, rounds: dict[str, list[float]]) -> None:
    before = statistics.median(rounds[AS_IS])
    print(f"{num_rows} rows")
    for name, each in sorted(rounds.items(), key=lambda item: statistics.median(item[1])):
        median = statistics.median(each)
        print(
            f"{median:10.1f} us {100 * (median / before - 1):+6.2f} %  {name}"
            f"  ({min(each):.1f} to {max(each):.1f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minimax-m2")
    parser.add_argument("--quantization")
    parser.add_argument("--num-hidden-layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=1, help="what one of so many ranks has")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--index-cache-dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    become_share(words.ranks)
    options = EngineOptions(
        model=words.model, load_format="synthetic", quantization=words.quantization,
        num_hidden_layers=words.num_hidden_layers, kv_cache_dtype=words.kv_cache_dtype,
        index_cache_dtype=words.index_cache_dtype, max_model_len=4096, device="cuda",
        max_num_seqs=max(words.rows),
    )  # fmt: skip
    found = bench(options, words.rows)
    if words.json:
        words.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
