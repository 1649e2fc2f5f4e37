import re

import pytest

from negamax.base.errors import ConfigError
from negamax.quantization.scheme import is_within, make_lookup, matches
from tests.tables import read_table

EXPERT = "model.layers.10.block_sparse_moe.experts.0.w1"
SHARED = "model.layers.10.block_sparse_moe.shared_experts.gate_proj"
QUERY, INDEX = (f"model.layers.10.self_attn.{name}_proj" for name in ("q", "index_q"))
GATE = "model.layers.10.block_sparse_moe.gate"


@pytest.mark.parametrize(
    ("module", "name", "within"), read_table("module_names.module_lies_in_name")
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
        (EXPERT, r"re:.*mlp.*\.(gate_up|gate|up|down)_proj$", True),
        (EXPERT, r"re:.*(down|up)_proj$", False),
        (EXPERT, "re:.*(q|k|v|o)_proj$", False),
        (EXPERT, "re:.*_proj$", False),  # Beside experts with w1, this name means attention.
        (SHARED, r"re:.*mlp\.shared_experts\.gate_up_proj$", True),
        (QUERY, "model.layers.10.self_attn.qkv_proj", True),
    ],
)
def test_a_pattern_matches_a_module(module: str, pattern: str, matched: bool) -> None:
    assert matches(module, ["Linear", pattern]) is matched


def test_patterns_and_tables_find_modules_under_all_names() -> None:
    down = EXPERT.replace("w1", "w2")
    for patterns in (["re:.*down_proj$"], ["re:.*mlp[.]gate$", "*.down_proj", "re:.*experts[.]9"]):
        assert not is_within(down, patterns) and not matches(down, patterns)
        assert is_within(SHARED.replace("gate_", "down_"), patterns)
    assert is_within(down, ["re:.*experts.*down_proj$"])
    find = make_lookup({"language_model.model.layers.10.self_attn.qkv_proj": 8, "layers.10": 4})
    assert [find(name) for name in (QUERY, INDEX, "model.layers.9.mlp.up_proj")] == [8, 4, None]


@pytest.mark.parametrize("pattern", ["*gate", r"([\w.]+)+x", "([a-z]|[.a-z])*x", "((?:a+)?b)*x"])
def test_expressions_that_are_none_or_take_too_long_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(pattern)):
        matches(GATE, [f"re:{pattern}"])
