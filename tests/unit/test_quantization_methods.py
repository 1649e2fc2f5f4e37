import copy
import re
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    E4M3_BLOCKS,
    PER_MATRIX,
    PER_ROW,
    PLAIN,
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    with_input_scale,
    with_rounded_activations,
)
from negamax.formats.tensor_format import ROWS, Axis, Dim, TensorFormat
from negamax.quantization import online
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.detect import detect

EXPERT = "model.layers.3.block_sparse_moe.experts.7.w1"
INT_EXPERT = "model.layers.3.block_sparse_moe.experts.200.w2"
ATTENTION, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.block_sparse_moe.gate"
KV = {"dynamic": False, "num_bits": 8, "type": "float"}
W4A4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = nvfp4(input_scale="input_scale")
TENSOR = with_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX))
STATIC = with_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale"))
CHANNEL = with_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,)))
PRODUCER = {"name": "modelopt", "version": "0.43.0rc2"}
# Fields of nvidia/MiniMax-M2.7-NVFP4 (both files), nvidia/MiniMax-M3-NVFP4 and
# MiniMaxAI/MiniMax-M3-MXFP8.
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


_E4M3_ROWS = {
    "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
    "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
COMPRESSED_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "global_compression_ratio": None, "ignore": ["lm_head", "re:.*gate$", "re:.*o_proj"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _E4M3_ROWS, "input_activations": _TOKENS},
        "group_1": {
            "targets": [r"re:.*experts\.\d+\.w1"], "input_activations": _TOKENS,
            "weights": {**_E4M3_ROWS, "strategy": "tensor"},
        },
    },
}  # fmt: skip


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
        (COMPRESSED_FP8, TENSOR, with_rounded_activations(fp8("fp8_e4m3_channel", PER_ROW))),
        (BLOCK, E4M3_BLOCKS, E4M3_BLOCKS),
        (FP8, TENSOR, TENSOR),
        ({**FP8, "activation_scheme": "static"}, STATIC, STATIC),
        ({**FP8, "weight_block_size": [64, 32]}, *[blocks(64, 32)] * 2),
        ({**BLOCK, "fmt": "float8_e4m3fnuz"}, *[blocks(128, 128, fnuz=True)] * 2),
    ],
)
def test_modules_have_the_described_float_formats(
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


# As the exporters of AutoAWQ, GPTQModel and AutoRound write them, with fields that have no effect.
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
    "backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
    "modules_to_fuse": None, "modules_to_not_convert": ["self_attn", "gate", "lm_head"],
}  # fmt: skip
AWQ_OF_GPTQMODEL: dict[str, Any] = {
    "quant_method": "awq", "method": "awq", "format": "gemm", "checkpoint_format": "gemm",
    "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "sym": True,
    "zero_point": False, "version": "gemm", "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:5.7.0"]},
}  # fmt: skip
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32", "static_groups": False,
    "true_sequential": True, "damp_percent": 0.05, "model_name_or_path": "", "dataset": None,
    "model_file_base_name": "model", "meta": {"quantizer": ["gptqmodel:5.6.0"], "mse": 0.0},
    "dynamic": {
        r"-:.*\.layers\.0\..*": {}, r"+:.*self_attn\..*": {"bits": 8, "group_size": 64},
        r".*experts\.200\.w2": {"desc_act": True},
    },
}  # fmt: skip
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
    "group_size": 128, "sym": True, "data_type": "int", "autoround_version": "0.9.3",
    "batch_size": 8, "iters": 200, "nsamples": 512, "seqlen": 2048, "low_gpu_mem_usage": True,
    "block_name_to_quantize": "model.layers",
    "extra_config": {
        "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "fp"},
        r".*self_attn.*": {"bits": 8}, "model.layers.3.mlp.experts.200.w2": {"group_size": 64},
    },
}  # fmt: skip


def compressed(**weights: Any) -> dict[str, Any]:
    usual = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax",
        "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["re:.*block_sparse_moe.experts.*"], "weights": {**usual, **weights},
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": None, "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.12.3",
    }  # fmt: skip


def modelslim(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelslim", "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0",
        "group_size": 0, "metadata": {},
        "optional": {"quarot": {"rotation_map": {"global_rotation": "optional/q.safetensors"}}},
        "kv_cache_type": "C8", "kv_quant_type": "C8", "model.norm.weight": "FLOAT",
        f"{INT_EXPERT}.weight": "W8A8_DYNAMIC", f"{INT_EXPERT}.weight_scale": "W8A8_DYNAMIC",
        f"{INT_EXPERT}.weight_offset": "W8A8_DYNAMIC", f"{ATTENTION}.weight": "W8A8",
        f"{ATTENTION}.deq_scale": "W8A8", "lm_head.weight": "FLOAT", **fields,
    }  # fmt: skip


def found(fields: dict[str, Any]) -> dict[str, str]:
    scheme = detect(QuantizationSpec(fields["quant_method"], fields))
    assert scheme is not None
    modules = (ATTENTION, INT_EXPERT, "model.layers.0.self_attn.q_proj", "lm_head")
    names = [scheme.format_of(module).name for module in modules]
    assert {*names} <= {"plain", *(stored.name for stored in scheme.formats)}
    return dict(zip(("attention", "expert", "first", "head"), names, strict=True))


def test_modules_have_the_described_integer_formats() -> None:
    plain = {"attention": "plain", "first": "plain", "head": "plain"}
    assert found(AWQ) == {**plain, "expert": "awq_uint4_group_128"}
    awq = dict.fromkeys(("attention", "expert", "first"), "awq_uint4_group_128")
    assert found(AWQ_OF_GPTQMODEL) == {**awq, "head": "plain"}
    assert found(GPTQ) == {
        **plain, "attention": "gptq_v1_uint8_group_64",
        "expert": "gptq_v1_uint4_group_128_act_order",
    }  # fmt: skip
    assert found({**GPTQ, "checkpoint_format": "gptq_v2", "dynamic": None, "lm_head": True}) == (
        dict.fromkeys(("attention", "expert", "first", "head"), "gptq_v2_uint4_group_128")
    )
    listed = {**GPTQ, "dynamic": None, "modules_in_block_to_quantize": [["mlp.experts"], ["w9"]]}
    assert found(listed) == {**plain, "expert": "gptq_v1_uint4_group_128"}
    assert found(AUTO_ROUND) == {
        **plain, "attention": "gptq_v1_uint8_group_128", "expert": "gptq_v1_uint4_group_64",
    }  # fmt: skip
    one_layer = {**AUTO_ROUND, "extra_config": None, "block_name_to_quantize": ["model.layers.3"]}
    assert found({**one_layer, "packing_format": "auto_round:auto_awq"}) == {
        **plain, "attention": "awq_uint4_group_128", "expert": "awq_uint4_group_128",
    }  # fmt: skip
    assert found(compressed()) == {**plain, "expert": "packed_int4_group_32"}
    assert found(compressed(symmetric=False, group_size=128, zp_dtype="torch.int8")) == {
        **plain, "expert": "packed_uint4_group_128",
    }  # fmt: skip
    assert found(compressed(num_bits=8, strategy="channel", group_size=None)) == {
        **plain, "expert": "packed_int8_channel",
    }  # fmt: skip
    assert found(modelslim()) == {
        **plain, "attention": "modelslim_int8_deq_scale", "expert": "modelslim_int8_channel",
    }  # fmt: skip
    scales = {f"{ATTENTION}.weight_scale": "W8A8"}
    assert found(modelslim(**scales)) == {
        **plain, "attention": "modelslim_int8_channel_static", "expert": "modelslim_int8_channel",
    }  # fmt: skip


def test_nearest_target_of_overlapping_groups_counts() -> None:
    targets = {
        "packed_int4_channel": ["Linear"],
        "packed_int4_group_32": [r"re:.*mlp\..*(gate|up|down)_proj$"],
        "packed_int4_group_64": [r"re:.*layers\.(2|3)\.mlp\..*(gate|up|down)_proj$"],
        "packed_int4_group_128": ["model.layers.3.mlp.experts.7.down_proj"],
    }
    groups = {}
    for number, (name, modules) in enumerate(targets.items()):
        size = name.rpartition("_")[2]
        weights: dict[str, Any] = (
            {"strategy": "channel", "group_size": None}
            if size == "channel"
            else {"group_size": int(size)}
        )
        (group,) = compressed(**weights)["config_groups"].values()
        groups[f"group_{number}"] = {**group, "targets": modules}
    scheme = detect(
        QuantizationSpec("compressed-tensors", {**compressed(), "config_groups": groups})
    )
    assert scheme is not None
    layers = "model.layers.{}.block_sparse_moe.experts.{}.w2"
    for module, wanted in {
        layers.format(3, 7): "packed_int4_group_128",
        layers.format(3, 6): "packed_int4_group_64",
        layers.format(4, 7): "packed_int4_group_32",
        ATTENTION: "packed_int4_channel",
    }.items():
        assert scheme.format_of(module).name == wanted, module


def test_activations_may_be_rounded_if_the_method_does() -> None:
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

    def element(spec: QuantizationSpec) -> str | None:
        scheme = detect(spec)
        assert scheme is not None
        rounded = scheme.format_of(INT_EXPERT).activation
        assert rounded is None or rounded.group == 0
        return rounded and rounded.element

    int8, int4 = {"num_bits": 8, "strategy": "channel", "group_size": None}, {"num_bits": 4}
    for weights, inputs, expected in (
        (int8, tokens, "int8"), (int8, None, None), (int4, tokens, None),
        ({**int8, "strategy": "group", "group_size": 128}, tokens, None),
    ):  # fmt: skip
        fields = compressed(**weights)
        fields["config_groups"]["group_0"]["input_activations"] = inputs
        assert element(QuantizationSpec("compressed-tensors", fields)) == expected
    for said, expected in (("W8A8_DYNAMIC", "int8"), ("W8A8_MIX", "int8"), ("W8A16", None)):
        fields = modelslim(**{f"{INT_EXPERT}.weight": said})
        assert element(QuantizationSpec("modelslim", fields)) == expected
    for name, expected in (
        ("int8", "int8"), ("int8_per_channel_weight_only", None), ("int4", None),
        ("fp8_per_channel", "float8_e4m3fn"), ("fp8", None),
    ):  # fmt: skip
        assert element(online.spec(name)) == expected


def test_equal_formats_are_one() -> None:
    other = {**AUTO_ROUND, "extra_config": None}
    same = {**GPTQ, "dynamic": None}
    formats = [detect(QuantizationSpec(each["quant_method"], each)) for each in (same, other)]
    assert formats[0] and formats[1] and formats[0].formats == formats[1].formats
    assert packed(4, 32) is packed(4, 32, symmetric=True, is_stored_order=False)


WEIGHTS = "config_groups/group_0/weights/"
REFUSED: list[tuple[dict[str, Any], str, object]] = [
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
    *((COMPRESSED_FP8, *case) for case in (
        ("format", "marlin-24"), ("kv_cache_scheme", {"num_bits": 4, "type": "int"}),
        ("config_groups", {}), ("config_groups/group_0", {"targets": ["Linear"]}),
        (WEIGHTS + "zero_points", "int8"), ("config_groups/group_0/inverse", True),
        ("rotation", "hadamard"), (WEIGHTS + "num_bits", 4), (WEIGHTS + "type", "int"),
        (WEIGHTS + "strategy", "group"), (WEIGHTS + "symmetric", False),
        (WEIGHTS + "group_size", 128), ("config_groups/group_1/input_activations", "static"),
        ("config_groups/group_0/output_activations", {"num_bits": 8}),
        ("config_groups/group_0/targets", "Linear"), ("ignore", "lm_head"),
    )),
    *((AWQ, *case) for case in (
        ("bits", 3), ("version", "gemv"), ("version", "marlin"), ("group_size", 0),
        ("group_size", None), ("zeros", 1), ("modules_to_not_convert", "gate"),
        ("dynamic", {"-:x": {}}), ("rotation", "hadamard"), ("lm_head", True),
    )),
    *((GPTQ, *case) for case in (
        ("bits", 3), ("checkpoint_format", "marlin"), ("checkpoint_format", "gptq_p"),
        ("group_size", 12), ("desc_act", "yes"), ("pack_dtype", "int64"),
        ("rotation", "random"), ("adapter", {"lora": 1}), ("dynamic", ["-:x"]),
        ("dynamic", {"+:x": {"bits": 5}}), ("dynamic", {"+:x": {"shift": 5}}),
        ("dynamic", {"-:*x": {}}), ("dynamic", {"x": 8}),
        ("modules_in_block_to_quantize", "q_proj"), ("hessian", 1),
    )),
    *((AUTO_ROUND, *case) for case in (
        ("bits", 3), ("data_type", "mx_int"), ("packing_format", "auto_round:llm_compressor"),
        ("act_bits", 8), ("extra_config", ["x"]), ("extra_config", {"x": {"bits": 5}}),
        ("extra_config", {"*x": {"bits": 8}}), ("super_bits", 6),
        ("block_name_to_quantize", [1]),
    )),
    *((compressed(), WEIGHTS + name, value) for name, value in (
        ("num_bits", 3), ("type", "float"), ("strategy", "tensor"), ("strategy", "block"),
        ("group_size", None), ("dynamic", True), ("actorder", "random"), ("symmetric", None),
    )),
    *((modelslim(version="0.9"), *case) for case in (
        (f"{INT_EXPERT}.weight", "W4A4_MXFP4"), (f"{INT_EXPERT}.weight", "W4A8_DYNAMIC"),
        ("metadata", {"quarot": {"max_tp_size": 4}}), ("fa_quant_type", "FAKQuant"),
        ("zebra", 1), ("group_size", "128"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("config", "path", "value"), REFUSED)
def test_unsupported_descriptions_are_refused_by_name(
    config: dict[str, Any], path: str, value: object
) -> None:
    changed = copy.deepcopy(config)
    *parents, last = path.split("/")
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[last] = value
    spec = QuantizationSpec(changed.get("quant_method", "modelopt"), changed)
    with pytest.raises(ConfigError, match=rf"{re.escape(last)}\S* is .*; supported: "):
        detect(spec)


def test_the_outputs_that_quark_puts_into_the_cache_may_be_fp8() -> None:
    config = quark(_MX, None, layer_quant_config={"*k_proj": _KEYS, "*v_proj": _KEYS})
    config["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    scheme = detect(QuantizationSpec("quark", config))
    assert scheme is not None
    assert scheme.format_of("model.layers.0.self_attn.k_proj") == mxfp4()
