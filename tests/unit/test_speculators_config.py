import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_eagle3_config import M2, M3, options, refused

from negamax.base.errors import ConfigError
from negamax.engine.core.source import ModelSource, locate
from negamax.models import registry
from negamax.models.eagle3.config import read_spec
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from tests.tiny_draft import as_speculators

CONFIG = as_speculators(M2, verifier="MiniMaxAI/MiniMax-M2.5", speculative_tokens=5)
LAYER, USE = "transformer_layer_config", "speculators_config"


@pytest.mark.parametrize("published", [M2, M3])
def test_it_reads_as_the_same_draft_in_other_configs(published: dict[str, Any]) -> None:
    config = as_speculators(published, verifier="MiniMaxAI/X", speculative_tokens=5)
    spec = read_spec(json.loads(json.dumps(config)))
    assert (spec.speculative_tokens, spec.verifier, spec.notes) == (5, "MiniMaxAI/X", ())
    assert replace(spec, speculative_tokens=None, verifier=None) == read_spec(published)


def test_layers_are_named_by_their_inputs() -> None:
    for ids in ([1, 30, 58], [0, 3, 62], [5, 6, 7]):
        config = CONFIG | {"eagle_aux_hidden_state_layer_ids": ids}
        assert read_spec(config).aux_layers == tuple(ids)
    unnamed = read_spec(CONFIG | {"eagle_aux_hidden_state_layer_ids": None})
    assert unnamed.adapt_to(bundled_spec("minimax-m2.5"), None).aux_layers == (2, 31, 59)


def test_some_fields_may_be_absent() -> None:
    layer = {name: value for name, value in CONFIG[LAYER].items() if name != "rms_norm_eps"}
    config = CONFIG | {LAYER: layer | {"torch_dtype": "float16"}, USE: None, "torch_dtype": None}
    spec = read_spec(config | {"architectures": ["Eagle3DraftModel"], "dtype": None})
    assert (spec.speculative_tokens, spec.verifier, spec.dtype) == (None, None, "float16")
    use = CONFIG[USE] | {"verifier": {"name_or_path": None}, "default_proposal_method": None}
    assert read_spec(CONFIG | {USE: use}).speculative_tokens == 5


def test_refuses_a_draft_as_the_model_to_serve() -> None:
    assert "'eagle3' is a draft model: it proposes" in refused(lambda: registry.read_spec(CONFIG))


def test_acceptance_by_rank_has_no_effect_and_is_named() -> None:
    method = CONFIG[USE]["proposal_methods"][0] | {"verifier_accept_k": 5}
    (note,) = read_spec(CONFIG | {USE: CONFIG[USE] | {"proposal_methods": [method]}}).notes
    assert "verifier_accept_k of the draft is 5 and has no effect" in note


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    *folders, name = path.split(".")
    inner = config
    for folder in folders:
        inner = inner[folder] if not folder.isdigit() else inner[int(folder)]
    inner[name] = value
    return dict(config)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculators_model_type", "dflash", "speculators_model_type is 'dflash'; supported"),
        ("architectures", ["EagleSpeculator"], "architectures is ['EagleSpeculator']"),
        (LAYER, None, "transformer_layer_config is None; supported: an object"),
        (f"{LAYER}.model_type", "qwen3", "model_type is 'qwen3'"),
        (f"{LAYER}.hidden_size", None, "no hidden_size"),
        (f"{LAYER}.vocab_size", None, "no vocab_size"),
        (f"{LAYER}.rope_scaling", {"rope_type": "llama3"}, "rope_type is 'llama3'"),
        (f"{LAYER}.tie_word_embeddings", True, "tie_word_embeddings is True"),
        (f"{LAYER}.draft_vocab_size", 64000, "draft_vocab_size is 32000; supported: the value in"),
        ("draft_vocab_size", None, "has no draft_vocab_size"),
        ("draft_vocab_size", 300000, "draft_vocab_size is 300000; supported: at most 200064"),
        ("norm_before_residual", None, "has no norm_before_residual"),
        ("norm_before_residual", 1.5, "norm_before_residual is 1.5; supported: true or false"),
        ("eagle_aux_hidden_state_layer_ids", [2, "x"], "eagle_aux_hidden_state_layer_ids is"),
        ("eagle_aux_hidden_state_layer_ids", [2, 2, 9], "is [2, 2, 9]; supported: a list of"),
        (USE, [], "speculators_config is []; supported: an object or null"),
        (f"{USE}.algorithm", "dflash", "speculators_config.algorithm is 'dflash'"),
        (f"{USE}.verifier", "M2.5", "speculators_config.verifier is 'M2.5'"),
        (f"{USE}.verifier.name_or_path", 7, "verifier.name_or_path is 7"),
        (f"{USE}.proposal_methods", [], "proposal_methods is []; supported: a list"),
        (f"{USE}.proposal_methods", ["greedy"], "proposal_methods is ['greedy']"),
        (f"{USE}.default_proposal_method", "tree", "default_proposal_method is 'tree'; supported"),
        (f"{USE}.proposal_methods.0.speculative_tokens", None, "no speculative_tokens"),
        (f"{USE}.proposal_methods.0.speculative_tokens", 0, "speculative_tokens is 0"),
    ],
)
def test_refuses_unsupported_values_by_name(path: str, value: Any, words: str) -> None:
    assert words in refused(lambda: read_spec(changed(path, value)))


def test_refuses_a_tree_of_drafts() -> None:
    use = CONFIG[USE] | {
        "default_proposal_method": "static_tree",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3},
            {"proposal_type": "static_tree", "speculative_tokens": 60},
        ],
    }
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


def test_the_draft_length_is_that_of_the_files_unless_options_set_it(
    found: Callable[..., ModelSource],
) -> None:
    def length(config: dict[str, Any], **fields: Any) -> int:
        speculation = found(config, **fields).speculation
        assert speculation is not None
        return speculation.num_speculative_tokens

    assert length(CONFIG) == 5
    assert length(CONFIG, num_speculative_tokens=2) == 2
    assert length(CONFIG, num_draft_tokens=3) == 2  # SGLang's, which counts the token before
    assert length(M2) == 3
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert length(CONFIG, **synthetic) == 3
    long = changed(f"{USE}.proposal_methods.0.speculative_tokens", 16)
    assert length(long, num_speculative_tokens=15) == 15
    with pytest.raises(ConfigError, match="16 speculative_tokens; allowed: 1 to 15") as caught:
        found(long)
    assert "goes before it" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("target_hidden_size", 4096, "target_hidden_size is 4096; the model's is 3072"),
        (f"{LAYER}.vocab_size", 151936, "vocab_size is 151936; the model's is 200064"),
        ("eagle_aux_hidden_state_layer_ids", [2, 31, 63], "reads layers [2, 31, 63]"),
        ("eagle_aux_hidden_state_layer_ids", [31, 2, 59], "[31, 2, 59]; supported: a list of"),
    ],
)
def test_refuses_the_draft_of_another_model(
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
    # explicit options replace the files' settings
    with pytest.raises(ConfigError, match="is a draft model: it proposes") as caught:
        of(config, speculative_config={"method": "ngram"})
    assert "serve nano, and name this one in --speculative-config" in str(caught.value)
    itself = str(tmp_path)
    for verifier, words in (
        (None, "is a draft model"),
        ("no/such/model", "^draft .*: model 'no/such/model' is neither"),
        (itself, f"^draft {itself}: a model of .* is a draft model"),
    ):
        with pytest.raises(ConfigError, match=words):
            of(as_speculators(M2 | nano, verifier=verifier))
