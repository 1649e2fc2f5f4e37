import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.config.embedded import EMBEDDED
from negamax.config.quantization import QuantizationSpec, read_quantization
from negamax.engine.core.source import locate
from negamax.formats.floats import PLAIN
from negamax.options.engine import EngineOptions
from negamax.quantization.detect import METHODS, detect
from negamax.quantization.names import check_name, quantized

# description -> the names that vLLM and SGLang accept for it
ACCEPTED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8"}, "fp8 FP8"),
    ({"quant_method": "awq"}, "awq auto_awq awq_marlin marlin moe_wna16"),
    ({"quant_method": "gptq"}, "gptq auto_gptq gptq_marlin gptq-marlin marlin moe_wna16"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors compressed_tensors"),
    ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "w8a8_int8"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "w8a8_fp8"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt modelopt_fp8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt modelopt_fp4 petit_nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt modelopt_mxfp8 mxfp8"),
    (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}},
        "modelopt modelopt_mixed",
    ),
    ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt modelopt_fp4 petit_nvfp4"),
    ({"quant_method": "modelslim"}, "modelslim ascend"),
    ({"quant_method": "auto-round"}, "auto-round auto_round inc"),
    ({"quant_method": "mxfp8"}, "mxfp8 modelopt_mxfp8"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "quark"}, "quark"),
]


@pytest.mark.parametrize(("description", "names"), ACCEPTED)
def test_only_names_of_the_detected_method_are_accepted(
    description: dict[str, Any], names: str
) -> None:
    spec = QuantizationSpec(description["quant_method"], description)
    for name in names.split():
        said = f"--quantization {name}: detected in config.json, not needed"
        assert quantized(name, spec) == (spec, said)
    others = {name for _, each in ACCEPTED for name in each.split()} | {"int4"}
    plain = {name.lower().replace("_", "-") for name in (*names.split(), spec.method)}
    plain |= {"fp8"} if "mxfp8" in plain else set()  # fp8 converts MXFP8 to blocks
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


@pytest.mark.parametrize("name", ["bitsandbytes", "gguf", "torchao", "w4afp8", "fp7"])
def test_unknown_name_is_refused_before_the_model_is_located(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization is '{name}'; allowed: .*awq_marlin, .*"):
        locate(EngineOptions(model="nobody/has-this", quantization=name))


def test_a_checkpoint_is_checked_when_it_is_located(tmp_path: Path) -> None:
    found = locate(EngineOptions(model="minimax-m2", load_format="synthetic", quantization="fp8"))
    assert found.spec.notes[-1].startswith("--quantization fp8: detected in config.json")
    assert locate(EngineOptions(model="nano", quantization="fp8")).spec.notes
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is quantized by 'fp8'"):
        locate(EngineOptions(model="nano", quantization="awq"))
    config = json.loads((EMBEDDED["nano"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is not quantized"):
        locate(EngineOptions(model=str(tmp_path), quantization="awq"))
    found = locate(EngineOptions(model=str(tmp_path), quantization="int8-per-channel-weight-only"))
    scheme = detect(found.spec.quantization)
    assert scheme is not None and [stored.name for stored in scheme.formats] == ["int8_channel"]


def test_empty_description_is_none_and_one_without_method_is_refused() -> None:
    assert read_quantization({"quantization_config": {}}) is None
    for fields in ({"bits": 4}, {"quant_method": None}, {"quant_method": ""}):
        with pytest.raises(ConfigError, match=r"quant_method is (None|'') \(add quant_method, or"):
            read_quantization({"quantization_config": fields})


def test_mxfp8_becomes_blocks_on_request() -> None:
    listed = {"layers.0.mlp.down_proj": {"quant_algo": "MXFP8"},
              "layers.3.mlp.experts.0.w1": {"quant_algo": "NVFP4"}}  # fmt: skip
    for description, others in (
        ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, "fp8_e4m3_block_128x128"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed},
         "nvfp4"),
    ):  # fmt: skip
        stored = QuantizationSpec(description["quant_method"], description)
        spec, note = quantized("fp8", stored)
        assert note is None and spec is not None and spec.method == "online"
        assert msgspec.convert(msgspec.to_builtins(spec), QuantizationSpec) == spec
        scheme = detect(spec)
        assert scheme is not None and scheme.format_of("lm_head") is PLAIN
        made = scheme.format_of("model.layers.0.mlp.down_proj")
        assert made.name == "fp8_e4m3_block_128x128"
        assert made.made_of is not None and made.made_of.name == "mxfp8"
        assert scheme.format_of("model.layers.3.block_sparse_moe.experts.0.w1").name == others


def test_synthetic_weights_take_the_requested_format() -> None:
    options = EngineOptions(model="minimax-m2", load_format="synthetic", quantization="int4")
    scheme = detect(locate(options).spec.quantization)
    assert scheme is not None and scheme.formats[0].name == "packed_int4_group_128"
    for module in ("model.embed_tokens", "model.layers.3.block_sparse_moe.gate", "lm_head"):
        assert scheme.format_of(module) is PLAIN
    assert scheme.format_of("model.layers.3.self_attn.q_proj") == scheme.formats[0]
    with pytest.raises(ConfigError, match="'awq'; the checkpoint is not quantized"):
        locate(EngineOptions(model="minimax-m2", load_format="synthetic", quantization="awq"))
