"""Compare decode speed on the CPU with transformers' generate: same weights, dtype and run.

    python tools/bench_cpu.py [--model nano] [--dtype bfloat16] [--json FILE]

Each engine runs in its own process with its default number of threads. The engines are measured in
turn, and figures are medians over the rounds. A rate is output tokens per second of decoding,
without the time until the first output token.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from negamax.base.env import usable_cores

PROMPT_TOKENS = 100
Seconds = Callable[[list[list[int]], int], float]  # (prompts, output tokens of each) -> seconds


def load_transformers(folder: Path, dtype: str, implementation: str | None) -> Any:
    """Load the checkpoint in transformers. Our own op dequantizes the FP8 blocks."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import MiniMaxM2ForCausalLM

    from negamax.kernels.quantize.cpu import dequantize_block

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    target = getattr(torch, dtype)
    plain = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name in plain:
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            plain[name] = dequantize_block(plain[name], scale).to(target)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        save_file(plain, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        model = MiniMaxM2ForCausalLM.from_pretrained(scratch, dtype=target).eval()
    if implementation:
        model.set_experts_implementation(implementation)
    return model


def start_transformers(args: argparse.Namespace) -> tuple[Seconds, dict[str, Any]]:
    """Start transformers with greedy generation of a static batch."""
    import torch
    import transformers

    from negamax.checkpoint.hub import resolve_model

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load_transformers(resolve_model(args.model), args.dtype, args.experts)

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            started = time.perf_counter()
            lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            greedy = {"do_sample": False, "pad_token_id": 0}
            model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **greedy)
            return time.perf_counter() - started

    facts = {
        "version": transformers.__version__,
        "threads": torch.get_num_threads(),
        "experts": model.config._experts_implementation,
        "attention": model.config._attn_implementation,
    }
    return seconds, facts


def start_negamax(args: argparse.Namespace) -> tuple[Seconds, dict[str, Any]]:
    """Start the engine, which runs all requests at once, greedy, without prefix caching."""
    import negamax
    from negamax import LLM, SamplingParams
    from negamax.engine.core.setup import default_num_threads

    threads = args.threads or default_num_threads(1)
    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False, num_threads=threads)

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started

    return seconds, {"version": negamax.__version__, "threads": threads}


STARTS = {"transformers": start_transformers, "negamax": start_negamax}


def serve(name: str, args: argparse.Namespace, parent: Connection) -> None:
    """Run the child process: send the facts, then the seconds for each (prompts, output tokens)."""
    seconds, facts = STARTS[name](args)
    parent.send(facts)
    while (given := parent.recv()) is not None:
        parent.send(seconds(*given))


class Engine:
    """One engine, which runs in a child process."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._child, parent = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(name, args, parent), daemon=True)
        self._process.start()
        parent.close()  # Only the child has this end of the pipe, so that its death ends `recv`.
        self.facts = self._answer()

    def decode_rate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Return the output tokens per second of decoding `prompts` together."""
        seconds = self._seconds(prompts, new_tokens) - self._seconds(prompts, 1)
        return len(prompts) * (new_tokens - 1) / seconds

    def stop(self) -> None:
        self._child.send(None)
        self._process.join()

    def _seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        self._child.send((prompts, new_tokens))
        return float(self._answer())

    def _answer(self) -> Any:
        try:
            return self._child.recv()
        except EOFError:
            raise SystemExit("a child process ended; the lines above show its error") from None


def prompts_for(batch: int) -> list[list[int]]:
    """Make `batch` different prompts, equal in each run."""
    rows, columns = range(1, batch + 1), range(1, PROMPT_TOKENS + 1)
    return [[100 + (7919 * row * column) % 3900 for column in columns] for row in rows]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, and return the report."""
    engines = {name: Engine(name, args) for name in STARTS}
    rates: dict[str, list[float]] = {
        f"{name}, batch {batch}": [] for batch in (1, 16) for name in engines
    }
    for round_number in range(args.rounds + 1):
        for batch in (1, 16):
            for name, engine in engines.items():
                rate = engine.decode_rate(prompts_for(batch), args.new_tokens)
                if round_number:  # The first round is a warm-up.
                    rates[f"{name}, batch {batch}"].append(rate)
    for engine in engines.values():
        engine.stop()
    median = {name: statistics.median(values) for name, values in rates.items()}
    ours = median["negamax, batch 16"]
    return {
        "cores": usable_cores(),
        "engines": {name: engine.facts for name, engine in engines.items()},
        **{name: getattr(args, name) for name in ("dtype", "new_tokens", "rounds")},
        "prompt_tokens": PROMPT_TOKENS,
        "tokens_per_second": rates,
        "median": median,
        "ratio, 1 request": median["negamax, batch 1"] / median["transformers, batch 1"],
        "ratio, 16 requests to batch 1": ours / median["transformers, batch 1"],
        "ratio, 16 requests to static batch 16": ours / median["transformers, batch 16"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--experts", help="of transformers: eager, batched_mm, grouped_mm")
    parser.add_argument("--threads", type=int, help="of the engine")
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = compare(args)
    for name, value in report["median"].items():
        print(f"{name:24s} {value:9.1f} tokens/s")
    for name in [key for key in report if key.startswith("ratio")]:
        print(f"{name:40s} {report[name]:.2f}")
    print(json.dumps(report["engines"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
