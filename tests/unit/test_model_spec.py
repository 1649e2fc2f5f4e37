import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.generation import GenerationDefaults, SamplingDefaults, read_generation_defaults
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.models.minimax_m2.config import FAMILY
from negamax.models.registry import bundled_names, bundled_spec, import_names, read_spec
from negamax.quantization.detect import detect

M2_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.1",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**M2_CONFIG, **fields}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in M2_CONFIG.items() if name not in names}


def test_minimax_config_gives_the_bundled_spec() -> None:
    spec = read_spec(changed(bos_token_id=200034, eos_token_id=200020))
    assert spec == bundled_spec("minimax-m2")
    assert spec.notes == ()
    assert (spec.rotary_dim, spec.rope_theta, spec.num_heads, spec.num_kv_heads) == (
        64,
        5_000_000.0,
        48,
        8,
    )
    assert detect(spec.quantization) is not None


def test_bundled_specs_differ_only_in_the_window() -> None:
    windows = {
        f"minimax-{v}": bundled_spec(f"MiniMax-{v.upper()}") for v in ("m2", "m2.1", "m2.5", "m2.7")
    }
    assert [spec.max_position_embeddings for spec in windows.values()] == [
        196608,
        196608,
        196608,
        204800,
    ]
    for spec in windows.values():
        weights = import_names(spec).weights(spec)
        assert sum(weight.num_elements for weight in weights) == 228_689_764_864
    assert set(windows) == {name for name in bundled_names() if name.startswith("minimax-m2")}
    with pytest.raises(ConfigError, match=r"'minimax-m1'; known: minimax-m2, minimax-m2\.1"):
        bundled_spec("minimax-m1")


def test_spec_crosses_processes_unchanged() -> None:
    spec = bundled_spec("minimax-m2")
    frame = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(frame, type=type(spec)) == spec
    assert msgspec.msgpack.decode(frame, type=ModelSpec).architecture == spec.architecture


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("architectures", ["MixtralForCausalLM"], "MiniMaxM2ForCausalLM"),
        ("architectures", ["MiniMaxM2ForCausalLM", "Other"], "MiniMaxM2ForCausalLM"),
        ("architectures", "MiniMaxM2ForCausalLM", r"\['MiniMaxM2ForCausalLM'\]"),
        ("model_type", "minimax_m3_vl", "minimax_m2"),
        ("hidden_act", "gelu", "silu"),
        ("scoring_func", "softmax", "sigmoid"),
        ("use_qk_norm", False, "True"),
        ("use_qk_norm", 1, "True"),
        ("qk_norm_type", "per_head", "per_layer"),
        ("use_routing_bias", False, "True"),
        ("tie_word_embeddings", True, "False"),
        ("shared_intermediate_size", 3072, "0"),
        ("n_shared_experts", 1, "0"),
        ("routed_scaling_factor", 2.0, r"1\.0"),
        ("norm_topk_prob", False, "True"),
        ("n_group", 8, "1"),
        ("sliding_window", 4096, "null"),
        ("swiglu_limit", 7.0, "null"),
        ("sparse_attention_config", {"sparse_index_dim": 128}, "null"),
        ("attention_bias", True, "False"),
        ("layernorm_mlp_beta", 3.5, r"1\.0"),
        ("layernorm_full_attention_alpha", 3.5, r"1\.0"),
        ("attn_type_list", [1] * 61 + [0], "1"),
        ("attn_type_list", [1] * 61, "62 entries"),
        ("layer_types", ["full_attention"] * 61 + ["sliding_attention"], "full_attention"),
        ("hidden_size", 0, "an integer from 1"),
        ("hidden_size", 3072.0, "an integer from 1"),
        ("hidden_size", True, "an integer from 1"),
        ("vocab_size", 10**12, "an integer from 1"),
        ("num_key_value_heads", 5, r"a divisor of num_attention_heads \(48\)"),
        ("num_experts_per_tok", 257, r"at most num_local_experts \(256\)"),
        ("rotary_dim", 63, "an even number"),
        ("rotary_dim", 130, r"head_dim \(128\)"),
        ("rms_norm_eps", 0, "above 0"),
        ("rms_norm_eps", "1e-6", "a number"),
        ("rope_theta", float("nan"), "a finite number"),
        ("eos_token_id", 200064, "0 to vocab_size - 1"),
        ("eos_token_id", [1, "2"], "a token id"),
        ("bos_token_id", [1, 2], "one token id"),
        ("torch_dtype", "float8_e4m3fn", "bfloat16, float16, float32"),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "'default'"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}, "'default'"),
        ("rope_parameters", {"rope_type": "default", "factor": 4.0}, "rope_type, rope_theta"),
        ("rope_parameters", {"rope_theta": 1e4}, r"the value in rope_parameters \(10000"),
        ("rope_parameters", {"rope_theta": 5e6, "partial_rotary_factor": 0.25}, r"128 \* 0\.25"),
        ("partial_rotary_factor", float("inf"), "above 0, at most 1"),
        ("quantization_config", "fp8", "an object or null"),
    ],
)
def test_unsupported_value_is_refused_by_name(field: str, value: Any, supported: str) -> None:
    name = {"torch_dtype": "dtype", "rope_scaling": "rope_"}.get(field, field)
    name = {"rope_parameters": "(rope_|rotary_dim)", "eos_token_id": "eos_token_id"}.get(
        field, name
    )
    with pytest.raises(ConfigError, match=rf"{name}.* is .*; supported: .*{supported}"):
        read_spec(changed(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fmt", "float8_e5m2"),
        ("activation_scheme", "static"),
        ("scale_fmt", "ue8m0"),
        ("weight_block_size", [128]),
        ("weight_block_size", [0, 128]),
        ("modules_to_not_convert", "lm_head"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(field: str, value: Any) -> None:
    quantization = {**M2_CONFIG["quantization_config"], field: value}
    with pytest.raises(ConfigError, match=rf"quantization_config\.{field} is .*; supported: "):
        detect(read_spec(changed(quantization_config=quantization)).quantization)


@pytest.mark.parametrize("description", [{"quant_method": None}, {"bits": 4}])
def test_a_description_without_a_method_is_refused(description: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no method: quant_method is None"):
        read_spec(changed(quantization_config=description))


@pytest.mark.parametrize("method", ["bitsandbytes", "int4"])
def test_unknown_quantisation_methods_are_refused_by_name(method: str) -> None:
    spec = read_spec(changed(quantization_config={"quant_method": method}))
    with pytest.raises(ConfigError, match=rf"by '{method}' \(config.json"):
        detect(spec.quantization)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf_quant_config.json", r"hf_quant_config\.json\.quant_algo is None; supported: 'FP8'"),
        ("quant_model_description.json", r"quant_model_description\.json\.\*\.weight is None"),
    ],
)
def test_a_file_beside_config_json_says_how_weights_are_quantised(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).write_text("{}")
    plain = changed(quantization_config=None)
    with pytest.raises(ConfigError, match=message):
        detect(read_spec(plain, tmp_path).quantization)
    assert read_spec(changed(), tmp_path).quantization.source == "config.json"
    (tmp_path / "quant_model_description.json").write_text("{}")
    assert read_spec(plain, tmp_path).quantization.source == name


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim",
        "max_position_embeddings", "intermediate_size", "num_local_experts", "num_experts_per_tok",
    ],
)  # fmt: skip
def test_missing_size_is_not_guessed(field: str) -> None:
    with pytest.raises(ConfigError, match=f"no {field}"):
        read_spec(without(field))


def test_config_without_a_model_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither architectures nor model_type"):
        read_spec(without("architectures", "model_type"))


def test_left_out_fields_get_the_defaults_of_the_architecture() -> None:
    spec = read_spec(
        without(
            "rms_norm_eps",
            "rope_theta",
            "hidden_act",
            "scoring_func",
            "use_qk_norm",
            "attn_type_list",
            "architectures",
        )
    )
    assert (spec.rms_norm_eps, spec.rope_theta) == (1e-6, 5_000_000.0)


def test_fields_never_heard_of_are_noted_and_nothing_else_is() -> None:
    spec = read_spec(changed(zebra=1, apple={"a": 2}))
    assert spec.notes == (
        "config.json fields that this version does not know and ignores: apple, zebra",
    )
    assert spec == read_spec(M2_CONFIG)


def test_eos_may_be_one_id_or_several() -> None:
    assert read_spec(changed(eos_token_id=[200020, 5, 200020])).eos_token_ids == (200020, 5)
    assert read_spec(changed(eos_token_id=7)).eos_token_ids == (7,)
    assert read_spec(M2_CONFIG).eos_token_ids == ()


def test_rotary_dim_in_every_spelling() -> None:
    bare = without("rotary_dim", "rope_theta")
    new_style = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}
    spec = read_spec({**bare, "rope_parameters": new_style})
    assert (spec.rope_theta, spec.rotary_dim) == (1e4, 32)
    assert read_spec({**bare, "partial_rotary_factor": 0.5}).rotary_dim == 64
    both = read_spec(changed(rope_parameters={"rope_theta": 5e6, "partial_rotary_factor": 0.5}))
    assert both.rotary_dim == 64
    with pytest.raises(ConfigError, match=r"rope_theta is 10000.0; supported: the value in rope_p"):
        scaling = {"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 5e6}}
        read_spec({**bare, **scaling})
    # transformers 5 re-saves MiniMax's config with rotary_dim beside rope_parameters that lack the
    # factor
    resaved = {
        **bare,
        "rotary_dim": 64,
        "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    }
    assert read_spec(resaved).rotary_dim == 64
    neither = read_spec(bare)
    assert neither.rotary_dim == 128
    assert "all 128 head dimensions rotate" in neither.notes[0]


def test_dtype_in_both_spellings() -> None:
    bare = without("torch_dtype")
    assert read_spec({**bare, "dtype": "float16"}).dtype == "float16"
    assert read_spec({**bare, "torch_dtype": "torch.float32"}).dtype == "float32"
    assert read_spec({**bare, "dtype": None, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    unnamed = read_spec({**bare, "dtype": None})
    assert unnamed.dtype == "float32" and "float32 is assumed" in unnamed.notes[0]


def defaults(folder: Path, config: Any = None) -> GenerationDefaults:
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    return read_generation_defaults(folder, bundled_spec("minimax-m2"), absent=FAMILY.sampling)


def test_generation_defaults_of_minimax(tmp_path: Path) -> None:
    absent = defaults(tmp_path)
    shipped = defaults(
        tmp_path,
        {
            "bos_token_id": 200019,
            "do_sample": True,
            "eos_token_id": 200020,
            "temperature": 1.0,
            "top_p": 0.95,
            "top_k": 40,
        },
    )
    minimax = SamplingDefaults(temperature=1.0, top_p=0.95, top_k=40)
    assert absent == shipped == GenerationDefaults(sampling=minimax, eos_token_ids=(200020,))


def test_the_end_is_the_tokenizers_where_only_config_json_says_another(tmp_path: Path) -> None:
    spec = replace(bundled_spec("minimax-m2"), eos_token_ids=(2,))  # of NVIDIA's NVFP4

    def ends() -> tuple[int, ...]:
        return read_generation_defaults(tmp_path, spec, absent=FAMILY.sampling).eos_token_ids

    assert ends() == (2,)
    added = {"200019": {"content": "]~b]"}, "200020": {"content": "[e~["}}
    for name in ("[e~[", {"content": "[e~["}):
        config = {"eos_token": name, "added_tokens_decoder": added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert ends() == (200_020,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ends() == (200_020,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 200019}')
    assert ends() == (200_019,)
    (tmp_path / "generation_config.json").unlink()
    config = {"eos_token": "</s>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ends() == (2,)


def test_generation_file_overrides_and_leaves_off_what_it_does_not_name(tmp_path: Path) -> None:
    assert defaults(tmp_path, {"eos_token_id": [3, 4]}) == GenerationDefaults(
        sampling=SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0), eos_token_ids=(3, 4)
    )
    assert defaults(tmp_path, {"do_sample": False, "temperature": 0.7}).sampling.temperature == 0.0
    assert defaults(
        tmp_path, {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1}
    ).sampling == SamplingDefaults(top_k=0, min_p=0.1, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")), ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("do_sample",
            "yes"), ("eos_token_id", "x"),
        ("eos_token_id", 200064),
    ],
)  # fmt: skip
def test_bad_generation_value_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is "):
        defaults(tmp_path, {field: value})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_file_that_is_no_json_object_is_refused_by_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json_object(path)


def test_missing_file_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_json_object(tmp_path / "config.json")
