"""Record the exact bits that models compute on the CPU, and compare them later.

    OMP_NUM_THREADS=1 python tools/record_bits.py record FILE   # before a change
    OMP_NUM_THREADS=1 python tools/record_bits.py check FILE    # after it; exit 1 if bits differ

Each setting has one hash of all tokens and log-probabilities. Some settings run random models of
odd sizes in float32 and bfloat16. The other settings run nano with greedy and random sampling, with
prompts in chunks, with preemptions, and on two ranks. The bits depend on the processor and the
PyTorch version, so a file is valid on one machine only.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from nano.suites import arithmetic, tool_calls
from negamax import LLM, SamplingParams
from negamax.engine.llm import Generation
from tests import tiny

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5, prompt_logprobs=3
)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=20, min_p=0.01, seed=7, max_tokens=24, logprobs=2,
    repetition_penalty=1.1, frequency_penalty=0.1,
)  # fmt: skip
UNFILTERED = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
TINY = {
    "f32 greedy": ("float32", GREEDY),
    "bf16 greedy": ("bfloat16", GREEDY),
    "f32 drawn": ("float32", DRAWN),
}
NANO: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "drawn": (DRAWN, {}),
    "plain drawn": (UNFILTERED, {}),
    "chunks": (GREEDY, {"max_num_batched_tokens": 48, "block_size": 16}),
    "f32": (GREEDY, {"dtype": "float32"}),
    "preempted": (GREEDY, {"num_kv_blocks": 72, "block_size": 16, "max_model_len": 1024}),
    "tp2": (DRAWN, {"tensor_parallel_size": 2}),
}


def hash_of(generations: Iterable[Generation]) -> str:
    """Return a hash of all tokens and log-probabilities."""
    found: list[Any] = []
    for generation in generations:
        for output in generation.outputs:
            found.append(output.token_ids)
            entries = output.logprobs or []
            found += [(each.logprob, each.top_ids, each.top_logprobs) for each in entries]
        found.append([entry.logprob for entry in generation.prompt_logprobs or []])
    # JSON writes floats without rounding.
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:20]


def tiny_hashes(seed: int) -> Iterator[tuple[str, str]]:
    """Yield hashes of a random model, with small steps that mix requests."""
    sizes = tiny.random_sizes(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model = tiny.make_model(seed, **sizes)
    draw, vocab_size = partial(torch.randint, 3, generator=generator), sizes["vocab_size"]
    prompts = [draw(vocab_size, (length,)).tolist() for length in (1, 5, 23, 58)]
    limits = {"block_size": 8, "max_num_batched_tokens": 11, "max_num_seqs": 3, "num_threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        tiny.save(model, Path(folder))
        for name, (dtype, params) in TINY.items():
            with LLM(folder, dtype=dtype, **limits) as llm:
                yield f"tiny {seed} {name}", hash_of(llm.generate(prompts, params))


def nano_hashes() -> Iterator[tuple[str, str]]:
    """Yield hashes of nano on problems of its suites."""
    questions = [(each.messages, None) for each in arithmetic.problems(6, 5)]
    questions += [(each.messages, each.tools) for each in tool_calls.problems(6, 5)]
    for name, (params, options) in NANO.items():
        with LLM("nano", num_threads=1, **options) as llm:
            texts = [llm.render(list(messages), tools=tools) for messages, tools in questions]
            prompts = [llm.tokenizer.encode(text) for text in texts]
            yield f"nano {name}", hash_of(llm.generate(prompts, params))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: bits for seed in (0, 3, 7, 12) for name, bits in tiny_hashes(seed)}
    found |= dict(nano_hashes())
    if given.action == "record":
        given.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"recorded {len(found)} settings")
        return 0
    recorded = json.loads(given.file.read_text(encoding="utf-8"))
    differing = [name for name, bits in recorded.items() if found.get(name) != bits]
    print(f"DIFFERENT: {', '.join(differing)}" if differing else f"all {len(recorded)} are equal")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
