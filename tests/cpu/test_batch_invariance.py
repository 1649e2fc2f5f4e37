"""Check that a token's result does not depend on its batch or on chunk borders.

Results are compared bit for bit, except between native decode and prefill.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from model_support import PagedRun, build, random_weights, tiny_config

from negamax.kernels.registry import OPS
from negamax.models.registry import read_spec
from tests import tiny_m3

BLOCK, DENSE = 16, 64  # tokens of a block, and tokens of all selected blocks, in M3
SPARSE_LAYERS = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
# These sizes reach the library's blocked code, and each test still takes about a second.
SPECS = {
    "m2": read_spec(tiny_config(
        1, hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, rotary_dim=32, intermediate_size=160, num_local_experts=8,
        num_experts_per_tok=2, vocab_size=320, max_position_embeddings=1024,
    )),
    "m3": read_spec(tiny_m3.text_config(
        2, vocab_size=320, hidden_size=128, intermediate_size=64, dense_intermediate_size=160,
        shared_intermediate_size=64, num_attention_heads=8, num_key_value_heads=2, index_n_heads=2,
        head_dim=64, index_head_dim=32, rotary_dim=32, num_hidden_layers=3, num_local_experts=4,
        num_experts_per_tok=2, index_block_size=BLOCK, index_topk_blocks=DENSE // BLOCK,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        mlp_layer_types=["dense", "sparse", "sparse"], layer_types=SPARSE_LAYERS,
    )),
}  # fmt: skip
RNG = random.Random(0)
TOKENS = [RNG.randrange(320) for _ in range(400)]
BUCKETED = {"attention.decode": "bucketed"}


DTYPES = {
    "m2": (torch.bfloat16, torch.float32, torch.float16), "m3": (torch.float32, torch.bfloat16)
}  # fmt: skip
KINDS = [(family, dtype) for family, dtypes in DTYPES.items() for dtype in dtypes]
# The gate runs each kind with one thread or with two.
EVERY_KIND = [
    pytest.param(*kind, threads, marks=[pytest.mark.full] if (number + threads) % 2 else [])
    for number, kind in enumerate(KINDS)
    for threads in (1, 2)
]
every_kind = pytest.mark.parametrize(("family", "dtype", "threads"), EVERY_KIND)


@pytest.fixture(autouse=True)
def set_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.getfixturevalue("threads"))
    yield
    torch.set_num_threads(before)


def make_runs(
    family: str, dtype: torch.dtype, choices: dict[str, str] | None = None
) -> tuple[PagedRun, PagedRun]:
    """Return two caches of one model with different block orders. `choices` maps op to provider."""
    spec = SPECS[family]
    model = build(spec, random_weights(spec, 1), dtype=dtype, choices=choices)
    together, alone = (PagedRun(model, num_blocks=number, dtype=dtype) for number in (200, 190))
    return together, alone


@every_kind
def test_decode_rows_do_not_depend_on_batch(family: str, dtype: torch.dtype, threads: int) -> None:
    together, alone = make_runs(family, dtype)
    lengths = (1, 17, DENSE - 1, DENSE, 128, 129, 255, 301)
    prompts = {f"s{n}": TOKENS[-n:] for n in lengths}
    for name, tokens in prompts.items():
        for run in (together, alone):
            run.step([(name, tokens)])
    rng = random.Random(0)
    for size in (8, 3, 2, 5):
        members = rng.sample(sorted(prompts), size)
        batch = together.step([(name, [size]) for name in members])
        for name in members:
            assert torch.equal(batch[name], alone.step([(name, [size])])[name]), (name, size)


@every_kind
def test_chunks_and_decodes_equal_one_pass(family: str, dtype: torch.dtype, threads: int) -> None:
    # If decode uses the prefill kernel, single tokens of M2 may run as decodes.
    whole, pieces = make_runs(family, dtype, BUCKETED if family == "m2" else None)
    expected = whole.step([("a", TOKENS)])["a"]
    pieces.step([("b", TOKENS[:50])])
    done = 0
    single = (1, 1, 1) if family == "m2" else (3,)
    for size in (5, 58, 122, *single, 2, 60, 9, 64, 77):
        chunk, decode = ("a", TOKENS[done : done + size]), ("b", [7])
        got = pieces.step([chunk, decode] if size == 1 else [decode, chunk])["a"]
        assert torch.equal(got, expected[done : done + size]), f"tokens {done} to {done + size}"
        done += size
    assert done == len(TOKENS)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_native_decode_agrees_with_prefill_to_rounding(threads: int) -> None:
    """Check that two kernels of one definition differ by few bf16 steps for logits near 3."""
    whole, steps = make_runs("m2", torch.bfloat16)
    expected = whole.step([("a", TOKENS[:120])])["a"]
    steps.step([("a", TOKENS[:80])])
    got = torch.cat([steps.step([("a", [token])])["a"] for token in TOKENS[80:120]])
    difference = (got - expected[80:]).abs()
    assert difference.max() < 0.25
    assert difference.mean() < 0.02


@pytest.mark.parametrize(
    ("family", "dtype", "threads", "provider"),
    [
        *(("m2", dtype, 2, "native") for dtype in (torch.bfloat16, torch.float32, torch.float16)),
        ("m3", torch.float32, 1, "native"),
        ("m3", torch.float32, 1, "reference"),
    ],
)
def test_stale_keys_of_nan_in_reused_blocks_have_no_effect(
    family: str, dtype: torch.dtype, threads: int, provider: str
) -> None:
    spec = SPECS[family]
    weights = random_weights(spec, 1)
    broken = {name: w * float("nan") if "embed" in name else w for name, w in weights.items()}
    choices = dict.fromkeys(OPS, "reference") if provider == "reference" else {}
    good, bad = (build(spec, each, choices=choices, dtype=dtype) for each in (weights, broken))
    clean, used = PagedRun(good, dtype=dtype), PagedRun(bad, dtype=dtype)
    first_blocks = list(used.free)
    used.step([("x", TOKENS[:300])])
    used.model, used.free, used.tables, used.lengths = good, first_blocks, {}, {}
    for chunk in (TOKENS[:90], [7], TOKENS[90:130]):
        assert torch.equal(used.step([("a", chunk)])["a"], clean.step([("a", chunk)])["a"])
