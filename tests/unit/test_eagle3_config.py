import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.engine.core.source import locate
from negamax.models import registry
from negamax.models.eagle3.config import FAMILY, Eagle3Spec, read_spec
from negamax.models.memory import draft_bytes, weight_bytes
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions

# thoughtworks/MiniMax-M2.5-Eagle3, as SpecForge writes it
M2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 200064,
    "draft_vocab_size": 32000, "hidden_size": 3072, "num_hidden_layers": 1, "head_dim": 128,
    "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192,
    "max_position_embeddings": 196608, "rope_theta": 5000000, "rope_scaling": None,
    "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "pretraining_tp": 1, "torch_dtype": "bfloat16",
    "bos_token_id": 200034, "eos_token_id": 200020, "initializer_range": 0.02, "use_cache": True,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 30, 58], "use_aux_hidden_state": True,
    },
}  # fmt: skip
# Inferact/MiniMax-M3-EAGLE3, by TorchSpec
M3 = M2 | {
    "architectures": ["Eagle3LlamaForCausalLM"], "hidden_size": 6144, "intermediate_size": 18432,
    "num_attention_heads": 64, "num_key_value_heads": 64, "fc_norm": True, "norm_output": True,
    "draft_vocab_size": 200064, "eagle_config": None,
}  # fmt: skip


def test_published_drafts_are_read() -> None:
    spec = read_spec(M2).adapt_to(bundled_spec("minimax-m2.5"), None)
    assert spec.aux_layers == (2, 31, 59) and spec.notes == ()
    assert replace(spec, aux_layers=()) == FAMILY.bundled["minimax-m2.5-eagle3"]
    # as its model card states
    assert weight_bytes(spec, dtype="bfloat16") == pytest.approx(486e6, rel=2e-3)
    # on four ranks: a quarter, and a copy of the model's embedding
    assert draft_bytes(spec, dtype="bfloat16", ranks=4) == pytest.approx(121.5e6 + 1229e6, rel=3e-3)
    # the same on the last of several pipeline stages
    alone = draft_bytes(spec, dtype="bfloat16", embeds=False)
    assert alone == pytest.approx(486e6 + 1229e6, rel=3e-3)
    spec = read_spec(M3).adapt_to(bundled_spec("minimax-m3"), None)
    assert spec.aux_layers == (2, 30, 57)
    own = replace(spec, own_embedding=True)
    assert replace(own, aux_layers=()) == FAMILY.bundled["minimax-m3-eagle3"]
    assert weight_bytes(own, dtype="bfloat16") == pytest.approx(6.53e9, rel=2e-3)
    (caches,) = spec.kv_caches()
    assert sum(one.heads * one.width * 2 for one in caches) == 32_768  # bytes per token


@pytest.mark.parametrize("ids", [[1, 30, 58], [2, 31, 59], None])
def test_layers_are_named_by_their_outputs_or_inputs(ids: list[int] | None) -> None:
    config = M2 | {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": ids}
    target = bundled_spec("minimax-m2.5")
    assert read_spec(config).adapt_to(target, None).aux_layers == (2, 31, 59)
    assert read_spec(config).adapt_to(target, (1, 30, 62)).aux_layers == (1, 30, 62)


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return caught.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"sliding_window": 512}, "sliding_window is 512"),
        ({"layer_types": ["sliding_attention"]}, "layer_types[0] is 'sliding_attention'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"rms_norm_eps": 1e-5}}, "rms_norm_eps is 1e-06"),
        ({"fc_norm": "yes"}, "fc_norm is 'yes'"),
        ({"draft_vocab_size": 300000}, "draft_vocab_size is 300000; supported: at most 200064"),
        ({"parallel_drafting": True}, "parallel_drafting is True"),
        ({"num_aux_hidden_states": 5}, "[2, 31, 59]; supported: 5 layers"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}}, "begin with 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 2}}, "layer_ids is 2; supported: a"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 58]}}, "a list of layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "a list of layers"),
        ({"rope_theta": None, "rope_parameters": {"partial_rotary_factor": 0.5}}, "head_dim (128)"),
        ({"target_model_type": [1]}, "target_model_type"),
        ({"target_num_hidden_layers": [1]}, "target_num_hidden_layers"),
    ],
)
def test_refuses_unsupported_values_by_name(fields: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: read_spec(M2 | fields))


def test_unknown_fields_are_noted() -> None:
    (note,) = read_spec(M2 | {"draft_color": "green"}).notes
    assert "draft_color" in note


@pytest.mark.parametrize(
    ("fields", "layers", "words"),
    [
        ({"vocab_size": 32000}, None, "vocab_size is 32000; the model's is 200064"),
        ({"target_hidden_size": 6144}, None, "target_hidden_size is 6144; the model's is 3072"),
        ({}, (2, 31), "reads layers [2, 31]; allowed: 3 in ascending order, up to 62"),
        ({}, (2, 31, 63), "reads layers [2, 31, 63]"),
    ],
)
def test_refuses_the_draft_of_another_model(
    fields: dict[str, Any], layers: tuple[int, ...] | None, words: str
) -> None:
    target = bundled_spec("minimax-m2.5")
    assert words in refused(lambda: read_spec(M2 | fields).adapt_to(target, layers))


def test_a_shallow_target_has_no_usual_layers() -> None:
    spec = replace(read_spec(M2), aux_layers=())
    with pytest.raises(ConfigError, match="the target has 6"):
        spec.adapt_to(bundled_spec("minimax-m2.5").first_layers(6), None)
    spec = spec.adapt_to(bundled_spec("minimax-m2.5").first_layers(7), None)
    assert spec.aux_layers == (2, 3, 4)


def options(
    draft: str, model: str = "minimax-m2.5", own: dict[str, Any] | None = None, **more: Any
) -> EngineOptions:
    speculative = {"method": "eagle3", "model": draft, **(own or {})}
    return EngineOptions(model=model, speculative_config=speculative, **more)


def test_a_draft_is_found_by_its_bundled_name_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(M2))
    for name in ("minimax-m2.5-eagle3", str(tmp_path)):
        draft = locate(options(name, load_format="synthetic")).draft
        assert draft is not None and draft.folder is None
        assert draft.spec.aux_layers == (2, 31, 59)
        assert isinstance(draft.spec, Eagle3Spec) and draft.spec.quantization is None


def test_refuses_a_draft_as_the_model_to_serve_or_as_that_of_another_model() -> None:
    for config in (M2, M3):
        with pytest.raises(ConfigError, match="is a draft model: it proposes tokens for another"):
            registry.read_spec(config)
    with pytest.raises(ConfigError, match="target_hidden_size is 6144; the model's is 3072"):
        locate(options("minimax-m3-eagle3", load_format="synthetic"))


def test_the_head_alone_may_be_fp8() -> None:
    sizes = []
    for head in (None, "fp8"):
        own = {"draft_lm_head_quantization": head}
        given = options("minimax-m3-eagle3", "minimax-m3", own, load_format="synthetic")
        draft = locate(given).draft
        assert draft is not None
        sizes.append(draft_bytes(draft.spec, dtype="bfloat16", ranks=4))
    assert sizes[0] - sizes[1] == pytest.approx(200_064 * 6144 / 4, rel=1e-3)


TYPES = {"minimax-m2.5": ["minimax_m2"], "minimax-m3": ["minimax_m3_vl", "minimax_m3"]}


def doubts(config: dict[str, Any], target: str = "minimax-m2.5", length: int = 1000) -> list[str]:
    spec = read_spec(M2 | config)
    return list(spec.doubts(bundled_spec(target), target_types=TYPES[target], max_model_len=length))


def test_a_draft_of_another_model_or_for_shorter_texts_is_doubted() -> None:
    own = {"target_model_type": "minimax_m2", "target_num_hidden_layers": 62}
    assert doubts({}) == doubts(own) == doubts({"target_model_type": None}) == []
    assert doubts({"target_model_type": "minimax_m3"}, "minimax-m3") == []
    (one,) = doubts({"target_model_type": "minimax_m3"})
    assert "is minimax_m3 (target_model_type), and this one is minimax_m2" in one
    (one,) = doubts({"target_num_hidden_layers": 61})
    assert "61 layers (target_num_hidden_layers), and this one has 62" in one
    short = {"max_position_embeddings": 2048}
    assert doubts(short, length=2048) == []
    (one,) = doubts(short, length=2049)
    assert "made for 2048 tokens (max_position_embeddings), and sequences may have 2049" in one
