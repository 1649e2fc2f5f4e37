from pathlib import Path

import pytest
import torch

from negamax import LLM, SamplingParams
from tests import tiny

NUM_TOKENS = 64
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(7, 24))]
)
def test_engine_equals_transformers_on_a_random_model(seed: int, tmp_path: Path) -> None:
    model_sizes = tiny.random_sizes(seed)
    vocab_size = model_sizes["vocab_size"]
    model = tiny.make_model(seed, **model_sizes)
    generator = torch.Generator().manual_seed(1000 + seed)
    sizes = (1, 5, 23, 58)
    prompts = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in sizes]
    limits = {"block_size": 8, "max_num_batched_tokens": 11, "max_num_seqs": 3, "num_threads": 1}
    counts = {"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": 5}
    params = SamplingParams(temperature=0.0, ignore_eos=True, repetition_penalty=1.0, **counts)
    with LLM(str(tiny.save(model, tmp_path)), dtype="float32", **limits) as engine:
        generations = engine.generate(prompts, params)
    for prompt, generation in zip(prompts, generations, strict=True):
        completion = generation.outputs[0]
        answer = completion.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0].float()
        # Each token is the oracle's greedy token after the text before it.
        assert answer == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert len(answer) == NUM_TOKENS
        logprobs = torch.log_softmax(logits, dim=-1)
        entries = (generation.prompt_logprobs or []) + (completion.logprobs or [])
        assert len(entries) == len(prompt) - 1 + NUM_TOKENS
        for position, entry in enumerate(entries):
            assert entry.token_id == (prompt + answer)[position + 1]
            assert abs(entry.logprob - float(logprobs[position, entry.token_id])) < TOLERANCE
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                assert abs(logprob - float(logprobs[position, token_id])) < TOLERANCE
