from pathlib import Path

import pytest
import torch
from m2_checkpoints import from_fp8, to_fp8
from model_support import PagedRun, build
from test_m3_vision import load_tower
from test_triton_model import (
    QUANTIZED,
    Steps,
    errors,
    gpu_model,
    kernel_table,
    large_embeddings,
    padded_decode,
    use_few_programs,
)
from transformers import MiniMaxM3VLConfig
from triton_support import launches

from negamax.models.registry import read_spec
from tests import tiny_m3

TEXT = tiny_m3.random_sizes(
    0, vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=128, rotary_dim=64, intermediate_size=128,
    dense_intermediate_size=128, shared_intermediate_size=128, num_local_experts=2,
    num_experts_per_tok=2, routed_scaling_factor=2.0, mlp_layer_types=["dense", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=1, index_head_dim=128,
    index_block_size=16, index_topk_blocks=2, index_local_blocks=1,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip
SPEC = read_spec(MiniMaxM3VLConfig(text_config=TEXT).to_dict() | QUANTIZED)
# Each token attends to two of the prompt's three blocks. A decode beside a short prompt follows.
STEPS: Steps = [[("a", list(range(3, 40)))], [("a", [4]), ("b", [5, 6, 7])]]


@pytest.mark.parametrize(
    ("is_fp8", "error"), [(True, 0.2), pytest.param(False, 0.03, marks=pytest.mark.full)]
)
def test_m3_has_defined_logits(is_fp8: bool, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in ten may select another block with an equal score."""
    use_few_programs(monkeypatch)
    fp8 = to_fp8(large_embeddings(SPEC))
    plain = from_fp8(fp8)
    model = gpu_model(fp8 if is_fp8 else plain, keep_quantized=is_fp8, spec=SPEC)
    run, reference = PagedRun(model, dtype=torch.bfloat16), PagedRun(build(SPEC, plain))
    found = []
    for step in STEPS:
        actual, expected = run.step(step), reference.step(step)
        found += [each for name in actual for each in errors(actual[name], expected[name])]
    found.sort()
    assert found[len(found) // 2] < error and found[len(found) * 9 // 10] < 2 * error
    expected = reference.step([("a", [8])])["a"]
    for each in errors(padded_decode(run, "a", 8, rows=3), expected):
        assert each < 2 * error


def test_the_vision_tower_gives_the_bits_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_m3.make_seeing_model(3, **tiny_m3.random_sizes(3)).save_pretrained(tmp_path)
    images = [tiny_m3.random_image(56, height, torch.Generator()) for height in (28, 84)]
    towers = [load_tower(tmp_path, torch.bfloat16, own) for own in (None, kernel_table())]
    with launches(monkeypatch) as names, torch.inference_mode():
        expected, found = (tower(images) for tower in towers)
    assert torch.equal(found, expected)
    assert names.count("_rope") == tiny_m3.SEEING["num_hidden_layers"]
