import random

import pytest
import torch
from model_support import PagedRun, build, random_weights

from negamax.kernels.registry import OPS
from negamax.models.registry import read_spec
from tests import tiny_m3

BLOCK, DENSE = 16, 64  # tokens of a block, and of all selected blocks
SIZES = tiny_m3.text_config(
    2, vocab_size=320, hidden_size=128, intermediate_size=64, dense_intermediate_size=160,
    shared_intermediate_size=64, num_attention_heads=8, num_key_value_heads=2, index_n_heads=2,
    head_dim=64, index_head_dim=32, rotary_dim=32, num_hidden_layers=3, num_local_experts=4,
    num_experts_per_tok=2, index_block_size=BLOCK, index_topk_blocks=DENSE // BLOCK,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    mlp_layer_types=["dense", "sparse", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
)  # fmt: skip
SPEC = read_spec(SIZES)
RNG = random.Random(0)
TOKENS = [RNG.randrange(SPEC.vocab_size) for _ in range(400)]


def runs(dtype: torch.dtype) -> list[PagedRun]:
    model = build(SPEC, random_weights(SPEC, 1), dtype=dtype)
    return [PagedRun(model, num_blocks=number, dtype=dtype) for number in (200, 190)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_prompt_in_chunks_has_the_bits_of_one_pass(dtype: torch.dtype) -> None:
    whole, pieces = runs(dtype)
    expected = whole.step([("a", TOKENS)])["a"]
    pieces.step([("b", TOKENS[:100])])
    done = 0
    for size in (5, 58, 2, 17, 60, 9, 64, 35, 150):
        got = pieces.step([("b", [7]), ("a", TOKENS[done : done + size])])["a"]
        assert torch.equal(got, expected[done : done + size]), f"tokens {done} to {done + size}"
        done += size
    assert done == len(TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    together, alone = runs(dtype)
    prompts = {f"s{n}": TOKENS[-n:] for n in (1, 17, DENSE - 1, DENSE, 200, 333)}
    for name, tokens in prompts.items():
        for run in (together, alone):
            run.step([(name, tokens)])
    for size in (6, 3, 2, 5):
        members = RNG.sample(sorted(prompts), size)
        batch = together.step([(name, [size]) for name in members])
        for name in members:
            assert torch.equal(batch[name], alone.step([(name, [size])])[name]), (name, size)


@pytest.mark.parametrize("providers", ["native", "reference"])
def test_a_row_of_nan_leaves_nothing_behind(providers: str) -> None:
    """Reused blocks hold NaN; stale keys must not contribute or be selected."""
    weights = random_weights(SPEC, 1)
    broken = {name: w * float("nan") if "embed" in name else w for name, w in weights.items()}
    choices = dict.fromkeys(OPS, "reference") if providers == "reference" else {}
    good, bad = (build(SPEC, each, choices=choices) for each in (weights, broken))
    clean, used = PagedRun(good), PagedRun(bad)
    first_blocks = list(used.free)
    used.step([("x", TOKENS[:300])])
    used.model, used.free, used.tables, used.lengths = good, first_blocks, {}, {}
    for chunk in (TOKENS[:90], [7], TOKENS[90:130]):
        assert torch.equal(used.step([("a", chunk)])["a"], clean.step([("a", chunk)])["a"])
