"""Descriptions of FP8 and FP4 checkpoints as they are published: which module has which format, and
what is refused by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    E4M3_BLOCKS,
    PER_MATRIX,
    PLAIN,
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    with_input_scale,
    with_rounded_activations,
)
from negamax.formats.tensor_format import ROWS, Axis, Dim, TensorFormat
from negamax.quantization.detect import detect

EXPERT = "model.layers.3.block_sparse_moe.experts.7.w1"
ATTENTION, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.block_sparse_moe.gate"
KV = {"dynamic": False, "num_bits": 8, "type": "float"}
W4A4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = nvfp4(input_scale="input_scale")
TENSOR = with_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX))
STATIC = with_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale"))
CHANNEL = with_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,)))
PRODUCER = {"name": "modelopt", "version": "0.43.0rc2"}
# Their fields are those of nvidia/MiniMax-M2.7-NVFP4, its two files, and of nvidia/MiniMax-M3-NVFP4
# and MiniMaxAI/MiniMax-M3-MXFP8.
EXCLUDED = ["lm_head", GATE, "model.layers.3.self_attn*"]
M2_CONFIG = {
    "config_groups": {
        "group_0": {"input_activations": W4A4, "weights": W4A4, "targets": ["Linear"]}
    },
    "ignore": EXCLUDED, "quant_algo": "NVFP4", "kv_cache_scheme": KV, "producer": PRODUCER,
    "quant_method": "modelopt",
}  # fmt: skip
M2_FILE = {
    "producer": PRODUCER,
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": EXCLUDED,
    },
}  # fmt: skip
M3_CONFIG = {
    "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
    "exclude_modules": ["lm_head", "vision_tower", f"language_model.{GATE}"],
    "quantized_layers": {
        f"language_model.{EXPERT}": {"quant_algo": "NVFP4", "group_size": 16},
        f"language_model.{ATTENTION}": {"quant_algo": "MXFP8"},
    },
    "quant_method": "modelopt",
}  # fmt: skip
MXFP8 = {
    "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
    "ignored_layers": ["lm_head", "model.embed_tokens", f"language_model.{GATE}"],
}  # fmt: skip
_MX = {
    "dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "ch_axis": -1, "group_size": 32,
    "block_size": None, "symmetric": None, "round_method": "half_even", "scale_type": "float",
    "scale_format": "e8m0", "scale_calculation_mode": "even", "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver", "is_scale_quant": False,
}  # fmt: skip
_E4M3 = {
    "dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None,
    "group_size": None, "symmetric": None, "observer_cls": "PerTensorMinMaxObserver",
}  # fmt: skip


def quark(weight: object, inputs: object, **changes: Any) -> dict[str, Any]:
    layer = {
        "weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None,
        "target_device": None,
    }  # fmt: skip
    return {
        "quant_method": "quark", "global_quant_config": layer, "algo_config": None,
        "softmax_quant_spec": None, "layer_type_quant_config": {}, "layer_quant_config": {},
        "exclude": ["*lm_head", "re:.*gate$", f"language_model.{ATTENTION}"],
        "kv_cache_quant_config": {}, "kv_cache_post_rope": False, "quant_mode": "eager_mode",
        "version": "0.12", "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
            "weight_format": "real_quantized", "weight_merge_groups": None,
        },
        **changes,
    }  # fmt: skip


QUARK = quark(_MX, {**_MX, "is_dynamic": True})
_ATTENTION_LAYER = {
    "weight": {**_E4M3, "qscheme": "per_channel", "ch_axis": 0},
    "input_tensors": {**_E4M3, "is_dynamic": True}, "output_tensors": None, "bias": None,
}  # fmt: skip
_KEYS = {"weight": _MX, "input_tensors": None, "output_tensors": _E4M3, "bias": None}
FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["gate"], "ignored_layers": ["lm_head"]}
BLOCK = {**FP8, "weight_block_size": [128, 128]}


def blocks(rows: int, columns: int, *, fnuz: bool = False) -> TensorFormat:
    dims = Dim(Axis.ROWS, rows), Dim(Axis.COLUMNS, columns)
    name = f"fp8_e4m3_block_{rows}x{columns}"
    return fp8(name, dims, scale_name="weight_scale_inv", fnuz=fnuz)


@pytest.mark.parametrize(
    ("config", "expert", "attention"),
    [
        (M2_CONFIG, NVFP4, PLAIN),
        (M2_FILE, NVFP4, PLAIN),
        ({**M2_FILE, "quant_method": "modelopt"}, NVFP4, PLAIN),
        (M3_CONFIG, NVFP4, mxfp8()),
        ({**M2_CONFIG, "quant_algo": "W4A16_NVFP4"}, nvfp4(), PLAIN),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [GATE]}, STATIC, STATIC),
        (
            {"quant_algo": "fp8_per_channel_per_token", "exclude_modules": ["*gate"]},
            CHANNEL,
            CHANNEL,
        ),
        (MXFP8, *[mxfp8(scale_name="weight_scale_inv")] * 2),
        (QUARK, mxfp4(), PLAIN),
        (
            quark(_MX, _E4M3, exclude=[GATE], layer_quant_config={"*self_attn*": _ATTENTION_LAYER}),
            with_input_scale(mxfp4(), "input_scale"),
            CHANNEL,
        ),
        (quark(_E4M3, {**_E4M3, "is_dynamic": True}), TENSOR, PLAIN),
        (quark(_E4M3, _E4M3), STATIC, PLAIN),
        (quark(_E4M3, None), fp8("fp8_e4m3_tensor", PER_MATRIX), PLAIN),
        (
            quark([{**_MX, "group_size": 16, "scale_format": None}, _E4M3], [_MX, _E4M3]),
            nvfp4(input_scale="input_scale_2"),
            PLAIN,
        ),
        (BLOCK, E4M3_BLOCKS, E4M3_BLOCKS),
        (FP8, TENSOR, TENSOR),
        ({**FP8, "activation_scheme": "static"}, STATIC, STATIC),
        ({**FP8, "weight_block_size": [64, 32]}, *[blocks(64, 32)] * 2),
        ({**BLOCK, "fmt": "float8_e4m3fnuz"}, *[blocks(128, 128, fnuz=True)] * 2),
    ],
)
def test_each_module_has_the_format_that_its_checkpoint_says(
    config: dict[str, Any], expert: TensorFormat, attention: TensorFormat
) -> None:
    source = "config.json" if "quant_method" in config else "hf_quant_config.json"
    before = copy.deepcopy(config)
    spec = QuantizationSpec(config.get("quant_method", "modelopt"), config, source)
    scheme = detect(spec)
    assert scheme is not None and config == before
    assert (scheme.format_of(EXPERT), scheme.format_of(ATTENTION)) == (expert, attention)
    assert scheme.format_of(GATE) is PLAIN and set(scheme.formats) >= {expert}
    mine = EXPERT.replace("block_sparse_moe", "mlp")
    assert scheme.format_of(mine) == expert or config is M3_CONFIG


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        (M2_CONFIG, "quant_algo", "NVFP4_AWQ"),
        (M2_CONFIG, "group_size", 32),
        (M2_CONFIG, "awq_block_size", 128),
        (M2_CONFIG, "kv_cache_scheme", {**KV, "num_bits": 4}),
        (M2_CONFIG, "kv_cache_scheme", "FP8"),
        (M2_CONFIG, "ignore", "lm_head"),
        (M2_FILE, "quantization/kv_cache_quant_algo", "NVFP4"),
        (M2_FILE, "quantization/pre_quant_scale", True),
        (M2_FILE, "weights", {}),
        (M3_CONFIG, "quantized_layers", {}),
        (M3_CONFIG, f"quantized_layers/{ATTENTION}", {"quant_algo": "W4A8_AWQ"}),
        (M3_CONFIG, f"quantized_layers/{ATTENTION}", {"quant_algo": "NVFP4", "rotate": True}),
        (MXFP8, "moe_quant_algo", "NVFP4"),
        (MXFP8, "weight_block_size", [32, 32]),
        (MXFP8, "ignored_layers", "lm_head"),
        (QUARK, "algo_config", [{"name": "rotation"}]),
        (QUARK, "layer_type_quant_config", {"Linear": {}}),
        (QUARK, "export/weight_format", "fake_quantized"),
        (QUARK, "global_quant_config/weight/group_size", 64),
        (QUARK, "global_quant_config/weight/dtype", "fp6_e2m3"),
        (QUARK, "global_quant_config/weight/is_dynamic", True),
        (QUARK, "global_quant_config/output_tensors", _E4M3),
        (QUARK, "layer_quant_config", {"*k_proj": _KEYS}),
        (BLOCK, "activation_scheme", "static"),
        (BLOCK, "fmt", "e5m2"),
        (BLOCK, "ignored_layers", 3),
    ],
)
def test_what_is_stored_in_another_way_is_refused_by_name(
    config: dict[str, Any], path: str, value: object
) -> None:
    changed = copy.deepcopy(config)
    *parents, last = path.split("/")
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[last] = value
    spec = QuantizationSpec(changed.get("quant_method", "modelopt"), changed)
    name = "layer_quant_config" if last == "layer_quant_config" else last.split(".")[0]
    with pytest.raises(ConfigError, match=rf"config: \S*{name}\S* is .*; supported: "):
        detect(spec)


def test_the_outputs_that_quark_puts_into_the_cache_may_be_fp8() -> None:
    config = quark(_MX, None, layer_quant_config={"*k_proj": _KEYS, "*v_proj": _KEYS})
    config["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    scheme = detect(QuantizationSpec("quark", config))
    assert scheme is not None
    assert scheme.format_of("model.layers.0.self_attn.k_proj") == mxfp4()
