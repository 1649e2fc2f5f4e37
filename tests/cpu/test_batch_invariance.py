"""A token's result does not depend on the batch composition or on chunk borders.

Comparisons are bit for bit, except native decode against prefill.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from model_support import PagedRun, build, random_weights, tiny_config

from negamax.config.model_spec import ModelSpec
from negamax.models.registry import read_spec

# Large enough for the library's blocked code paths, small enough for a second.
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "intermediate_size": 160,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def models(dtype: torch.dtype, **choices: str) -> tuple[ModelSpec, PagedRun, PagedRun]:
    """Return two caches over one model with different block orders; `choices`: providers by op."""
    spec = read_spec(tiny_config(1, **SIZES))
    named = {op.replace("__", "."): provider for op, provider in choices.items()}
    model = build(spec, random_weights(spec, 1), dtype=dtype, choices=named)
    return (
        spec,
        PagedRun(model, num_blocks=200, dtype=dtype),
        PagedRun(model, num_blocks=190, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    spec, together, alone = models(dtype)
    rng = random.Random(0)
    lengths = [1, 17, 128, 129, 255, 301]
    prompts = {
        f"s{i}": [rng.randrange(spec.vocab_size) for _ in range(length)]
        for i, length in enumerate(lengths)
    }
    for name, tokens in prompts.items():
        for run in (together, alone):
            run.step([(name, tokens)])
    for size in (6, 3, 2, 5):
        members = rng.sample(sorted(prompts), size)
        tokens = {name: rng.randrange(spec.vocab_size) for name in members}
        batch = together.step([(name, [token]) for name, token in tokens.items()])
        for name, token in tokens.items():
            assert torch.equal(batch[name], alone.step([(name, [token])])[name]), (
                f"{name} in a batch of {size}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_and_decode_agree(dtype: torch.dtype) -> None:
    spec, whole, pieces = models(dtype, attention__decode="bucketed")
    rng = random.Random(1)
    tokens = [rng.randrange(spec.vocab_size) for _ in range(300)]
    expected = whole.step([("a", tokens)])["a"]
    pieces.step([("b", tokens[:50])])
    done = 0
    for size in (5, 1, 122, 1, 1, 2, 60, 9, 64, 35):
        chunk = ("a", tokens[done : done + size])
        neighbour = ("b", [rng.randrange(spec.vocab_size)])
        got = pieces.step([chunk, neighbour] if size == 1 else [neighbour, chunk])["a"]
        assert torch.equal(got, expected[done : done + size]), f"tokens {done} to {done + size}"
        done += size
    assert done == len(tokens)


def test_the_native_decode_agrees_with_prefill_to_rounding() -> None:
    """Two kernels of one definition differ by a few bf16 steps at most for logits near 3."""
    spec, whole, steps = models(torch.bfloat16)
    rng = random.Random(2)
    tokens = [rng.randrange(spec.vocab_size) for _ in range(120)]
    expected = whole.step([("a", tokens)])["a"]
    steps.step([("a", tokens[:80])])
    got = torch.cat([steps.step([("a", [token])])["a"] for token in tokens[80:]])
    difference = (got - expected[80:]).abs()
    assert difference.max() < 0.25
    assert difference.mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_leaves_nothing_behind(dtype: torch.dtype) -> None:
    """Reused blocks hold NaN."""
    spec, clean, used = models(dtype)
    tokens = list(range(1, 40))
    broken = build(
        spec,
        {
            name: w * float("nan") if "embed" in name else w
            for name, w in random_weights(spec, 1).items()
        },
        dtype=dtype,
    )
    good, used.model = used.model, broken
    first_blocks = list(used.free)
    used.step([("x", tokens)])
    used.model, used.free, used.tables, used.lengths = good, first_blocks, {}, {}
    assert torch.equal(used.step([("a", tokens[:30])])["a"], clean.step([("a", tokens[:30])])["a"])
    assert torch.equal(used.step([("a", [7])])["a"], clean.step([("a", [7])])["a"])
