"""transformers' MiniMaxM2ForCausalLM is the oracle: the real engine, with its paged cache, chunked prefill and shared steps,
must give its log-probabilities and its greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from negamax import LLM, SamplingParams
from tests import tiny

NUM_TOKENS = 64
TOLERANCE = 1e-4


def oracle_greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """64 greedy tokens and the logits [tokens, vocab] of every position after the prompt's first."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )[0]
        logits = model(ids.unsqueeze(0)).logits[0].float()
    return ids[len(prompt) :].tolist(), logits


@pytest.mark.parametrize("seed", range(24))
def test_engine_equals_transformers_on_a_random_model(seed: int, tmp_path: Path) -> None:
    sizes = tiny.random_sizes(seed)
    vocab_size = sizes["vocab_size"]
    model = tiny.make_model(seed, **sizes)
    generator = torch.Generator().manual_seed(1000 + seed)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in (1, 5, 23, 58)]
    engine = LLM(
        str(tiny.save(model, tmp_path)), dtype="float32", block_size=8, max_num_batched_tokens=11, max_num_seqs=3, num_threads=1
    )
    with engine:
        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=5, repetition_penalty=1.0
        )
        generations = engine.generate(prompts, params)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected, logits = oracle_greedy(model, prompt)
        completion = generation.outputs[0]
        assert completion.token_ids == expected
        logprobs = torch.log_softmax(logits, dim=-1)
        entries = (generation.prompt_logprobs or []) + (completion.logprobs or [])
        assert len(entries) == len(prompt) - 1 + NUM_TOKENS
        for position, entry in enumerate(entries):
            assert entry.token_id == (prompt + expected)[position + 1]
            assert abs(entry.logprob - float(logprobs[position, entry.token_id])) < TOLERANCE
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                assert abs(logprob - float(logprobs[position, token_id])) < TOLERANCE
