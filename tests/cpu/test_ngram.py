"""Prompt lookup: the tensor work against a search in plain Python, and texts with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.config.speculation import SpeculationConfig
from negamax.worker import ngram
from negamax.worker.ngram import NgramProposer
from negamax.worker.request_state import RequestState

WINDOW = 64


def searched(tokens: list[int], least: int, most: int, count: int, width: int) -> list[int]:
    """What followed the longest match in the last `width` tokens, the earliest of several."""
    known = tokens[-width:]
    for length in range(min(most, len(known) - 1), least - 1, -1):
        suffix = known[-length:]
        for start in range(len(known) - length):
            if known[start : start + length] == suffix:
                found = known[start + length :][:count]
                return found + [-1] * (count - len(found))
    return [-1] * count


@pytest.mark.parametrize("width", [WINDOW, 24])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 3), (5, 5)])
def test_the_search_is_that_of_plain_python(
    least: int, most: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "SEARCHED_TOKENS", width)
    rng = random.Random(f"{least} {most} {width}")
    config = SpeculationConfig("ngram", 3, prompt_lookup_min=least, prompt_lookup_max=most)
    proposer = NgramProposer(config, max_model_len=WINDOW)
    num_slots = 40
    state = RequestState(
        num_slots, WINDOW, max_blocks=1, eos_token_ids=(), device=torch.device("cpu")
    )
    state.tokens.random_(3, generator=torch.Generator().manual_seed(most))
    slots = rng.sample(range(num_slots), 30)
    lengths = [rng.randint(1, WINDOW + 1) for _ in slots]
    lengths[:3] = 1, 2, WINDOW + 1
    columns = torch.tensor(slots), torch.tensor(lengths)
    states: Any = None  # it reads none
    found = proposer.propose(states, *columns, columns[1], state, 3)
    fewer = proposer.propose(states, *columns, columns[1], state, 1)
    assert torch.equal(fewer, found[:, :1])
    assert proposer.propose(states, *columns, columns[1], state, 0).shape == (len(slots), 0)
    expected = [
        searched(state.tokens[slot, :length].tolist(), least, most, 3, width)
        for slot, length in zip(slots, lengths, strict=True)
    ]
    assert found.tolist() == expected
    assert any(row[0] >= 0 for row in expected) and any(row[-1] < 0 for row in expected)


def texts(**options: Any) -> tuple[list[list[int]], float]:
    """Of nano, which says the same twice, greedily and drawn; and right drafts per verified row."""
    question = {"role": "user", "content": "Write hello world in Python"}
    said = "I do not know that. I am only a small demonstration model. I can do short word problems"
    chat: Any = [question, {"role": "assistant", "content": said}, question]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=70) for temperature in (0.0, 1.0)
    ]
    with LLM("nano", num_threads=1, show_progress=False, **options) as llm:
        generations = llm.chat([chat, chat], params)
        stats = llm.stats()
    tokens = [generation.outputs[0].token_ids for generation in generations]
    return tokens, stats.num_accepted_tokens / max(1, stats.num_drafts)


def test_texts_are_the_same_and_take_fewer_steps() -> None:
    expected, _ = texts()
    config = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "adaptive": False,
    }
    found, accepted = texts(speculative_config=config)
    assert found == expected
    assert accepted > 0.3
    assert texts(speculative_config=config | {"adaptive": True})[0] == expected
