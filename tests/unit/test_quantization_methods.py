import copy
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.config.embedded import EMBEDDED
from negamax.config.quantization import QuantizationSpec, read_quantization
from negamax.engine.core.setup import _choose_weight_format
from negamax.engine.core.source import locate
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
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from negamax.quantization import online
from negamax.quantization.compressed_tensors import packed
from negamax.quantization.detect import METHODS, detect
from negamax.quantization.names import check_name, quantized
from negamax.quantization.scheme import Scheme
from tests import quantization_descriptions as described
from tests.tables import read_table

EXPERT = "model.layers.3.block_sparse_moe.experts.7.w1"
INT_EXPERT = "model.layers.3.block_sparse_moe.experts.200.w2"
ATTENTION, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.block_sparse_moe.gate"
KV = {"dynamic": False, "num_bits": 8, "type": "float"}
W4A4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = nvfp4(input_scale="input_scale")
TENSOR = use_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX))
STATIC = use_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale"))
CHANNEL = use_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,)))
# nvidia/MiniMax-M2.7-NVFP4 (two files), nvidia/MiniMax-M3-NVFP4 and MiniMaxAI/MiniMax-M3-MXFP8
# use these names.
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


M31_EXPERT = nvfp4(
    values="weight_packed", global_scale="weight_global_scale", divides=True,
    input_scale="input_global_scale",
)  # fmt: skip


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
    return fp8(f"fp8_e4m3_block_{rows}x{columns}", dims, scale_name="weight_scale_inv", fnuz=fnuz)


def scheme_of(spec: dict[str, Any] | QuantizationSpec | None) -> Scheme:
    """Detect the scheme. A description without a method has the fields of hf_quant_config.json."""
    if isinstance(spec, dict):
        source = "config.json" if "quant_method" in spec else "hf_quant_config.json"
        spec = QuantizationSpec(spec.get("quant_method", "modelopt"), spec, source)
    scheme = detect(spec)
    assert scheme is not None
    return scheme


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
        (described.M31, M31_EXPERT, mxfp8(scale_name="weight_scale_inv")),
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
        ({**M2_CONFIG, "quant_method": "MODELOPT_FP4"}, NVFP4, PLAIN),
        (
            described.auto_round_floats(
                "fp8_sym", 8, -1, plain=[GATE], static_attention_dtype="fp8"
            ),
            *[use_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,), input_scale="input_scale"))]
            * 2,
        ),
    ],
)
def test_modules_have_the_described_float_formats(
    config: dict[str, Any], expert: TensorFormat, attention: TensorFormat
) -> None:
    before = copy.deepcopy(config)
    scheme = scheme_of(config)
    assert config == before
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


LISTED = {**GPTQ, "dynamic": None, "modules_in_block_to_quantize": [["mlp.experts"], ["w9"]]}
ONE_LAYER = {
    **AUTO_ROUND, "extra_config": None, "block_name_to_quantize": ["model.layers.3"],
    "packing_format": "auto_round:auto_awq",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "attention", "expert", "others"),
    [
        (AWQ, "plain", "awq_uint4_group_128", "plain plain"),
        (AWQ_OF_GPTQMODEL, *["awq_uint4_group_128"] * 2, "awq_uint4_group_128 plain"),
        (GPTQ, "gptq_v1_uint8_group_64", "gptq_v1_uint4_group_128_act_order", "plain plain"),
        (
            {**GPTQ, "checkpoint_format": "gptq_v2", "dynamic": None, "lm_head": True},
            *["gptq_v2_uint4_group_128"] * 2, "gptq_v2_uint4_group_128 gptq_v2_uint4_group_128",
        ),
        (LISTED, "plain", "gptq_v1_uint4_group_128", "plain plain"),
        (AUTO_ROUND, "gptq_v1_uint8_group_128", "gptq_v1_uint4_group_64", "plain plain"),
        (ONE_LAYER, *["awq_uint4_group_128"] * 2, "plain plain"),
        (compressed(), "plain", "packed_int4_group_32", "plain plain"),
        (
            compressed(symmetric=False, group_size=128, zp_dtype="torch.int8"),
            "plain", "packed_uint4_group_128", "plain plain",
        ),
        (
            compressed(num_bits=8, strategy="channel", group_size=None),
            "plain", "packed_int8_channel", "plain plain",
        ),
        (
            {**compressed(strategy=None, group_size=-1), "quant_method": "compressed_tensors"},
            "plain", "packed_int4_channel", "plain plain",
        ),
        (compressed(strategy=None), "plain", "packed_int4_group_32", "plain plain"),
        (modelslim(), "modelslim_int8_deq_scale", "modelslim_int8_channel", "plain plain"),
        (
            modelslim(**{f"{ATTENTION}.weight_scale": "W8A8"}),
            "modelslim_int8_channel_static", "modelslim_int8_channel", "plain plain",
        ),
    ],
)  # fmt: skip
def test_modules_have_the_described_integer_formats(
    fields: dict[str, Any], attention: str, expert: str, others: str
) -> None:
    """Check all modules; `others` is the format of the head and of layer 0's attention."""
    scheme = scheme_of(fields)
    modules = (ATTENTION, INT_EXPERT, "model.layers.0.self_attn.q_proj", "lm_head")
    names = [scheme.format_of(module).name for module in modules]
    assert names == [attention, expert, *others.split()]
    assert {*names} <= {"plain", *(stored.name for stored in scheme.formats)}


def test_nearest_target_of_overlapping_groups_counts() -> None:
    groups = [
        described.group({"strategy": "channel" if size is None else "group", "group_size": size},
                        targets=[target])
        for size, target in (
            (None, "Linear"), (32, r"re:.*mlp\..*(gate|up|down)_proj$"),
            (64, r"re:.*layers\.(2|3)\.mlp\..*(gate|up|down)_proj$"),
            (128, "model.layers.3.mlp.experts.7.down_proj"),
        )
    ]  # fmt: skip
    scheme = scheme_of(described.compressed("pack-quantized", *groups, ignore=["lm_head"]))
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

    def element(fields: Any) -> str | None:
        rounded = scheme_of(fields).format_of(INT_EXPERT).activation
        assert rounded is None or rounded.group == 0
        return rounded and rounded.element

    int8, int4 = {"num_bits": 8, "strategy": "channel", "group_size": None}, {"num_bits": 4}
    for weights, inputs, expected in (
        (int8, tokens, "int8"), (int8, None, None), (int4, tokens, None),
        ({**int8, "strategy": "group", "group_size": 128}, tokens, None),
    ):  # fmt: skip
        assert element(compressed(inputs=inputs, **weights)) == expected
    for kind, expected in (("W8A8_DYNAMIC", "int8"), ("W8A8_MIX", "int8"), ("W8A16", None)):
        assert element(modelslim(**{f"{INT_EXPERT}.weight": kind})) == expected
    for name, expected in (
        ("int8", "int8"), ("int8_per_channel_weight_only", None), ("int4", None),
        ("fp8_per_channel", "float8_e4m3fn"), ("fp8", None),
    ):  # fmt: skip
        assert element(online.spec(name)) == expected


def test_equal_formats_are_one_and_quark_may_store_fp8_caches() -> None:
    one = scheme_of({**GPTQ, "dynamic": None}).formats
    assert one and one == scheme_of({**AUTO_ROUND, "extra_config": None}).formats
    assert packed(4, 32) is packed(4, 32, symmetric=True, is_stored_order=False)
    config = quark(_MX, None, layer_quant_config={"*k_proj": _KEYS, "*v_proj": _KEYS})
    config["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    assert scheme_of(config).format_of("model.layers.0.self_attn.k_proj") == mxfp4()


WEIGHTS = "config_groups/group_0/weights/"
REFUSED: list[tuple[dict[str, Any], str, object]] = [
    ({**described.M31, "moe_quant_algo": "MXFP4"}, "moe_quant_algo", "MXFP4"),
    ({**described.M31, "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo", "INT8"),
    ({**MXFP8, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo", "FP8"),
    ({**described.M31, "index_q_quant_type": "nvfp4"}, "index_q_quant_type", "nvfp4"),
    *((M2_CONFIG, *case) for case in (
        ("quant_algo", "NVFP4_AWQ"), ("group_size", 32), ("awq_block_size", 128),
        ("kv_cache_scheme", {**KV, "num_bits": 4}), ("kv_cache_scheme", "FP8"),
        ("ignore", "lm_head"),
    )),
    (M2_FILE, "quantization/kv_cache_quant_algo", "NVFP4"),
    (M2_FILE, "quantization/pre_quant_scale", True),
    (M2_FILE, "weights", {}),
    (M3_CONFIG, "quantized_layers", {}),
    (M3_CONFIG, f"quantized_layers/{ATTENTION}", {"quant_algo": "W4A8_AWQ"}),
    (M3_CONFIG, f"quantized_layers/{ATTENTION}", {"quant_algo": "NVFP4", "rotate": True}),
    *((MXFP8, *case) for case in (
        ("weight_block_size", [32, 32]), ("ignored_layers", "lm_head"),
    )),
    *((QUARK, *case) for case in (
        ("algo_config", [{"name": "rotation"}]), ("layer_type_quant_config", {"Linear": {}}),
        ("export/weight_format", "fake_quantized"), ("global_quant_config/weight/group_size", 64),
        ("global_quant_config/weight/dtype", "fp6_e2m3"),
        ("global_quant_config/weight/is_dynamic", True),
        ("global_quant_config/output_tensors", _E4M3), ("layer_quant_config", {"*k_proj": _KEYS}),
    )),
    *((BLOCK, *case) for case in (
        ("activation_scheme", "static"), ("fmt", "e5m2"), ("ignored_layers", 3),
    )),
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
def test_descriptions_are_refused_by_name(config: dict[str, Any], path: str, value: object) -> None:
    changed = copy.deepcopy(config)
    *parents, last = path.split("/")
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[last] = value
    spec = QuantizationSpec(changed.get("quant_method", "modelopt"), changed)
    with pytest.raises(ConfigError, match=rf"{re.escape(last)}\S* is .*; supported: "):
        detect(spec)


# --- names ----------------------------------------------------------------------------------------

# pairs of a description and the names that vLLM and SGLang accept for it
ACCEPTED: list[tuple[dict[str, Any], str]] = read_table("quantization_methods.accepted_names")


@pytest.mark.parametrize(("description", "names"), ACCEPTED)
def test_only_names_of_detected_method_are_valid(description: dict[str, Any], names: str) -> None:
    spec = QuantizationSpec(description["quant_method"], description)
    for name in names.split():
        said = f"--quantization {name} is not needed: the format was detected in config.json"
        assert quantized(name, spec) == (spec, said)
    others = {name for _, each in ACCEPTED for name in each.split()} | {"int4"}
    plain = {name.lower().replace("_", "-") for name in (*names.split(), spec.method)}
    plain |= {"fp8"} if "mxfp8" in plain else set()  # `fp8` converts MXFP8 weights to FP8 blocks.
    for name in sorted(others):
        if name.lower().replace("_", "-") not in plain:
            with pytest.raises(ConfigError, match=f"'{name}'; .* by '{spec.method}' \\(con"):
                quantized(name, spec)


@pytest.mark.parametrize("name", [None, "auto", "None", ""])
def test_auto_and_none_are_no_name(name: str | None) -> None:
    assert check_name(name) is None
    spec = QuantizationSpec("awq", {})
    assert quantized(name, spec) == (spec, None) and quantized(name, None) == (None, None)


def test_every_method_that_is_read_is_a_name() -> None:
    for method in METHODS:
        assert quantized(method, QuantizationSpec(method, {}))[1]
    with pytest.raises(ConfigError, match="by 'online' \\(config"):
        detect(QuantizationSpec("online", {"format": "fp8"}))
    assert read_quantization({"quantization_config": {}}) is None
    for fields in ({"bits": 4}, {"quant_method": None}, {"quant_method": ""}):
        with pytest.raises(
            ConfigError, match=r"no quant_method .found: (None|'')\) \(add quant_method, or"
        ):
            read_quantization({"quantization_config": fields})


@pytest.mark.parametrize("name", ["bitsandbytes", "gguf", "torchao", "w4afp8", "fp7"])
def test_unknown_name_is_refused_before_the_model_is_located(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization is '{name}'; allowed: .*awq_marlin, .*"):
        locate(EngineOptions(model="nobody/has-this", quantization=name))


def test_a_checkpoint_is_checked_when_it_is_located(tmp_path: Path) -> None:
    found = locate(EngineOptions(model="minimax-m2", load_format="synthetic", quantization="fp8"))
    assert found.spec.notes[-1].startswith("--quantization fp8 is not needed: the format was")
    assert locate(EngineOptions(model="nano", quantization="fp8")).spec.notes
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is quantized by 'fp8'"):
        locate(EngineOptions(model="nano", quantization="awq"))
    config = json.loads((EMBEDDED["nano"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is not quantized"):
        locate(EngineOptions(model=str(tmp_path), quantization="awq"))
    found = locate(EngineOptions(model=str(tmp_path), quantization="int8-per-channel-weight-only"))
    formats = scheme_of(found.spec.quantization).formats
    assert [stored.name for stored in formats] == ["int8_channel"]


@pytest.mark.parametrize("name", ["minimax-m3-mxfp8", "minimax-m3.1-flash", "minimax-m2"])
@pytest.mark.parametrize("asked", [None, "mxfp8", "fp8"])
def test_hopper_holds_mxfp8_as_blocks_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: str | None
) -> None:
    options = EngineOptions(model=name, load_format="synthetic", quantization=asked)
    spec, stored = locate(options).spec, bundled_spec(name).quantization
    assert stored is not None
    blocks = stored if name == "minimax-m2" else online.make_blocks_spec(stored)
    expected = blocks if asked == "fp8" else stored if name != "minimax-m2" else spec.quantization
    for device, is_hopper in (("cpu", True), ("cuda", False), ("cuda", True)):
        monkeypatch.setattr("negamax.worker.device.multiplies_blocks", lambda _, it=is_hopper: it)
        found = _choose_weight_format(options, spec, device).quantization
        assert found == (blocks if asked is None and device == "cuda" and is_hopper else expected)
    formats = {each.name for each in scheme_of(blocks).formats}
    assert formats == {E4M3_BLOCKS.name} | ({NVFP4.name} if name == "minimax-m3.1-flash" else set())


def test_mxfp8_becomes_blocks_on_request() -> None:
    listed = {"layers.0.mlp.down_proj": {"quant_algo": "MXFP8"},
              "layers.3.mlp.experts.0.w1": {"quant_algo": "NVFP4"}}  # fmt: skip
    for description, others in (
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "fp8_e4m3_block_128x128"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed},
         "nvfp4"),
    ):  # fmt: skip
        spec, note = quantized("fp8", QuantizationSpec(description["quant_method"], description))
        assert note is None and spec is not None and spec.method == "online"
        assert msgspec.convert(msgspec.to_builtins(spec), QuantizationSpec) == spec
        scheme = scheme_of(spec)
        assert scheme.format_of("lm_head") is PLAIN
        made = scheme.format_of("model.layers.0.mlp.down_proj")
        assert made.name == "fp8_e4m3_block_128x128"
        assert made.made_of is not None and made.made_of.name == "mxfp8"
        assert scheme.format_of("model.layers.3.block_sparse_moe.experts.0.w1").name == others


def test_synthetic_weights_take_the_requested_format() -> None:
    options = EngineOptions(model="minimax-m2", load_format="synthetic", quantization="int4")
    scheme = scheme_of(locate(options).spec.quantization)
    assert scheme.formats[0].name == "packed_int4_group_128"
    for module in ("model.embed_tokens", "model.layers.3.block_sparse_moe.gate", "lm_head"):
        assert scheme.format_of(module) is PLAIN
    assert scheme.format_of("model.layers.3.self_attn.q_proj") == scheme.formats[0]
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is not quantized"):
        locate(EngineOptions(model="minimax-m2", load_format="synthetic", quantization="awq"))
