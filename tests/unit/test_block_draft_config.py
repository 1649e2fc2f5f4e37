import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.engine.core.source import ModelSource, locate
from negamax.models import registry
from negamax.models.dspark.config import DFLASH, DSPARK, FAMILIES
from negamax.models.memory import draft_bytes, weight_bytes
from negamax.models.registry import bundled_spec, find_bundled_draft
from negamax.options.engine import EngineOptions

PUBLISHED = find_bundled_draft("minimax-m3.1-dspark")
COMMON, OWN, M31, FLASH, TARGET = json.loads("""[
{
    "vocab_size": 200064, "hidden_size": 6144, "num_hidden_layers": 5, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"
}, {
    "dspark_block_size": 7, "dspark_noise_token_id": 200058, "dspark_markov_rank": 256,
    "dspark_target_layer_ids": [3, 17, 31, 45, 59], "dspark_ffn_hidden_size": 12288,
    "dspark_hybrid_context_fusion": false, "dspark_markov_head_type": "vanilla",
    "dspark_use_dense_ffn": true, "enable_confidence_head": true,
    "confidence_head_with_markov": true
}, {
    "architectures": ["DSparkMiniMaxDraftModel"], "hidden_act": "swigluoai", "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "sliding_window": 4096, "use_gemma_norm": true,
    "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
}, {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu",
    "intermediate_size": 12288, "block_size": 8, "num_target_layers": 60,
    "dflash_config": {"mask_token_id": 200058, "target_layer_ids": [1, 30, 58]}
}, {
    "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3",
    "num_hidden_layers": 60, "intermediate_size": 3072, "num_local_experts": 128,
    "num_experts_per_tok": 4, "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "shared_intermediate_size": 3072
}]""")
SLIDING = ["sliding_attention"] * 5
M31, FLASH = COMMON | OWN | M31 | {"layer_types": SLIDING}, COMMON | FLASH


def test_the_published_draft_is_read() -> None:
    assert PUBLISHED is not None
    spec = FAMILIES[DSPARK].read_spec(M31)
    assert spec == PUBLISHED and spec.notes == ()
    around = ("architectures", "quantization_config")
    text = {name: value for name, value in M31.items() if name not in around}
    text |= {"dense_intermediate_size": 12288, "moe_layer_freq": [0] * 5, "dspark_config": {}}
    nested = {name: M31[name] for name in around} | {"text_config": text}
    assert FAMILIES[DSPARK].read_spec(nested) == PUBLISHED
    assert spec.confidence_width == 6400
    for fields, width in (({}, 6144), ({"enable_confidence_head": False}, 0)):
        own = M31 | {"confidence_head_with_markov": False, **fields}
        assert FAMILIES[DSPARK].read_spec(own) == replace(spec, confidence_width=width)
    assert PUBLISHED.adapt_to(bundled_spec("minimax-m3.1-flash"), None) == PUBLISHED
    assert weight_bytes(PUBLISHED, dtype="bfloat16") == pytest.approx(2.302e9, rel=1e-3)
    per_token = sum(one.heads * one.width * 2 for caches in spec.kv_caches() for one in caches)
    assert per_token == 10_240
    # A rank holds a quarter of all weights, except norms and one Markov matrix, which are whole.
    # The embedding is split.
    four = draft_bytes(PUBLISHED, dtype="bfloat16", ranks=4)
    assert four == pytest.approx((2.302e9 + 3 * 102.4e6) / 4, rel=1e-2)


def test_a_dflash_draft_is_read() -> None:
    spec: Any = FAMILIES[DFLASH].read_spec(FLASH)
    assert (spec.most_tokens, spec.aux_layers, spec.windows) == (7, (2, 31, 59), (0,) * 5)
    assert not spec.samples_anchor and not spec.markov_rank and not spec.is_gemma
    spec = FAMILIES[DFLASH].read_spec(FLASH | {"swa_window_size": 64, "causal": True})
    assert spec.windows == (64,) * 5 and spec.is_causal


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("dspark", {"dspark_markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ("dspark", {"dspark_hybrid_context_fusion": True}, "hybrid_context_fusion is True"),
        ("dspark", {"sparse_attention_config": {"a": 1}}, "sparse_attention_config is {'a': 1}"),
        ("dspark", {"moe_layer_freq": [0, 0, 0, 0, 1]}, "moe_layer_freq[4] is 1"),
        ("dspark", {"dspark_config": {"hybrid_context_fusion": True}}, "hybrid_context_fusion is"),
        ("dspark", {"dspark_new": 1}, "dspark_new is 1; supported: configs without"),
        ("dspark", {"dspark_block_size": 17}, "block_size is 17; supported: 2 to 16"),
        ("dspark", {"dspark_noise_token_id": 200064}, "mask_token_id is 200064"),
        ("dspark", {"dspark_target_layer_ids": [5, 3]}, "target_layer_ids is [5, 3]"),
        (
            "dspark",
            {"layer_types": ["linear_attention"] * 5},
            "layer_types[0] is 'linear_attention'",
        ),
        ("dspark", {"layer_types": ["full_attention"]}, "5 entries, one per layer"),
        ("dspark", {"sliding_window": 4}, "sliding_window is 4; supported: block_size (7) or more"),
        ("dspark", {"draft_vocab_size": 32000}, "draft_vocab_size is 32000"),
        ("dspark", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("dspark", {"dspark_markov_rank": None}, "no markov_rank"),
        ("dspark", {"enable_confidence_head": "gated"}, "enable_confidence_head is 'gated'"),
        ("dspark", {"confidence_head_with_markov": 2}, "confidence_head_with_markov is 2"),
        ("dspark", {"dspark_confidence_head_type": "mlp"}, "dspark_confidence_head_type is 'mlp'"),
        ("dflash", {"markov_rank": 8}, "markov_rank is 8; supported: 0"),
        ("dflash", {"projector_type": "dspark"}, "projector_type is 'dspark'"),
        ("dflash", {"selector_rank": 256}, "selector_rank is 256; supported: null"),
        (
            "dflash",
            {"architectures": ["DFlash2DraftModel"]},
            "architectures is ['DFlash2DraftModel']",
        ),
    ],
    ids=str,
)
def test_refuses_what_it_does_not_compute(method: str, changes: dict[str, Any], words: str) -> None:
    architecture, config = {"dspark": (DSPARK, M31), "dflash": (DFLASH, FLASH)}[method]
    with pytest.raises(ConfigError) as caught:
        FAMILIES[architecture].read_spec(config | changes)
    assert words in caught.value.message


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., ModelSource]:
    def located(config: dict[str, Any], **fields: Any) -> ModelSource:
        (tmp_path / "config.json").write_text(json.dumps(config))
        speculative = {"model": str(tmp_path), **fields}
        options: dict[str, Any] = {"load_format": "synthetic", "speculative_config": speculative}
        return locate(EngineOptions("minimax-m3.1-flash", **options))

    return located


def test_the_draft_decides_method_and_length(found: Callable[..., ModelSource]) -> None:
    for config, method, length in ((M31, "dspark", 7), (FLASH, "dflash", 7)):
        for fields in ({}, {"method": method.upper()}):
            speculation = found(config, **fields).speculation
            assert speculation is not None
            assert (speculation.method, speculation.num_speculative_tokens) == (method, length)
    for fields, words in (
        ({"method": "eagle3"}, "is for method dspark, but the method is eagle3"),
        ({"num_speculative_tokens": 8}, "is 8; the draft proposes 7 tokens at once"),
        ({"draft_lm_head_quantization": "fp8"}, "is valid for method eagle3 only"),
    ):
        with pytest.raises(ConfigError, match=words):
            found(M31, **fields)
    with pytest.raises(ConfigError, match="the model's is 6144"):
        found(FLASH | {"target_hidden_size": 3072})


def save_target(folder: Path, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps(COMMON | TARGET | more))


def test_a_draft_beside_its_model_is_found(tmp_path: Path) -> None:
    def draft(**fields: Any) -> Any:
        config = {"method": "dspark", **fields}
        options = EngineOptions(str(tmp_path), load_format="synthetic", speculative_config=config)
        source = locate(options)
        assert source.draft is not None
        return source.draft.spec

    save_target(tmp_path)
    with pytest.raises(ConfigError, match="has no folder dspark/"):
        draft()
    # The draft's tensors are among the target's own tensors.
    layers = {"dspark_num_hidden_layers": 5, "dspark_layer_types": SLIDING}
    save_target(tmp_path, **OWN, **layers, dspark_sliding_window=4096)
    assert replace(draft(), quantization=PUBLISHED and PUBLISHED.quantization) == PUBLISHED
    (tmp_path / "dspark").mkdir()
    (tmp_path / "dspark" / "config.json").write_text(json.dumps(M31 | {"sliding_window": 128}))
    assert draft().windows == draft(model=str(tmp_path)).windows == (128,) * 5
    with pytest.raises(ConfigError, match="DSparkMiniMaxDraftModel is a draft model"):
        registry.read_spec(M31)
