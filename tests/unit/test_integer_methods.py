"""AWQ, GPTQ, AutoRound, compressed-tensors and ModelSlim: descriptions as their tools write them,
the format of each module, and what is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.quantization import online
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.detect import detect

ATTENTION = "model.layers.3.self_attn.q_proj"
EXPERT = "model.layers.3.block_sparse_moe.experts.200.w2"
# As AutoAWQ's, GPTQModel's and AutoRound's exporters write them, fields that change nothing
# included.
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
        "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0, "metadata": {},
        "optional": {"quarot": {"rotation_map": {"global_rotation": "optional/q.safetensors"}}},
        "kv_cache_type": "C8", "kv_quant_type": "C8", "model.norm.weight": "FLOAT",
        f"{EXPERT}.weight": "W8A8_DYNAMIC", f"{EXPERT}.weight_scale": "W8A8_DYNAMIC",
        f"{EXPERT}.weight_offset": "W8A8_DYNAMIC", f"{ATTENTION}.weight": "W8A8",
        f"{ATTENTION}.deq_scale": "W8A8", "lm_head.weight": "FLOAT", **fields,
    }  # fmt: skip


def found(fields: dict[str, Any], method: str | None = None) -> dict[str, str]:
    scheme = detect(QuantizationSpec(method or fields["quant_method"], fields))
    assert scheme is not None
    modules = (ATTENTION, EXPERT, "model.layers.0.self_attn.q_proj", "lm_head")
    names = [scheme.format_of(module).name for module in modules]
    assert {*names} <= {"plain", *(stored.name for stored in scheme.formats)}
    return dict(zip(("attention", "expert", "first", "head"), names, strict=True))


def test_each_module_has_the_format_that_its_tool_says() -> None:
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
    assert found(modelslim(), "modelslim") == {
        **plain, "attention": "modelslim_int8_deq_scale", "expert": "modelslim_int8_channel",
    }  # fmt: skip
    scales = {f"{ATTENTION}.weight_scale": "W8A8"}
    assert found(modelslim(**scales), "modelslim") == {
        **plain, "attention": "modelslim_int8_channel_static", "expert": "modelslim_int8_channel",
    }  # fmt: skip


def test_of_overlapping_groups_of_compressed_tensors_the_nearest_target_counts() -> None:
    """A name before a pattern, patterns by the alphabet, the class last, in whichever order groups
    are written.
    """
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


def test_activations_may_be_rounded_where_the_method_rounds_them() -> None:
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

    def element(fields: dict[str, Any], method: str = "compressed-tensors") -> str | None:
        is_online = method == online.SOURCE
        scheme = detect(
            online.spec(fields["name"]) if is_online else QuantizationSpec(method, fields)
        )
        assert scheme is not None
        rounded = scheme.format_of(EXPERT).activation
        assert rounded is None or rounded.group == 0
        return rounded and rounded.element

    int8, int4 = {"num_bits": 8, "strategy": "channel", "group_size": None}, {"num_bits": 4}
    for weights, inputs, expected in (
        (int8, tokens, "int8"), (int8, None, None), (int4, tokens, None),
        ({**int8, "strategy": "group", "group_size": 128}, tokens, None),
    ):  # fmt: skip
        fields = compressed(**weights)
        fields["config_groups"]["group_0"]["input_activations"] = inputs
        assert element(fields) == expected
    for said, expected in (("W8A8_DYNAMIC", "int8"), ("W8A8_MIX", "int8"), ("W8A16", None)):
        assert element(modelslim(**{f"{EXPERT}.weight": said}), "modelslim") == expected
    for name, expected in (
        ("int8", "int8"), ("int8_per_channel_weight_only", None), ("int4", None),
        ("fp8_per_channel", "float8_e4m3fn"), ("fp8", None),
    ):  # fmt: skip
        assert element({"name": name}, online.SOURCE) == expected


def test_equal_formats_are_one() -> None:
    other = {**AUTO_ROUND, "extra_config": None}
    same = {**GPTQ, "dynamic": None}
    formats = [detect(QuantizationSpec(each["quant_method"], each)) for each in (same, other)]
    assert formats[0] and formats[1] and formats[0].formats == formats[1].formats
    assert packed(4, 32) is packed(4, 32, symmetric=True, is_stored_order=False)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
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
    ],
)  # fmt: skip
def test_what_is_stored_in_another_way_is_refused_by_name(
    fields: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{field}\S* is .*; supported: "):
        found({**fields, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 3), ("type", "float"), ("strategy", "tensor"), ("strategy", "block"),
        ("group_size", None), ("dynamic", True), ("actorder", "random"), ("symmetric", None),
    ],
)  # fmt: skip
def test_integers_of_another_kind_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"group_0\.weights\.{field} is .*; supported: "):
        found(compressed(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (f"{EXPERT}.weight", "W4A4_MXFP4"), (f"{EXPERT}.weight", "W4A8_DYNAMIC"),
        ("metadata", {"quarot": {"max_tp_size": 4}}), ("fa_quant_type", "FAKQuant"), ("zebra", 1),
        ("group_size", "128"),
    ],
)  # fmt: skip
def test_modelslim_of_another_kind_is_refused_by_name(field: str, value: object) -> None:
    fields = modelslim(**{field: value, "version": "0.9"})
    with pytest.raises(ConfigError, match=rf"{field} is .*; supported: "):
        found(fields, "modelslim")
