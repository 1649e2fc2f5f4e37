from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.config.kv_cache import (
    block_bytes,
    choose_block_size,
    sharding_crossover,
    shards_index,
    split_over_holders,
)
from negamax.models.memory import weight_bytes
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.registry import bundled_spec, import_names, read_spec
from negamax.parallel.layout import ParallelLayout

PATTERN = [0] * 3 + [1] * 57
SPARSE: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_disable_index_value": PATTERN,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_attention_freq": PATTERN,
}
TEXT: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "attention_output_gate": False,
    "bos_token_id": 200034,
    "dense_intermediate_size": 12288,
    "dtype": "bfloat16",
    "eos_token_id": 200020,
    "head_dim": 128,
    "hidden_act": "swigluoai",
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "max_position_embeddings": 1048576,
    "moe_layer_freq": PATTERN,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "num_mtp_modules": 1,
    "partial_rotary_factor": 0.5,
    "qk_norm_type": "per_head",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 3072,
    "sparse_attention_config": SPARSE,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
AROUND: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
    "image_seq_length": 576,
    "image_token_index": 200025,
    "img_token_compression_config": {"image_token_compression_method": "patch_merge"},
    "model_type": "minimax_m3_vl",
    "multimodal_projector_bias": True,
    "num_reward_heads": 0,
    "process_image_mode": "dynamic_res",
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 6144,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "video_token_index": 200026,
    "vision_config": {"hidden_size": 1280, "model_type": "clip_vision_model"},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def text(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**TEXT, **changes}.items() if value is not ...}


def sparse(**changes: Any) -> dict[str, Any]:
    given = {**SPARSE, **changes}
    return {name: value for name, value in given.items() if value is not ...}


def test_the_published_config_gives_the_bundled_spec() -> None:
    spec = read_spec({**AROUND, "text_config": TEXT})
    assert spec == bundled_spec("minimax-m3") and spec.notes == ()
    assert sum(w.num_elements for w in import_names(spec).weights(spec)) == 426_174_572_928
    alone = read_spec(TEXT)
    assert replace(alone, architecture=spec.architecture) == spec
    frame = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(frame, type=MiniMaxM3Spec) == spec


def test_caches_are_keys_and_values_and_index_keys_in_sparse_layers() -> None:
    caches = bundled_spec("minimax-m3").kv_caches()
    assert [[cache.name for cache in layer] for layer in (caches[2], caches[3])] == [
        ["k", "v"],
        ["k", "v", "index"],
    ]
    for dtype, ranks, per_token in (
        ("bfloat16", 1, 122_880 + 14_592),
        ("fp8", 1, 68_736),
        ("bfloat16", 4, 122_880 // 4 + 14_592),
        ("bfloat16", 8, 122_880 // 4 + 14_592),  # KV heads are copied
    ):
        assert block_bytes(caches, 128, dtype=dtype, ranks=ranks) == 128 * per_token
    sharded = bundled_spec("minimax-m3").shard_index()
    of_shards = {
        ranks: block_bytes(sharded.kv_caches(), 128, dtype="fp8", ranks=ranks)
        for ranks in (1, 4, 8)
    }
    assert of_shards == {1: 128 * 68_736, 4: 128 * 17_184, 8: 128 * 16_272}
    # on eight ranks, two split the blocks of a KV head, with whole and with sharded index keys
    found = [
        block_bytes(split_over_holders(spec.kv_caches(), 2), 128, dtype="fp8", ranks=8)
        for spec in (bundled_spec("minimax-m3"), sharded)
    ]
    assert found == [128 * (7_680 + 7_296), 128 * (7_680 + 912)]
    # every rank has the index queries of all heads
    split = ParallelLayout(tp=4)
    one, four = (
        weight_bytes(sharded, dtype="bfloat16", layout=layout)
        for layout in (ParallelLayout(), split)
    )
    plain = bundled_spec("minimax-m3")
    assert weight_bytes(plain, dtype="bfloat16") == one
    assert four - weight_bytes(plain, dtype="bfloat16", layout=split) == 57 * 384 * 6144 * 2
    assert choose_block_size(caches, None, default=16) == 128
    assert choose_block_size(caches, 256, default=16) == 256
    with pytest.raises(ConfigError, match="need a multiple of 128"):
        choose_block_size(caches, 64, default=16)


def test_index_keys_are_sharded_where_the_longest_sequence_is_answered_faster_so() -> None:
    caches = bundled_spec("minimax-m3").kv_caches()
    crossover = {
        (dtype, ranks): round(sharding_crossover(caches, dtype=dtype, ranks=ranks), -3)
        for dtype in ("fp8", "bfloat16")
        for ranks in (2, 4, 8)
    }
    assert crossover == {
        ("fp8", 2): 299e3, ("fp8", 4): 199e3, ("fp8", 8): 171e3,
        ("bfloat16", 2): 149e3, ("bfloat16", 4): 100e3, ("bfloat16", 8): 85e3,
    }  # fmt: skip
    assert sharding_crossover(caches, dtype="fp8", ranks=1) == inf
    for asked, ranks, longest, expected in (
        ("auto", 4, 1_048_576, True), ("auto", 4, 131_072, False), ("auto", 1, 1_048_576, False),
        ("on", 4, 1024, True), ("on", 1, 1024, False), ("off", 4, 1_048_576, False),
    ):  # fmt: skip
        sizes = {"ranks": ranks, "max_model_len": longest}
        assert shards_index(caches, asked, dtype="fp8", **sizes) == expected
    dense = bundled_spec("minimax-m2").kv_caches()
    assert sharding_crossover(dense, dtype="fp8", ranks=4) == inf


def test_the_first_layers_keep_their_kinds() -> None:
    spec = bundled_spec("minimax-m3").first_layers(5)
    assert isinstance(spec, MiniMaxM3Spec) and spec.sparse is not None
    assert spec.num_layers == 5 and spec.moe_layers == (False,) * 3 + (True,) * 2
    assert spec.sparse.layers == spec.moe_layers
    assert len(spec.kv_caches()) == 5


def transformers_config() -> dict[str, Any]:
    kinds = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    mlps = ["dense"] * 3 + ["sparse"] * 57
    gone = (
        "attention_output_gate", "moe_layer_freq", "n_shared_experts", "num_mtp_modules",
        "partial_rotary_factor", "qk_norm_type", "rope_theta", "scoring_func",
        "sparse_attention_config", "use_gemma_norm", "use_qk_norm", "use_routing_bias",
    )  # fmt: skip
    rope = {"partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "rope_type": "default"}
    return text(
        **dict.fromkeys(gone, ...),
        architectures=["MiniMaxM3VLForCausalLM"],
        model_type="minimax_m3_vl_text",
        hidden_act="silu",
        layer_types=kinds,
        mlp_layer_types=mlps,
        rope_parameters=rope,
        index_block_size=128,
        index_head_dim=128,
        index_local_blocks=1,
        index_n_heads=4,
        index_topk_blocks=16,
        pad_token_id=None,
        use_cache=True,
    )


def test_what_transformers_saves_is_the_same_model() -> None:
    alone = read_spec(transformers_config())
    assert alone.notes == ()
    assert replace(alone, architecture=AROUND["architectures"][0]) == bundled_spec("minimax-m3")
    inner = {**transformers_config(), "architectures": ..., "dtype": ..., "bos_token_id": None}
    nested = {name: value for name, value in inner.items() if value is not ...}
    around = {**AROUND, "torch_dtype": "bfloat16", "bos_token_id": 200034, "text_config": nested}
    assert read_spec(around) == bundled_spec("minimax-m3")
    by_type = {name: value for name, value in around.items() if name != "architectures"}
    assert read_spec(by_type) == bundled_spec("minimax-m3")


def test_both_spellings_may_stand_side_by_side_and_must_agree() -> None:
    both = {**TEXT, **transformers_config(), "sparse_attention_config": SPARSE}
    assert read_spec(both).notes == ()
    for name, value in (
        ("index_topk_blocks", 8),
        ("index_n_heads", 2),
        ("index_local_blocks", 2),
        ("layer_types", ["full_attention"] * 60),
        ("mlp_layer_types", ["sparse"] * 60),
    ):
        with pytest.raises(ConfigError, match=rf"{name} is .*; supported: what .* says"):
            read_spec({**both, name: value})


def test_forced_blocks_in_tokens() -> None:
    """A token's own block counts as local; tokens before it may begin in another."""
    for tokens, blocks in ((0, 1), (1, 2), (128, 2), (129, 3)):
        given = sparse(
            sparse_init_block=..., sparse_local_block=..., sparse_init_tokens=tokens,
            sparse_local_tokens=tokens,
        )  # fmt: skip
        spec = read_spec(text(sparse_attention_config=given))
        assert isinstance(spec, MiniMaxM3Spec) and spec.sparse is not None
        assert (spec.sparse.init_blocks, spec.sparse.local_blocks) == (blocks - 1, blocks)
    left_out = sparse(sparse_init_block=..., sparse_local_block=...)
    assert read_spec(text(sparse_attention_config=left_out)) == read_spec(TEXT)


def test_models_without_sparse_layers_shared_experts_or_dense_layers() -> None:
    dense = {"use_sparse_attention": False, "sparse_attention_freq": [0] * 60}
    for given in (..., None, dense):
        spec = read_spec(text(sparse_attention_config=given))
        assert isinstance(spec, MiniMaxM3Spec) and spec.sparse is None
        assert choose_block_size(spec.kv_caches(), None, default=16) == 16
    for fields in ({"n_shared_experts": 0, "shared_intermediate_size": 0}, {"n_shared_experts": 0}):
        given = text(shared_intermediate_size=...) | fields
        assert read_spec(given).shared_width == 0  # type: ignore[attr-defined]
    spec = read_spec(text(moe_layer_freq=..., dense_intermediate_size=...))
    assert isinstance(spec, MiniMaxM3Spec) and all(spec.moe_layers) and spec.dense_width == 0
    assert read_spec(text(moe_layer_freq=..., first_k_dense_replace=3)) == read_spec(TEXT)


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("hidden_act", "gelu", "'swigluoai' or 'silu'"),
        ("use_gemma_norm", False, "True"),
        ("qk_norm_type", "per_layer", "per_head"),
        ("attention_output_gate", True, "False"),
        ("tie_word_embeddings", True, "False"),
        ("scoring_func", "softmax", "sigmoid"),
        ("swiglu_beta", 0.0, r"1\.0"),
        ("swiglu_limit", 0.0, "a finite number above 0"),
        ("swiglu_alpha", "1.7", "a number"),
        ("swiglu_alpha", 10**400, "a number that a float holds"),
        ("routed_scaling_factor", -1.0, "a finite number above 0"),
        ("n_shared_experts", 2, "0 or 1"),
        ("n_shared_experts", True, "0 or 1"),
        ("n_shared_experts", 0, "0"),
        ("shared_intermediate_size", -1, "an integer from 1"),
        ("moe_intermediate_size", 1536, "3072"),
        ("moe_layer_freq", [1] * 59, "60 entries"),
        ("moe_layer_freq", [2] * 60, "0 or 1"),
        ("moe_layer_freq", 1, "60 entries"),
        ("mlp_layer_types", ["dense"] * 60, "what moe_layer_freq says"),
        ("first_k_dense_replace", 2, "what moe_layer_freq says"),
        ("layer_types", ["sliding_attention"] * 60, "'full_attention' or 'minimax_m3_sparse'"),
        ("rotary_dim", 32, r"head_dim \* partial_rotary_factor = 128 \* 0\.5"),
        ("partial_rotary_factor", 1.0, r"128 \* 1\.0"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "'default'"),
        ("rope_scaling", {"rope_type": "default", "type": "yarn"}, "'default'"),
        ("num_experts_per_tok", 129, r"at most num_local_experts \(128\)"),
        ("rms_norm_eps", 0, "above 0"),
        ("rope_theta", 1, "a finite number above 1"),
        ("model_type", "minimax_m3_vl", "minimax_m3_vl_text"),
        ("sparse_attention_config", [1], "an object or null"),
    ],
)
def test_unsupported_value_is_refused_by_name(field: str, value: Any, supported: str) -> None:
    name = {"partial_rotary_factor": "rotary_dim", "n_shared_experts": "shared_"}.get(field, field)
    with pytest.raises(ConfigError, match=rf"{name}.* is .*; supported: .*{supported}"):
        read_spec(text(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("sparse_use_gate", True, "sparse_attention_freq, "),
        ("sparse_score_type", "mean", "'max'"),
        ("use_sparse_attention", False, "True"),
        ("sparse_attention_freq", [0] * 60, "what|False"),
        ("sparse_attention_freq", [1] * 59, "60 entries"),
        ("sparse_disable_index_value", [0] * 60, "1 in a sparse layer"),
        ("sparse_num_index_heads", 1, r"as many as num_key_value_heads \(4\)"),
        ("sparse_index_dim", 32, r"rotary_dim \(64\) or more"),
        ("sparse_block_size", 48, "16, 32, 64, 128"),
        ("sparse_local_block", 0, "1 or more"),
        ("sparse_local_block", 17, "an integer up to|at least"),
        ("sparse_init_block", 16, "at least the 16 first and 1 last"),
        ("sparse_init_block", -1, "an integer from 0"),
        ("sparse_init_tokens", 1, "what sparse_init_block says"),
        ("sparse_local_tokens", 1, "what sparse_local_block says"),
        ("sparse_topk_blocks", 0, "an integer from 1"),
        ("sparse_topk_blocks", 1025, "at most 1024"),
    ],
)
def test_unsupported_sparse_attention_is_refused_by_name(
    field: str, value: Any, supported: str
) -> None:
    name = {"sparse_init_block": "sparse_", "sparse_local_block": "sparse_"}.get(field, field)
    name = "use_sparse_attention" if supported == "what|False" else name
    with pytest.raises(ConfigError, match=rf"{name}.* is .*; supported: .*({supported})"):
        read_spec(text(sparse_attention_config=sparse(**{field: value})))


@pytest.mark.parametrize(
    "field",
    ["dense_intermediate_size", "num_local_experts", "routed_scaling_factor", "swiglu_alpha",
     "swiglu_limit", "shared_intermediate_size", "head_dim"],
)  # fmt: skip
def test_missing_size_is_not_guessed(field: str) -> None:
    with pytest.raises(ConfigError, match=f"no {field}"):
        read_spec(text(**{field: ...}))


@pytest.mark.parametrize("field", sorted(set(SPARSE) - {
    "use_sparse_attention", "sparse_score_type", "sparse_init_block", "sparse_local_block",
    "sparse_disable_index_value",
}))  # fmt: skip
def test_missing_size_of_sparse_attention_is_not_guessed(field: str) -> None:
    with pytest.raises(ConfigError, match=f"no {field}"):
        read_spec(text(sparse_attention_config=sparse(**{field: ...})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is None; supported: an object"),
        ({"text_config": text(architectures=["Other"])}, r"text_config\.architectures is"),
        ({"text_config": text(architectures=True)}, r"text_config\.architectures is True"),
        ({"text_config": text(architectures={"a": 1})}, r"text_config\.architectures is"),
        ({"text_config": text(model_type="llama")}, r"text_config\.model_type is 'llama'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ],
)
def test_what_surrounds_the_text_model_is_checked(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec({**AROUND, "text_config": TEXT, **changes})


def test_fields_never_heard_of_are_noted() -> None:
    spec = read_spec({**AROUND, "apple": 1, "text_config": text(zebra=2)})
    assert [note.rpartition(": ")[2] for note in spec.notes] == ["zebra", "apple"]


def test_quantisation_is_read_around_the_text_model_or_in_it(tmp_path: Path) -> None:
    said = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    outer = read_spec({**AROUND, "text_config": TEXT, "quantization_config": said})
    inner = read_spec({**AROUND, "text_config": text(quantization_config=said)})
    assert outer == inner and outer.quantization is not None
    assert outer.quantization.method == "mxfp8"
    (tmp_path / "hf_quant_config.json").write_text("{}")  # which has lower precedence than both
    for around in ({}, {"quantization_config": said}):
        inner = text(quantization_config=said)
        found = read_spec({**AROUND, **around, "text_config": inner}, tmp_path).quantization
        assert found is not None and found.source == "config.json"
