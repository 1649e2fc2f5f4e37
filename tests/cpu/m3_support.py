import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from m2_checkpoints import load_weights
from model_support import PagedRun, build

from negamax import SamplingParams
from negamax.engine.llm import Generation
from negamax.models.registry import read_spec

NUM_TOKENS = 48
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, seed=0)
PARAMS = msgspec.structs.replace(GREEDY, prompt_logprobs=3)


def check(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    generations: Sequence[Generation],
    *,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Check greedy answers of `num_tokens` and their log-probabilities against the oracle's."""
    for prompt, generation in zip(prompts, generations, strict=True):
        completion = generation.outputs[0]
        answer = completion.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert len(answer) == num_tokens
        logprobs = torch.log_softmax(logits, dim=-1)
        entries = (generation.prompt_logprobs or []) + (completion.logprobs or [])
        first = len(prompt) - 1 + num_tokens - len(entries)
        assert first in (0, len(prompt) - 1)
        for position, entry in enumerate(entries, start=first):
            assert entry.token_id == (prompt + answer)[position + 1]
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            for token_id, logprob in [(entry.token_id, entry.logprob), *top]:
                assert abs(logprob - float(logprobs[position, token_id])) < TOLERANCE


def prompts_of(seed: int, sizes: Mapping[str, Any]) -> list[list[int]]:
    """Return three prompts of different lengths.

    The first answer begins with dense and ends with sparse attention. The second prompt is far
    longer, and the third one is shorter than a block.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    block = sizes["index_block_size"]
    dense = sizes["index_topk_blocks"] * block
    return [
        torch.randint(3, sizes["vocab_size"], (length,), generator=generator).tolist()
        for length in (dense - 5, dense + 3 * block + 7, block - 1 - seed % 7)
    ]


TOKENS = [token % 89 for token in range(3, 203)]


def run_in_chunks(run: PagedRun, tokens: list[int]) -> torch.Tensor:
    ends = [0, 5, 48, 101, 150, *range(len(tokens) - 6, len(tokens) + 1)]
    steps = [tokens[first:end] for first, end in pairwise(ends)]
    return torch.cat([run.step([("a", chunk)])["a"] for chunk in steps])


def loaded(
    folder: Path,
    *,
    ranks: int = 1,
    block_size: int = 16,
    is_sharded: bool = False,
    holders: int = 1,
    **options: Any,
) -> PagedRun:
    """Load the model from `folder` on one of `ranks` ranks.

    If `is_sharded`, the rank holds a shard of the index keys. `PagedRun` explains `holders`.
    """
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    if is_sharded:
        spec = spec.shard_index()
    model = build(spec, loaded=False, **options)
    load_weights(model.weight_slots(), spec, folder)
    model.finish_loading()
    return PagedRun(model, ranks=ranks, num_blocks=32, block_size=block_size, holders=holders)
