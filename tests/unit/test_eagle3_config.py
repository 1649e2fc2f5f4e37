import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.engine.core.source import ModelSource, locate
from negamax.models import registry
from negamax.models.dspark.config import DFLASH, DSPARK, FAMILIES
from negamax.models.eagle3.config import FAMILY, Eagle3Spec, read_spec
from negamax.models.memory import draft_bytes, weight_bytes
from negamax.models.registry import bundled_spec, find_bundled_draft
from negamax.options.engine import EngineOptions
from negamax.options.speculation import SpeculationConfig
from tests.tables import read_table
from tests.tiny_draft import as_speculators

# config.json of thoughtworks/MiniMax-M2.5-Eagle3, written by SpecForge
M2: dict[str, Any] = read_table("configs.minimax_m2.5_eagle3")
# config.json of Inferact/MiniMax-M3-EAGLE3, written by TorchSpec
M3 = M2 | {
    "architectures": ["Eagle3LlamaForCausalLM"], "hidden_size": 6144, "intermediate_size": 18432,
    "num_attention_heads": 64, "num_key_value_heads": 64, "fc_norm": True, "norm_output": True,
    "draft_vocab_size": 200064, "eagle_config": None,
}  # fmt: skip


def test_published_drafts_are_read() -> None:
    spec = read_spec(M2).adapt_to(bundled_spec("minimax-m2.5"), None)
    assert spec.aux_layers == (2, 31, 59) and spec.notes == ()
    assert replace(spec, aux_layers=()) == FAMILY.bundled["minimax-m2.5-eagle3"]
    # The model card states this size.
    assert weight_bytes(spec, dtype="bfloat16") == pytest.approx(486e6, rel=2e-3)
    # A rank of four holds a quarter of the draft, and a copy of the model's embedding.
    assert draft_bytes(spec, dtype="bfloat16", ranks=4) == pytest.approx(121.5e6 + 1229e6, rel=3e-3)
    # The last of several pipeline stages holds as much.
    alone = draft_bytes(spec, dtype="bfloat16", embeds=False)
    assert alone == pytest.approx(486e6 + 1229e6, rel=3e-3)
    spec = read_spec(M3).adapt_to(bundled_spec("minimax-m3"), None)
    assert spec.aux_layers == (2, 30, 57)
    own = replace(spec, own_embedding=True)
    assert replace(own, aux_layers=()) == FAMILY.bundled["minimax-m3-eagle3"]
    assert weight_bytes(own, dtype="bfloat16") == pytest.approx(6.53e9, rel=2e-3)
    (caches,) = spec.kv_caches()
    assert sum(one.heads * one.width * 2 for one in caches) == 32_768  # bytes per token


def test_fields_that_are_off_count_as_absent_and_unknown_ones_are_noted() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}
    assert read_spec(M2 | off | {"layer_types": [], "rope_scaling": {}}) == read_spec(M2)
    assert not read_spec(M2 | off).notes
    (note,) = read_spec(M2 | {"draft_color": "green"}).notes
    assert "draft_color" in note


@pytest.mark.parametrize("ids", [[1, 30, 58], [2, 31, 59], None, []])
def test_layers_are_named_by_their_outputs_or_inputs(ids: list[int] | None) -> None:
    config = M2 | {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": ids}
    target = bundled_spec("minimax-m2.5")
    assert read_spec(config).adapt_to(target, None).aux_layers == (2, 31, 59)
    assert read_spec(config).adapt_to(target, (1, 30, 62)).aux_layers == (1, 30, 62)


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return caught.value.message


CONFIG = as_speculators(M2, verifier="MiniMaxAI/MiniMax-M2.5", speculative_tokens=5)
LAYER, USE = "transformer_layer_config", "speculators_config"


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    *folders, name = path.split(".")
    inner = config
    for folder in folders:
        inner = inner[folder] if not folder.isdigit() else inner[int(folder)]
    inner[name] = value
    return dict(config)


REFUSED = read_table("eagle3_config.refused")
REFUSED_OF_SPECULATORS = read_table("eagle3_config.refused_of_speculators")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *((M2 | fields, words) for fields, words in REFUSED),
        *((changed(path, value), words) for path, value, words in REFUSED_OF_SPECULATORS),
    ],
)
def test_refuses_unsupported_values_by_name(config: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: read_spec(config))


def test_refuses_the_draft_of_another_model() -> None:
    for fields, layers, words in (
        ({"vocab_size": 32000}, None, "vocab_size is 32000; the model's is 200064"),
        ({"target_hidden_size": 6144}, None, "target_hidden_size is 6144; the model's is 3072"),
        ({}, (2, 31), "layers [2, 31] of the model; allowed: 3 ascending numbers up to 62"),
        ({}, (2, 31, 63), "reads layers [2, 31, 63]"),
    ):
        target = bundled_spec("minimax-m2.5")
        with pytest.raises(ConfigError) as caught:
            read_spec(M2 | fields).adapt_to(target, layers)
        assert words in caught.value.message
    spec = replace(read_spec(M2), aux_layers=())
    with pytest.raises(ConfigError, match="this target model has 6"):
        spec.adapt_to(bundled_spec("minimax-m2.5").first_layers(6), None)
    spec = spec.adapt_to(bundled_spec("minimax-m2.5").first_layers(7), None)
    assert spec.aux_layers == (2, 3, 4)


def options(
    draft: str, model: str = "minimax-m2.5", own: dict[str, Any] | None = None, **more: Any
) -> EngineOptions:
    speculative = {"method": "eagle3", "model": draft, **(own or {})}
    return EngineOptions(model=model, speculative_config=speculative, **more)


def test_a_draft_is_found_by_name_or_folder_and_serves_no_other_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(M2))
    for name in ("minimax-m2.5-eagle3", str(tmp_path)):
        draft = locate(options(name, load_format="synthetic")).draft
        assert draft is not None and draft.folder is None
        assert draft.spec.aux_layers == (2, 31, 59)
        assert isinstance(draft.spec, Eagle3Spec) and draft.spec.quantization is None
    for config in (M2, M3, CONFIG):
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
    assert "of type minimax_m3 (target_model_type), and the target is minimax_m2" in one
    (one,) = doubts({"target_num_hidden_layers": 61})
    assert "61 layers (target_num_hidden_layers), and the target has 62" in one
    short = {"max_position_embeddings": 2048}
    assert doubts(short, length=2048) == []
    (one,) = doubts(short, length=2049)
    assert "trained for 2048 tokens (max_position_embeddings), but sequences may have 2049" in one


# --- speculators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [M2, M3])
def test_it_reads_as_the_same_draft_in_other_configs(published: dict[str, Any]) -> None:
    config = as_speculators(published, verifier="MiniMaxAI/X", speculative_tokens=5)
    spec = read_spec(json.loads(json.dumps(config)))
    assert (spec.speculative_tokens, spec.verifier, spec.notes) == (5, "MiniMaxAI/X", ())
    assert replace(spec, speculative_tokens=None, verifier=None) == read_spec(published)


def test_layers_are_named_by_their_inputs_and_some_fields_may_be_absent() -> None:
    for ids in ([1, 30, 58], [0, 3, 62], [5, 6, 7]):
        config = CONFIG | {"eagle_aux_hidden_state_layer_ids": ids}
        assert read_spec(config).aux_layers == tuple(ids)
    unnamed = read_spec(CONFIG | {"eagle_aux_hidden_state_layer_ids": None})
    assert unnamed.adapt_to(bundled_spec("minimax-m2.5"), None).aux_layers == (2, 31, 59)
    layer = {name: value for name, value in CONFIG[LAYER].items() if name != "rms_norm_eps"}
    config = CONFIG | {LAYER: layer | {"torch_dtype": "float16"}, USE: None, "torch_dtype": None}
    spec = read_spec(config | {"architectures": ["Eagle3DraftModel"], "dtype": None})
    assert (spec.speculative_tokens, spec.verifier, spec.dtype) == (None, None, "float16")
    use = CONFIG[USE] | {"verifier": {"name_or_path": None}, "default_proposal_method": None}
    assert read_spec(CONFIG | {USE: use}).speculative_tokens == 5


def test_refuses_a_tree_of_drafts_and_names_acceptance_by_rank() -> None:
    method = CONFIG[USE]["proposal_methods"][0] | {"verifier_accept_k": 5}
    (note,) = read_spec(CONFIG | {USE: CONFIG[USE] | {"proposal_methods": [method]}}).notes
    assert "verifier_accept_k of the draft is 5 and has no effect" in note
    kinds = {"greedy": 3, "static_tree": 60}
    methods = [{"proposal_type": kind, "speculative_tokens": kinds[kind]} for kind in kinds]
    use = CONFIG[USE] | {"default_proposal_method": "static_tree", "proposal_methods": methods}
    with pytest.raises(ConfigError, match="proposal_type is 'static_tree'; supported: 'greedy'"):
        read_spec(CONFIG | {USE: use})
    chosen = use | {"default_proposal_method": "greedy"}
    assert read_spec(CONFIG | {USE: chosen}).speculative_tokens == 3


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., ModelSource]:
    def located(config: dict[str, Any], model: str = "minimax-m2.5", **fields: Any) -> ModelSource:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return locate(options(str(tmp_path), model, fields, load_format="synthetic"))

    return located


def test_options_replace_the_draft_length_of_files(found: Callable[..., ModelSource]) -> None:
    def length(config: dict[str, Any], **fields: Any) -> int:
        speculation = found(config, **fields).speculation
        assert speculation is not None
        return speculation.num_speculative_tokens

    assert length(CONFIG) == 5
    assert length(CONFIG, num_speculative_tokens=2) == 2
    assert length(CONFIG, num_draft_tokens=3) == 2  # SGLang also counts the token before.
    assert length(M2) == 3
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert length(CONFIG, **synthetic) == 3
    long = changed(f"{USE}.proposal_methods.0.speculative_tokens", 16)
    assert length(long, num_speculative_tokens=15) == 15
    with pytest.raises(ConfigError, match="speculative_tokens to 16; allowed: 1 to 15") as caught:
        found(long)
    assert "override it: " in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("target_hidden_size", 4096, "target_hidden_size is 4096; the model's is 3072"),
        (f"{LAYER}.vocab_size", 151936, "vocab_size is 151936; the model's is 200064"),
        ("eagle_aux_hidden_state_layer_ids", [2, 31, 63], "reads layers [2, 31, 63]"),
        ("eagle_aux_hidden_state_layer_ids", [31, 2, 59], "[31, 2, 59]; supported: a list of"),
    ],
)
def test_refuses_speculators_of_another_model(
    found: Callable[..., ModelSource], path: str, value: Any, words: str
) -> None:
    message = refused(lambda: found(changed(path, value)))
    assert words in message and message.startswith("draft ")


def test_a_draft_alone_stands_for_its_verifier(tmp_path: Path) -> None:
    nano = {
        "vocab_size": 4160, "hidden_size": 256, "intermediate_size": 384, "draft_vocab_size": 1024
    }  # fmt: skip
    config = as_speculators(M2 | nano, verifier="nano", speculative_tokens=4)
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]

    def of(config: dict[str, Any], **options: Any) -> ModelSource:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return locate(EngineOptions(model=str(tmp_path), load_format="synthetic", **options))

    source = of(config)
    assert source.name == "nano" and source.spec.num_layers == 5
    assert source.speculation is not None and source.speculation.num_speculative_tokens == 4
    assert source.draft is not None and source.draft.spec.aux_layers == (2, 3, 5)
    # Explicit options override the settings of the files.
    with pytest.raises(ConfigError, match="is a draft model: it proposes") as caught:
        of(config, speculative_config={"method": "ngram"})
    assert "serve nano, and set this draft in --speculative-config" in str(caught.value)
    itself = str(tmp_path)
    for verifier, words in (
        (None, "is a draft model"),
        ("no/such/model", "^draft .*: model 'no/such/model' is neither"),
        (itself, f"^draft {itself}: a model of .* is a draft model"),
    ):
        with pytest.raises(ConfigError, match=words):
            of(as_speculators(M2 | nano, verifier=verifier))


# --- options -------------------------------------------------------------------------------------


EAGLE3 = {"method": "eagle3", "model": "folder"}
NGRAM = {"method": "ngram"}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}


def read(fields: dict[str, Any]) -> SpeculationConfig:
    return SpeculationConfig.read(fields, tensor_parallel_size=4)


def test_configs_of_vllm_and_sglang_users() -> None:
    found = read({**EAGLE3, "num_speculative_tokens": 5, "draft_tensor_parallel_size": 4})
    assert found == SpeculationConfig("eagle3", 5, model="folder")
    assert read({**NGRAM, "num_speculative_tokens": None}).num_speculative_tokens == 3
    assert msgspec.convert(msgspec.to_builtins(found), type=SpeculationConfig) == found
    assert read({**EAGLE3, "num_draft_tokens": 4}).num_speculative_tokens == 3
    both = {**EAGLE3, "num_draft_tokens": 64, "num_speculative_tokens": 5}
    assert read(both).num_speculative_tokens == 5
    notes = read({**EAGLE3, "enforce_eager": True, "attention_backend": "FLASH_ATTN"}).notes
    assert [note.split(" has no effect: ")[0].split()[-1] for note in notes] == [
        "enforce_eager", "attention_backend"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "method"), read_table("eagle3_config.method_by_name_and_by_model")
)
def test_method_by_name_and_by_model(fields: dict[str, Any], method: str) -> None:
    assert read(fields).method == method


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [({}, 5, 5), ({"min": 2}, 2, 2), ({"max": 4}, 4, 4), ({"min": 2, "max": 4}, 2, 4)],
)
def test_one_lookup_length_sets_both(given: dict[str, int], low: int, high: int) -> None:
    found = read({**NGRAM, **{f"prompt_lookup_{key}": value for key, value in given.items()}})
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (low, high)


@pytest.mark.parametrize(
    ("length", "rates"), [(1, (0, 0, 0)), (1.25, (0.25, 0, 0)), (2.5, (1, 0.5, 0)), (4, (1, 1, 1))]
)
def test_schedule_of_a_synthetic_length(length: float, rates: tuple[float, ...]) -> None:
    found = read({**SYNTHETIC, "synthetic_acceptance_length": length})
    assert found.synthetic_acceptance_rates == rates
    assert found.synthetic_acceptance_length == length


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "medusa"}, "method is 'medusa'; allowed: eagle3, dspark, dflash"),
        ({}, "has no method"),
        ({"num_speculative_tokens": 3}, "has no method"),
        ({"method": "eagle3"}, "has method eagle3 and no model"),
        ({"method": "DFLASH"}, "has method dflash and no model"),
        ({**EAGLE3, "model": 3}, "model is 3; allowed: a non-empty string"),
        ({**NGRAM, "num_speculative_tokens": 16}, "is 16; allowed: a whole number, 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "num_draft_tokens": 64}, "num_draft_tokens is 64; allowed: at most 16"),
        ({**NGRAM, "promt_lookup_max": 3}, "did you mean prompt_lookup_max?"),
        ({**EAGLE3, "prompt_lookup_max": 3}, "prompt_lookup_max, which is for method ngram"),
        ({**NGRAM, "revision": "main"}, "revision, which is for draft models"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "at most prompt_lookup_max"),
        ({**EAGLE3, "draft_tensor_parallel_size": 2}, "allowed: 1, or 4, the size of"),
        ({**EAGLE3, "adaptive": "no"}, "adaptive is 'no'; allowed: true or false"),
        ({**EAGLE3, "eagle_aux_hidden_state_layer_ids": [3, 1]}, "in ascending order"),
        ({**EAGLE3, "draft_lm_head_quantization": "int4"}, "'int4'; allowed: fp8"),
        ({**EAGLE3, "draft_sample_method": "top"}, "'top'; allowed: greedy, probabilistic"),
        ({**NGRAM, "rejection_sample_method": "fly"}, "rejection_sample_method is 'fly'"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, 'add "rejection_sample_method": "synthetic"'),
        (SYNTHETIC, "synthetic_acceptance_length and synthetic_acceptance_rates; 0 are given"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, "allowed: 1 to 4"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5, 0.6]}, "in descending order"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5]}, "3 numbers from 1 to 0"),
        ('{"method": "ngram"}', "allowed: a JSON object"),
    ],
)  # fmt: skip
def test_refusals_name_value_limit_and_remedy(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineOptions("nano", speculative_config=fields, tensor_parallel_size=4)
    assert words in str(refused.value)


PUBLISHED = find_bundled_draft("minimax-m3.1-dspark")
COMMON, OWN, M31, FLASH, TARGET = read_table("configs.dspark")
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
def found_draft(tmp_path: Path) -> Callable[..., ModelSource]:
    def located(config: dict[str, Any], **fields: Any) -> ModelSource:
        (tmp_path / "config.json").write_text(json.dumps(config))
        speculative = {"model": str(tmp_path), **fields}
        options: dict[str, Any] = {"load_format": "synthetic", "speculative_config": speculative}
        return locate(EngineOptions("minimax-m3.1-flash", **options))

    return located


def test_the_draft_decides_method_and_length(found_draft: Callable[..., ModelSource]) -> None:
    for config, method, length in ((M31, "dspark", 7), (FLASH, "dflash", 7)):
        for fields in ({}, {"method": method.upper()}):
            speculation = found_draft(config, **fields).speculation
            assert speculation is not None
            assert (speculation.method, speculation.num_speculative_tokens) == (method, length)
    for fields, words in (
        ({"method": "eagle3"}, "method is eagle3, but the draft .* method dspark"),
        ({"num_speculative_tokens": 8}, "is 8; the draft proposes at most 7 per step"),
        ({"draft_lm_head_quantization": "fp8"}, "is valid for method eagle3 only"),
    ):
        with pytest.raises(ConfigError, match=words):
            found_draft(M31, **fields)
    with pytest.raises(ConfigError, match="the model's is 6144"):
        found_draft(FLASH | {"target_hidden_size": 3072})


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
