import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.generation import GenerationDefaults, SamplingDefaults, read_generation_defaults
from negamax.config.json_file import read_json_object
from negamax.config.kv_cache import (
    block_bytes,
    choose_block_size,
    sharding_crossover,
    shards_index,
    split_over_holders,
)
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import weight_bytes
from negamax.models.minimax_m2.config import FAMILY
from negamax.models.minimax_m3.config import MiniMaxM3Spec, text_config
from negamax.models.registry import bundled_names, bundled_spec, import_names, read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect
from tests import quantization_descriptions as described
from tests.tables import read_table

Config = dict[str, Any]
# config.json of MiniMaxAI/MiniMax-M2 and MiniMaxAI/MiniMax-M3
M2: Config = read_table("configs.minimax_m2")
M3: Config = read_table("configs.minimax_m3")
M3_TEXT: Config = M3["text_config"]
M3_AROUND: Config = {name: value for name, value in M3.items() if name != "text_config"}
SPARSE: Config = M3_TEXT["sparse_attention_config"]
FP8, PATTERN = M2["quantization_config"], SPARSE["sparse_attention_freq"]
EVERY = [1] * 60
M31: Config = {
    **M3_AROUND,
    "quantization_config": described.M31,
    "text_config": {
        **M3_TEXT, "num_mtp_modules": 0,
        "sparse_attention_config": {
            **SPARSE, "sparse_attention_freq": EVERY, "sparse_disable_index_value": EVERY,
        },
    },
}  # fmt: skip


def change(config: Config, **fields: Any) -> Config:
    """Return `config` with changed fields. A field whose value is `...` is left out."""
    return {name: value for name, value in {**config, **fields}.items() if value is not ...}


def leave_out(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def change_sparse(**fields: Any) -> Config:
    return change(M3_TEXT, sparse_attention_config=change(SPARSE, **fields))


# --- published models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name", "elements"),
    [
        (change(M2, bos_token_id=200034, eos_token_id=200020), "minimax-m2", 228_689_764_864),
        (M3, "minimax-m3", 427_040_140_160),
        # The first three layers have an index, too.
        (M31, "minimax-m3.1-flash", 427_040_140_160 + 3 * (640 * 6144 + 256)),
    ],
)
def test_published_configs_give_the_bundled_specs(config: Config, name: str, elements: int) -> None:
    spec = read_spec(config)
    assert spec == bundled_spec(name) and spec.notes == ()
    assert sum(weight.num_elements for weight in import_names(spec).weights(spec)) == elements
    frame = msgspec.msgpack.encode(spec)  # Processes exchange specs in this encoding.
    assert msgspec.msgpack.decode(frame, type=type(spec)) == spec
    assert msgspec.msgpack.decode(frame, type=ModelSpec).architecture == spec.architecture
    assert (detect(spec.quantization) is None) is (name == "minimax-m3")


def test_the_published_config_of_the_vision_tower_is_read() -> None:
    vision = read_spec(M3).vision
    assert vision is not None
    assert (vision.head_dim, vision.patch_values, vision.token_pixels) == (80, 1176, 28)
    tokens = vision.image_token_id, vision.image_start_id, vision.image_end_id
    assert tokens == (200_025, 200_029, 200_030)
    assert read_spec(change(M3, vision_config=None)).vision is None
    assert read_spec(change(M3, image_token_index=200_064)).vision is None
    for field, value in (("rope_mode", "2d"), ("num_channels", 1), ("num_attention_heads", 7)):
        with pytest.raises(ConfigError, match=f"{field}|a multiple of 7"):
            read_spec(change(M3, vision_config=change(M3["vision_config"], **{field: value})))


def test_bundled_specs_of_m2_differ_only_in_the_context_length() -> None:
    names = [name for name in bundled_names() if name.startswith("minimax-m2")]
    assert names == [f"minimax-m2{version}" for version in ("", ".1", ".5", ".7")]
    lengths = [bundled_spec(name.upper()).max_position_embeddings for name in names]
    assert lengths == [196608, 196608, 196608, 204800]
    alike = [replace(bundled_spec(name), max_position_embeddings=9) for name in names]
    assert alike.count(alike[0]) == len(alike)
    with pytest.raises(ConfigError, match=r"'minimax-m1'; known: minimax-m2, minimax-m2\.1"):
        bundled_spec("minimax-m1")


# --- refusals ------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    *read_table("model_spec.refused_by_m2"),
    ("attn_type_list", [1] * 61 + [0], "attn_type_list[61] is 0; supported: 1"),
    ("attn_type_list", [1] * 61, "; supported: 62 entries, one per layer"),
    ("layer_types", ["full_attention", *["no"] * 61], "layer_types[1] is 'no'; supported: 'full"),
    ("vocab_size", 10**12, "vocab_size is 1000000000000; supported: an integer from 1"),
    ("rope_theta", nan, "rope_theta is nan; supported: a finite number above 1"),
    ("partial_rotary_factor", inf, "partial_rotary_factor is inf; supported: above 0, at most 1"),
]  # fmt: skip
REFUSED_BY_M3: list[tuple[str, Any, str]] = [
    *read_table("model_spec.refused_by_m3"),
    ("swiglu_alpha", 10**400, "000...; supported: a number in the range of a float"),
    ("moe_layer_freq", [1] * 59, "; supported: 60 entries, one per layer"),
    ("moe_layer_freq", [2] * 60, "moe_layer_freq[0] is 2; supported: 0 or 1"),
    ("mlp_layer_types", ["dense"] * 60, "; supported: the value of moe_layer_freq"),
    ("layer_types", ["no"] * 60, "layer_types[0] is 'no'; supported: 'full_attention' or 'min"),
]  # fmt: skip
REFUSED_IN_SPARSE: list[tuple[str, Any, str]] = [
    *read_table("model_spec.refused_in_sparse"),
    ("sparse_attention_freq", [0] * 60, "use_sparse_attention is True; supported: False"),
    ("sparse_attention_freq", [1] * 59, "; supported: 60 entries, one per layer"),
    ("sparse_disable_index_value", [0] * 60, "index_value[3] is 0; supported: 1 in a sparse layer"),
]  # fmt: skip
REFUSED_AROUND: list[tuple[str, Any, str]] = [
    ("text_config", None, "text_config is None; supported: an object"),
    ("text_config", change(M3_TEXT, architectures=["Other"]), "text_config.architectures is"),
    ("text_config", change(M3_TEXT, architectures=True), "text_config.architectures is True"),
    ("text_config", change(M3_TEXT, architectures={"a": 1}), "text_config.architectures is"),
    ("text_config", change(M3_TEXT, model_type="llama"), "text_config.model_type is 'llama'"),
    ("tie_word_embeddings", True, "tie_word_embeddings is True"),
]


def check_refused(config: Config, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(config)
    assert words in caught.value.message


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
M2_SIZES = (
    *SIZES, "num_key_value_heads", "max_position_embeddings", "intermediate_size",
    "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
M3_SIZES = (
    "dense_intermediate_size", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit",
    "shared_intermediate_size", "num_local_experts",
)  # fmt: skip
SPARSE_SIZES = ("index_dim", "num_index_heads", "topk_blocks", "block_size", "attention_freq")
NO_METHOD = "no quant_method (found: None"
ALL_REFUSED = [
    *((change(M2, **{field: value}), words) for field, value, words in REFUSED),
    *((change(M3_TEXT, **{field: value}), words) for field, value, words in REFUSED_BY_M3),
    *((change_sparse(**{field: value}), words) for field, value, words in REFUSED_IN_SPARSE),
    *((change(M3, **{field: value}), words) for field, value, words in REFUSED_AROUND),
    *((leave_out(M2, field), f"no {field}") for field in M2_SIZES),
    *((leave_out(M3_TEXT, field), f"no {field}") for field in M3_SIZES),
    *((change_sparse(**{f"sparse_{name}": ...}), f"no sparse_{name}") for name in SPARSE_SIZES),
    (leave_out(M2, "architectures", "model_type"), "neither architectures nor model_type"),
    (change(M2, quantization_config={"quant_method": None}), NO_METHOD),
    (change(M2, quantization_config={"bits": 4}), NO_METHOD),
]


@pytest.mark.parametrize(("config", "words"), ALL_REFUSED, ids=[words for _, words in ALL_REFUSED])
def test_refuses_unsupported_and_absent_values(config: Config, words: str) -> None:
    check_refused(config, words)


NAMED = r"quantization_config\.{} is .*; supported: "


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (FP8 | {"fmt": "float8_e5m2"}, NAMED.format("fmt")),
        (FP8 | {"activation_scheme": "static"}, NAMED.format("activation_scheme")),
        (FP8 | {"scale_fmt": "ue8m0"}, NAMED.format("scale_fmt")),
        (FP8 | {"weight_block_size": [128]}, NAMED.format("weight_block_size")),
        (FP8 | {"weight_block_size": [0, 128]}, NAMED.format("weight_block_size")),
        (FP8 | {"modules_to_not_convert": "lm_head"}, NAMED.format("modules_to_not_convert")),
        ({"quant_method": "bitsandbytes"}, r"by 'bitsandbytes' \(config.json"),
        ({"quant_method": "int4"}, r"by 'int4' \(config.json"),
    ],
)
def test_refuses_unsupported_quantization_by_name(described: Config, words: str) -> None:
    spec = read_spec(change(M2, quantization_config=described))
    with pytest.raises(ConfigError, match=words):
        detect(spec.quantization)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf_quant_config.json", r"hf_quant_config\.json\.quant_algo is None; supported: 'FP8'"),
        ("quant_model_description.json", r"quant_model_description\.json\.\*\.weight is None"),
    ],
)
def test_quantization_may_be_in_another_file(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("{}")
    plain = change(M2, quantization_config=None)
    with pytest.raises(ConfigError, match=message):
        detect(read_spec(plain, tmp_path).quantization)
    described = read_spec(M2, tmp_path).quantization
    assert described is not None and described.source == "config.json"
    file = tmp_path / "quant_model_description.json"
    file.write_text("{}")
    described = read_spec(plain, tmp_path).quantization
    assert described is not None and described.source == name
    file.write_text('{"model.norm.weight": "FLOAT"}')  # Conversions add this file.
    described = read_spec(M2, tmp_path).quantization
    assert described is not None and described.source == file.name


# --- fields --------------------------------------------------------------------------------------


def test_absent_fields_take_defaults_and_unknown_ones_are_noted() -> None:
    fixed = ("hidden_act", "scoring_func", "use_qk_norm", "attn_type_list", "architectures")
    spec = read_spec(leave_out(M2, "rms_norm_eps", "rope_theta", *fixed))
    assert (spec.rms_norm_eps, spec.rope_theta) == (1e-6, 5_000_000.0)
    for given, ids in (([200020, 5, 200020], (200020, 5)), (7, (7,)), (None, ())):
        assert read_spec(change(M2, eos_token_id=given)).eos_token_ids == ids
    for fields, dtype in (
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
    ):
        assert read_spec({**leave_out(M2, "torch_dtype"), **fields}).dtype == dtype
    unnamed = read_spec(change(M2, torch_dtype=None))
    assert unnamed.dtype == "float32" and "float32 is assumed" in unnamed.notes[0]
    spec = read_spec(change(M2, zebra=1, apple={"a": 2}))
    (note,) = spec.notes
    assert note == "these fields of config.json are unknown and ignored: apple, zebra"
    assert spec == read_spec(M2)
    spec = read_spec(change(M3, apple=1, text_config=change(M3_TEXT, zebra=2)))
    assert [note.rpartition(": ")[2] for note in spec.notes] == ["zebra", "apple"]


@pytest.mark.parametrize("name", ["", "minimax_m2", None])
def test_tools_wrote_other_types_of_text_models(name: str | None) -> None:
    text = change(M3_TEXT, model_type=name, architectures=[])
    assert read_spec(change(M3, text_config=text)) == read_spec(M3)
    assert text_config(change(M3, text_config=text))["model_type"] == "minimax_m3_vl_text"


def test_rotary_dim_in_every_spelling() -> None:
    bare = leave_out(M2, "rotary_dim", "rope_theta")
    new_style = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}
    spec = read_spec({**bare, "rope_parameters": new_style})
    assert (spec.rope_theta, spec.rotary_dim) == (1e4, 32)
    # transformers 5 saves MiniMax's config without the partial rotary factor.
    resaved = {"rotary_dim": 64, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    for fields in (
        {"partial_rotary_factor": 0.5},
        {"rotary_dim": 64, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},
        resaved,
    ):
        assert read_spec({**bare, **fields}).rotary_dim == 64
    scaling = {"rope_scaling": {"rope_theta": 1e4}, "rope_parameters": {"rope_theta": 5e6}}
    check_refused({**bare, **scaling}, "rope_theta is 10000.0; supported: the value in rope_p")
    neither = read_spec(bare)
    assert neither.rotary_dim == 128
    assert "all 128 head dimensions rotate" in neither.notes[0]


# --- MiniMax-M3 ----------------------------------------------------------------------------------


def transformers_config() -> Config:
    """Return the config.json of the text model in the form that transformers saves."""
    gone = (
        "attention_output_gate", "moe_layer_freq", "n_shared_experts", "num_mtp_modules",
        "partial_rotary_factor", "qk_norm_type", "rope_theta", "scoring_func",
        "sparse_attention_config", "use_gemma_norm", "use_qk_norm", "use_routing_bias",
    )  # fmt: skip
    return leave_out(M3_TEXT, *gone) | {
        "architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text",
        "hidden_act": "silu", "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57, "pad_token_id": None, "use_cache": True,
        "rope_parameters": {
            "partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "rope_type": "default",
        },
        "index_block_size": 128, "index_head_dim": 128, "index_local_blocks": 1, "index_n_heads": 4,
        "index_topk_blocks": 16,
    }  # fmt: skip


def test_m3_in_the_spellings_of_minimax_and_transformers_is_one_model() -> None:
    expected = bundled_spec("minimax-m3")
    for alone in (M3_TEXT, transformers_config()):
        around = {"architecture": expected.architecture, "vision": expected.vision}
        assert replace(read_spec(alone), **around) == expected
    assert read_spec(transformers_config()).notes == ()
    inner = change(transformers_config(), architectures=..., dtype=..., bos_token_id=None)
    around = change(M3_AROUND, bos_token_id=200034, text_config=inner)
    seeing = read_spec(leave_out(around, "architectures"))
    assert read_spec(around) == seeing == expected
    both = {**M3_TEXT, **transformers_config(), "sparse_attention_config": SPARSE}
    assert read_spec(both).notes == ()
    for name, value in (
        ("index_topk_blocks", 8),
        ("index_n_heads", 2),
        ("index_local_blocks", 2),
        ("layer_types", ["full_attention"] * 60),
        ("mlp_layer_types", ["sparse"] * 60),
    ):
        with pytest.raises(ConfigError, match=rf"{name} is .*; supported: the value of"):
            read_spec({**both, name: value})


def read_m3(config: Config) -> MiniMaxM3Spec:
    spec = read_spec(config)
    assert isinstance(spec, MiniMaxM3Spec)
    return spec


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 1), (1, 2), (128, 2), (129, 3)])
def test_forced_blocks_may_be_given_in_tokens(tokens: int, blocks: int) -> None:
    """A token's own block counts as local; tokens before it may begin in another block."""
    unnamed = {"sparse_init_block": ..., "sparse_local_block": ...}
    given = {"sparse_init_tokens": tokens, "sparse_local_tokens": tokens}
    sparse = read_m3(change_sparse(**unnamed, **given)).sparse
    assert sparse is not None
    assert (sparse.init_blocks, sparse.local_blocks) == (blocks - 1, blocks)
    assert read_spec(change_sparse(**unnamed)) == read_spec(M3_TEXT)


def test_m3_without_sparse_layers_shared_experts_or_dense_layers() -> None:
    dense = {"use_sparse_attention": False, "sparse_attention_freq": [0] * 60}
    for given in (..., None, dense):
        spec = read_m3(change(M3_TEXT, sparse_attention_config=given))
        assert spec.sparse is None
        assert choose_block_size(spec.kv_caches(), None, default=16) == 16
    for fields in ({"n_shared_experts": 0, "shared_intermediate_size": 0}, {"n_shared_experts": 0}):
        assert read_m3(change(M3_TEXT, shared_intermediate_size=...) | fields).shared_width == 0
    spec = read_m3(leave_out(M3_TEXT, "moe_layer_freq", "dense_intermediate_size"))
    assert all(spec.moe_layers) and spec.dense_width == 0
    by_count = change(M3_TEXT, moe_layer_freq=..., first_k_dense_replace=3)
    assert read_spec(by_count) == read_spec(M3_TEXT)


def test_quantization_is_described_around_the_text_model_or_in_it(tmp_path: Path) -> None:
    given = {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}
    inside = {**M3_AROUND, "text_config": {**M3_TEXT, **given}}
    outer, inner = read_spec({**M3, **given}), read_spec(inside)
    assert outer == inner and outer.quantization is not None
    assert outer.quantization.method == "mxfp8"
    (tmp_path / "hf_quant_config.json").write_text("{}")  # This file has the lowest precedence.
    for config in (inside, {**inside, **given}):
        found = read_spec(config, tmp_path).quantization
        assert found is not None and found.source == "config.json"


def test_first_layers_of_m3_keep_their_kinds_and_sharded_index_queries_are_whole() -> None:
    spec = bundled_spec("minimax-m3").first_layers(5)
    assert isinstance(spec, MiniMaxM3Spec) and spec.sparse is not None
    assert spec.num_layers == 5 and spec.moe_layers == (False,) * 3 + (True,) * 2
    assert spec.sparse.layers == spec.moe_layers
    assert len(spec.kv_caches()) == 5
    plain = bundled_spec("minimax-m3")
    for ranks, extra in ((1, 0), (4, 57 * 384 * 6144 * 2)):
        layout = ParallelLayout(tp=ranks)
        held = weight_bytes(plain.shard_index(), dtype="bfloat16", layout=layout)
        assert held - weight_bytes(plain, dtype="bfloat16", layout=layout) == extra


def test_sparse_layers_of_m3_also_cache_index_keys() -> None:
    spec = bundled_spec("minimax-m3")
    caches, sharded = spec.kv_caches(), spec.shard_index()
    names = [[cache.name for cache in layer] for layer in (caches[2], caches[3])]
    assert names == [["k", "v"], ["k", "v", "index"]]
    for of, dtype, ranks, per_token in (
        (spec, "bfloat16", 1, 122_880 + 14_592),
        (spec, "fp8", 1, 68_736),
        (spec, "bfloat16", 4, 122_880 // 4 + 14_592),
        (spec, "bfloat16", 8, 122_880 // 4 + 14_592),  # KV heads are copied to several ranks.
        (sharded, "fp8", 1, 68_736),
        (sharded, "fp8", 4, 17_184),
        (sharded, "fp8", 8, 16_272),
    ):
        assert block_bytes(of.kv_caches(), 128, dtype=dtype, ranks=ranks) == 128 * per_token
    # On eight ranks, two ranks split the blocks of a KV head, with whole or sharded index keys.
    for of, per_token in ((spec, 7_680 + 7_296), (sharded, 7_680 + 912)):
        held = split_over_holders(of.kv_caches(), 2)
        assert block_bytes(held, 128, dtype="fp8", ranks=8) == 128 * per_token
    assert choose_block_size(caches, None, default=16) == 128
    assert choose_block_size(caches, 256, default=16) == 256
    with pytest.raises(ConfigError, match="need a multiple of 128"):
        choose_block_size(caches, 64, default=16)


def test_index_keys_are_sharded_where_that_is_faster_for_the_longest_sequence() -> None:
    caches = bundled_spec("minimax-m3").kv_caches()
    for dtype, crossovers in (
        ("fp8", {2: 299e3, 4: 199e3, 8: 171e3, 1: inf}),
        ("bfloat16", {2: 149e3, 4: 100e3, 8: 85e3}),
    ):
        for ranks, tokens in crossovers.items():
            found = sharding_crossover(caches, dtype=dtype, ranks=ranks)
            assert found == pytest.approx(tokens, abs=500)
    for asked, ranks, longest, expected in (
        ("auto", 4, 1_048_576, True), ("auto", 4, 131_072, False), ("auto", 1, 1_048_576, False),
        ("on", 4, 1024, True), ("on", 1, 1024, False), ("off", 4, 1_048_576, False),
    ):  # fmt: skip
        sizes = {"ranks": ranks, "max_model_len": longest}
        assert shards_index(caches, asked, dtype="fp8", **sizes) == expected
    assert sharding_crossover(bundled_spec("minimax-m2").kv_caches(), dtype="fp8", ranks=4) == inf


# --- generation_config.json ----------------------------------------------------------------------


def defaults(folder: Path, config: Any = None, spec: ModelSpec | None = None) -> GenerationDefaults:
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    spec = spec or bundled_spec("minimax-m2")
    return read_generation_defaults(folder, spec, absent=FAMILY.sampling)


def test_generation_defaults_of_minimax(tmp_path: Path) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40}
    minimax = GenerationDefaults(sampling=SamplingDefaults(**sampling), eos_token_ids=(200020,))
    assert defaults(tmp_path) == minimax
    ids = {"bos_token_id": 200019, "eos_token_id": 200020}
    assert defaults(tmp_path, {**ids, "do_sample": True, **sampling}) == minimax


NAMED = {"eos_token": {"content": "[e~["}}  # transformers 5 writes this form beside tokenizer.json.
LISTED = {"eos_token": "[e~[", "added_tokens_decoder": {"200020": {"content": "[e~["}}}
UNKNOWN = {**LISTED, "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("tokenizer", "generation", "config", "ends", "warns"),
    [
        (None, None, 2, (2,), False),
        (LISTED, None, 2, (200_020,), True),  # NVIDIA's NVFP4 checkpoint has the id 2.
        (NAMED, {}, 2, (200_020,), True),
        (NAMED, {"eos_token_id": 2}, 2, (200_020,), True),
        (NAMED, {"eos_token_id": [200_020, 2]}, 200_020, (200_020,), True),
        (LISTED, {"eos_token_id": 200_019}, 200_020, (200_020, 200_019), True),
        (LISTED, {"eos_token_id": 200_020}, 200_020, (200_020,), False),
        (UNKNOWN, None, 2, (2,), False),
        (None, {"eos_token_id": 7}, 2, (7, 2), True),
    ],
)
def test_answers_end_at_the_tokens_of_all_files(
    tmp_path: Path, tokenizer: Any, generation: Any, config: int, ends: Any, warns: bool
) -> None:
    added = {"added_tokens": [{"content": "[e~[", "id": 200_020}]}
    for name, content in (("tokenizer_config", tokenizer), ("tokenizer", tokenizer and added)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    spec = replace(bundled_spec("minimax-m2"), eos_token_ids=(config,))
    found = defaults(tmp_path, generation, spec=spec)
    assert (found.eos_token_ids, found.warning is not None) == (ends, warns)
    turned = read_generation_defaults(tmp_path, spec, absent={}, turn_end="[e~[").eos_token_ids
    assert (200_020 in turned) is (tokenizer is not None)
    override = {"eos_token_id": 5, "temperature": 0.5}
    found = read_generation_defaults(tmp_path, spec, absent={}, override=override)
    assert (found.eos_token_ids, found.warning, found.sampling.temperature) == ((5,), None, 0.5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(temperature=0.0)),
        (
            {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1},
            SamplingDefaults(top_k=0, min_p=0.1, repetition_penalty=1.1),
        ),
    ],
)
def test_a_generation_config_replaces_all_defaults(
    tmp_path: Path, config: dict[str, Any], expected: SamplingDefaults
) -> None:
    found = defaults(tmp_path, config)
    assert found.sampling == expected
    assert found.eos_token_ids == (*config.get("eos_token_id", ()), 200_020)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "hot", nan)),
        *(("top_p", value) for value in (0, 1.5)),
        *(("top_k", value) for value in (2.5, -2)),
        *(("min_p", 2), ("repetition_penalty", 0), ("do_sample", "yes")),
        *(("eos_token_id", value) for value in ("x", 200064)),
    ],
)
def test_refuses_bad_generation_values_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} is "):
        defaults(tmp_path, {field: value})


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"']
)
def test_refuses_files_without_a_json_object_by_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    words = r"config\.json is missing" if content is None else r"config\.json"
    with pytest.raises(CheckpointError, match=words):
        read_json_object(path)
