from typing import Any

import msgspec
import pytest

from negamax.base.errors import ConfigError
from negamax.options.engine import EngineOptions
from negamax.options.speculation import SpeculationConfig

EAGLE3 = {"method": "eagle3", "model": "folder"}
NGRAM = {"method": "ngram"}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}


def read(fields: dict[str, Any]) -> SpeculationConfig:
    return SpeculationConfig.read(fields, tensor_parallel_size=4)


def test_configs_of_vllm_users() -> None:
    found = read({**EAGLE3, "num_speculative_tokens": 5, "draft_tensor_parallel_size": 4})
    assert found == SpeculationConfig("eagle3", 5, model="folder")
    assert read({**NGRAM, "num_speculative_tokens": None}).num_speculative_tokens == 3
    assert msgspec.convert(msgspec.to_builtins(found), type=SpeculationConfig) == found


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"model": "ngram"}, "ngram"),
        ({"method": "[ngram]"}, "ngram"),
        ({"method": "ngram_gpu"}, "ngram"),
        ({"method": "NGRAM"}, "ngram"),
        ({"model": "a/b"}, "eagle3"),
    ],
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


def test_sglang_counts_the_token_in_front_of_the_drafts() -> None:
    assert read({**EAGLE3, "num_draft_tokens": 4}).num_speculative_tokens == 3
    both = {**EAGLE3, "num_draft_tokens": 64, "num_speculative_tokens": 5}
    assert read(both).num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("length", "rates"), [(1, (0, 0, 0)), (1.25, (0.25, 0, 0)), (2.5, (1, 0.5, 0)), (4, (1, 1, 1))]
)
def test_a_synthetic_length_is_the_schedule_with_the_least_variance(
    length: float, rates: tuple[float, ...]
) -> None:
    found = read({**SYNTHETIC, "synthetic_acceptance_length": length})
    assert found.synthetic_acceptance_rates == rates
    assert found.synthetic_acceptance_length == length


def test_keys_without_effect_are_noted() -> None:
    notes = read({**EAGLE3, "enforce_eager": True, "attention_backend": "FLASH_ATTN"}).notes
    assert [note.split(" has no effect: ")[0].split()[-1] for note in notes] == [
        "enforce_eager", "attention_backend"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "medusa"}, "method is 'medusa'; allowed: eagle3, ngram"),
        ({}, "has no method"),
        ({"num_speculative_tokens": 3}, "has no method"),
        ({"method": "eagle3"}, "has method eagle3 and no model"),
        ({**EAGLE3, "model": 3}, "model is 3; allowed: a text"),
        ({**NGRAM, "num_speculative_tokens": 16}, "num_speculative_tokens is 16; allowed: 1 to 15"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "num_draft_tokens": 64}, "num_speculative_tokens is 63"),
        ({**NGRAM, "promt_lookup_max": 3}, "did you mean prompt_lookup_max?"),
        ({**EAGLE3, "prompt_lookup_max": 3}, "prompt_lookup_max, which is for method ngram"),
        ({**NGRAM, "revision": "main"}, "revision, which is for method eagle3"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "at most prompt_lookup_max"),
        ({**EAGLE3, "draft_tensor_parallel_size": 2}, "allowed: 1, or 4 as the model has"),
        ({**EAGLE3, "adaptive": "no"}, "adaptive is 'no'; allowed: true or false"),
        ({**EAGLE3, "eagle_aux_hidden_state_layer_ids": [3, 1]}, "in ascending order"),
        ({**EAGLE3, "draft_lm_head_quantization": "int4"}, "'int4'; allowed: fp8"),
        ({**EAGLE3, "draft_sample_method": "top"}, "'top'; allowed: greedy, probabilistic"),
        ({**NGRAM, "rejection_sample_method": "fly"}, "rejection_sample_method is 'fly'"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, 'add "rejection_sample_method": "synthetic"'),
        (SYNTHETIC, "with 0 of synthetic_acceptance_length, synthetic_acceptance_rates"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, "allowed: 1 to 4"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5, 0.6]}, "none above the one before"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1, 0.5]}, "3 numbers from 0 to 1"),
        ('{"method": "ngram"}', "allowed: an object"),
    ],
)  # fmt: skip
def test_refusals_name_value_limit_and_remedy(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineOptions("nano", speculative_config=fields, tensor_parallel_size=4)
    assert words in str(refused.value)
