"""Lists of module names in checkpoints' descriptions: whichever prefix and spelling they use."""

from __future__ import annotations

import pytest

from negamax.base.errors import ConfigError
from negamax.quantization.scheme import is_within, matches

EXPERT = "model.layers.10.block_sparse_moe.experts.0.w1"
GATE = "model.layers.10.block_sparse_moe.gate"


@pytest.mark.parametrize(
    ("module", "name", "within"),
    [
        (GATE, "gate", True),
        (GATE, "mlp.gate", True),
        (GATE, "block_sparse_moe.gate", True),
        (GATE, "model.layers.10.mlp.gate", True),
        (GATE, "language_model.model.layers.10.block_sparse_moe.gate", True),
        (GATE, "model.language_model.layers.10.mlp.gate", True),
        (GATE, "model.layers.10.", True),
        (GATE, "model.layers.1", False),
        (GATE, "block_sparse_moe.gate_up", False),
        (GATE, "sparse_moe", False),
        (EXPERT, "mlp", True),
        (EXPERT, "gate", False),
        (EXPERT, "model.layers.10.mlp.experts.0.gate_proj", True),
        (EXPERT, "model.layers.10.mlp.experts.0.up_proj", False),
        (EXPERT, "layers.10.block_sparse_moe.experts.1", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
    ],
)
def test_a_module_lies_in_a_name(module: str, name: str, within: bool) -> None:
    assert is_within(module, ["vision_tower", name]) is within


@pytest.mark.parametrize(
    ("module", "pattern", "matched"),
    [
        (GATE, "re:.*gate$", True),
        (GATE, r"re:.*mlp\.gate$", True),
        (GATE, r"re:model\.layers\.\d+\.mlp\..*", True),
        (GATE, r"re:language_model\.model\.layers\.10\..*gate", True),
        (GATE, r"re:model\.layers\.1\.", False),
        (GATE, GATE, True),
        (GATE, "language_model.model.layers.10.mlp.gate", True),
        (GATE, "model.layers.10", False),
        (EXPERT, "re:.*gate$", False),
    ],
)
def test_a_pattern_matches_a_module(module: str, pattern: str, matched: bool) -> None:
    assert matches(module, ["Linear", pattern]) is matched


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\*gate"):
        matches(GATE, ["re:*gate"])
