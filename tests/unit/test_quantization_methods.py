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
    add_input_scale,
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    use_rounded_activations,
)
from negamax.formats.tensor_format import ROWS, Axis, Dim, TensorFormat
from negamax.quantization import online
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.detect import detect
from tests import quantization_descriptions as described

EXPERT = "model.layers.3.block_sparse_moe.experts.7.w1"
INT_EXPERT = "model.layers.3.block_sparse_moe.experts.200.w2"
ATTENTION, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.block_sparse_moe.gate"
KV = {"dynamic": False, "num_bits": 8, "type": "float"}
W4A4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = nvfp4(input_scale="input_scale")
TENSOR = use_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX))
STATIC = use_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale"))
CHANNEL = use_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,)))
# As nvidia/MiniMax-M2.7-NVFP4 (both files), nvidia/MiniMax-M3-NVFP4, MiniMaxAI/MiniMax-M3-MXFP8.
EXCLUDED = ["lm_head", GATE, "model.layers.3.self_attn*"]
M2_CONFIG = described.modelopt(
    "NVFP4", EXCLUDED, kv_cache_scheme=KV,
    config_groups={
        "group_0": {"input_activations": W4A4, "weights": W4A4, "targets": ["Linear"]}
    },
)  # fmt: skip
M2_FILE = described.modelopt_file(EXCLUDED, "FP8")
M3_CONFIG = described.modelopt_mixed(
    {f"language_model.{EXPERT}": "NVFP4", f"language_model.{ATTENTION}": "MXFP8"},
    ["lm_head", "vision_tower", f"language_model.{GATE}"],
)
MXFP8 = {
    "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
    "ignored_layers": ["lm_head", "model.embed_tokens", f"language_model.{GATE}"],
}  # fmt: skip


def quark(weight: object, inputs: object, **changes: Any) -> dict[str, Any]:
    exclude = ["*lm_head", "re:.*gate$", f"language_model.{ATTENTION}"]
    return described.quark(weight, inputs, **{"exclude": exclude, **changes})


_MX, _E4M3 = described.QUARK_MXFP4, described.QUARK_E4M3
QUARK = quark(_MX, described.dynamic(_MX))
_ATTENTION_LAYER = described.quark_layer(described.QUARK_E4M3_ROWS, described.dynamic(_E4M3))
_KEYS = described.quark_layer(_MX, None, _E4M3)
FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["gate"], "ignored_layers": ["lm_head"]}
BLOCK = {**FP8, "weight_block_size": [128, 128]}
COMPRESSED_FP8 = described.compressed(
    "float-quantized",
    described.group(described.E4M3_ROWS, inputs=described.FP8_TOKENS),
    described.group(
        {**described.E4M3_ROWS, "strategy": "tensor"}, targets=[r"re:.*experts\.\d+\.w1"],
        inputs=described.FP8_TOKENS,
    ),
    ignore=["lm_head", "re:.*gate$", "re:.*o_proj"],
)  # fmt: skip


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
        ({"quant_algo": "fp8_per_channel_per_token", "exclude_modules": ["*gate"]}, *[CHANNEL] * 2),
        (MXFP8, *[mxfp8(scale_name="weight_scale_inv")] * 2),
        (QUARK, mxfp4(), PLAIN),
        (
            quark(_MX, _E4M3, exclude=[GATE], layer_quant_config={"*self_attn*": _ATTENTION_LAYER}),
            add_input_scale(mxfp4(), "input_scale"),
            CHANNEL,
        ),
        (quark(_E4M3, {**_E4M3, "is_dynamic": True}), TENSOR, PLAIN),
        (quark(_E4M3, _E4M3), STATIC, PLAIN),
        (quark(_E4M3, None), fp8("fp8_e4m3_tensor", PER_MATRIX), PLAIN),
        (quark(described.QUARK_NVFP4, [_MX, _E4M3]), nvfp4(input_scale="input_scale_2"), PLAIN),
        (COMPRESSED_FP8, TENSOR, use_rounded_activations(fp8("fp8_e4m3_channel", PER_ROW))),
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


AWQ = described.awq(["self_attn", "gate", "lm_head"])
AWQ_OF_GPTQMODEL: dict[str, Any] = {
    "quant_method": "awq", "method": "awq", "format": "gemm", "checkpoint_format": "gemm",
    "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "sym": True,
    "zero_point": False, "version": "gemm", "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:5.7.0"]},
}  # fmt: skip
GPTQ = described.gptq(dynamic={
    r"-:.*\.layers\.0\..*": {}, r"+:.*self_attn\..*": {"bits": 8, "group_size": 64},
    r".*experts\.200\.w2": {"desc_act": True},
})  # fmt: skip
AUTO_ROUND = described.auto_round(extra_config={
    "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "fp"},
    r".*self_attn.*": {"bits": 8}, "model.layers.3.mlp.experts.200.w2": {"group_size": 64},
})  # fmt: skip


def compressed(*, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = described.group(
        {"group_size": 32, **weights}, targets=["re:.*block_sparse_moe.experts.*"],
        inputs=inputs, stored="pack-quantized",
    )  # fmt: skip
    return described.compressed("pack-quantized", group, ignore=["lm_head"])


def modelslim(**fields: Any) -> dict[str, Any]:
    types = {
        "model.norm.weight": "FLOAT", f"{INT_EXPERT}.weight": "W8A8_DYNAMIC",
        f"{INT_EXPERT}.weight_scale": "W8A8_DYNAMIC",
        f"{INT_EXPERT}.weight_offset": "W8A8_DYNAMIC", f"{ATTENTION}.weight": "W8A8",
        f"{ATTENTION}.deq_scale": "W8A8", "lm_head.weight": "FLOAT",
    }  # fmt: skip
    cache = {"kv_cache_type": "C8", "kv_quant_type": "C8", "quant_method": "modelslim"}
    return described.modelslim(types, **{**cache, **fields})


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
    groups = []
    for name, modules in targets.items():
        size = name.rpartition("_")[2]
        is_channel = size == "channel"
        weights = {
            "strategy": "channel" if is_channel else "group",
            "group_size": None if is_channel else int(size),
        }
        groups.append(described.group(weights, targets=modules))
    fields = described.compressed("pack-quantized", *groups, ignore=["lm_head"])
    scheme = detect(QuantizationSpec("compressed-tensors", fields))
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
    tokens = described.TOKENS

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
        fields = compressed(inputs=inputs, **weights)
        assert element(QuantizationSpec("compressed-tensors", fields)) == expected
    for kind, expected in (("W8A8_DYNAMIC", "int8"), ("W8A8_MIX", "int8"), ("W8A16", None)):
        fields = modelslim(**{f"{INT_EXPERT}.weight": kind})
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


def test_quark_outputs_for_the_cache_may_be_fp8() -> None:
    config = quark(_MX, None, layer_quant_config={"*k_proj": _KEYS, "*v_proj": _KEYS})
    config["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    scheme = detect(QuantizationSpec("quark", config))
    assert scheme is not None
    assert scheme.format_of("model.layers.0.self_attn.k_proj") == mxfp4()
