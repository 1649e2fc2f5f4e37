"""MiniMax-M3's config, of MiniMax and of transformers, of the vision-language class and of the text
class: read alike, and refused by name where it asks for what there is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.config.families import bundled_spec, read_spec
from negamax.config.kv_cache import block_bytes, choose_block_size
from negamax.config.minimax_m3 import MiniMaxM3Spec
from negamax.models.family import names_of

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
# The fields of MiniMax-M3's own config.json.
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
    assert sum(w.num_elements for w in names_of(spec).weights(spec)) == 426_174_572_928
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
    assert choose_block_size(caches, None, default=16) == 128
    assert choose_block_size(caches, 256, default=16) == 256
    with pytest.raises(ConfigError, match="need a multiple of 128"):
        choose_block_size(caches, 64, default=16)


def test_the_first_layers_keep_their_kinds() -> None:
    spec = bundled_spec("minimax-m3").first_layers(5)
    assert isinstance(spec, MiniMaxM3Spec) and spec.sparse is not None
    assert spec.num_layers == 5 and spec.moe_layers == (False,) * 3 + (True,) * 2
    assert spec.sparse.layers == spec.moe_layers
    assert len(spec.kv_caches()) == 5
