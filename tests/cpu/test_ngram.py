import random
from functools import partial
from typing import Any, cast

import graph_support
import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.options.speculation import SpeculationConfig
from negamax.worker import ngram
from negamax.worker.ngram import NgramProposer
from negamax.worker.proposer import DraftRows
from negamax.worker.request_state import RequestState
from tests.speed import is_quick

WINDOW = 64


def rows(count: int, length: int) -> RequestState:
    return RequestState(count, length, max_blocks=1, eos_token_ids=(), device=torch.device("cpu"))


def searched(tokens: list[int], least: int, most: int, count: int, width: int) -> list[int]:
    """Return up to `count` tokens after the earliest longest match in the last `width` tokens."""
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
def test_is_exact(least: int, most: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "SEARCHED_TOKENS", width)
    rng = random.Random(f"{least} {most} {width}")
    config = SpeculationConfig("ngram", 3, prompt_lookup_min=least, prompt_lookup_max=most)
    proposer = NgramProposer(config, max_model_len=WINDOW)
    num_slots = 40
    state = rows(num_slots, WINDOW)
    state.tokens.random_(3, generator=torch.Generator().manual_seed(most))
    slots = rng.sample(range(num_slots), 30)
    lengths = [rng.randint(1, WINDOW + 1) for _ in slots]
    lengths[:3] = 1, 2, WINDOW + 1
    known = DraftRows(torch.tensor(slots), torch.tensor(lengths), torch.tensor(lengths))
    states: Any = None  # This proposer reads no residual streams.
    found = proposer.propose(states, known, state, 3)
    assert torch.equal(proposer.propose(states, known, state, 1), found[:, :1])
    assert proposer.propose(states, known, state, 0).shape == (len(slots), 0)
    expected = [
        searched(state.tokens[slot, :length].tolist(), least, most, 3, width)
        for slot, length in zip(slots, lengths, strict=True)
    ]
    assert found.tolist() == expected
    assert any(row[0] >= 0 for row in expected) and any(row[-1] < 0 for row in expected)


def test_short_sequences_are_searched_quickly_at_any_context_length() -> None:
    config, window = SpeculationConfig("ngram", 3), ngram.SEARCHED_TOKENS
    proposer = NgramProposer(config, max_model_len=window)
    state = rows(64, window)
    slots, lengths, states = torch.arange(64), torch.full((64,), 200), cast(Any, None)
    propose = partial(proposer.propose, states, DraftRows(slots, lengths, lengths), state, 3)
    assert propose().tolist() == [[0, 0, 0]] * 64
    assert is_quick(propose, 0.005)
    none = torch.empty(0, dtype=torch.int64)
    assert proposer.propose(states, DraftRows(none, none, none), state, 3).shape == (0, 3)
    padding = torch.zeros(1, dtype=torch.int64)  # The length of the padding row is arbitrary.
    none = DraftRows(padding, padding, padding)
    assert proposer.propose(states, none, state, 3).tolist() == [[-1] * 3]


def texts(**options: Any) -> tuple[list[list[int]], float]:
    """Check nano's greedy and sampled text. Return the accepted draft tokens per verified row."""
    question = {"role": "user", "content": "Write hello world in Python"}
    said = "I do not know that. I am only a small demonstration model. I can do short word problems"
    chat: Any = [question, {"role": "assistant", "content": said}, question]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=50) for temperature in (0.0, 1.0)
    ]
    with LLM("nano", num_threads=1, show_progress=False, **options) as llm:
        generations = llm.chat([chat, chat], params)
        stats = llm.stats()
    tokens = [generation.outputs[0].token_ids for generation in generations]
    return tokens, stats.num_accepted_tokens / max(1, stats.num_drafts)


def test_texts_are_the_same_and_take_fewer_steps() -> None:
    expected, _ = texts()
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False,
              "prompt_lookup_min": 2, "prompt_lookup_max": 4}  # fmt: skip
    found, accepted = texts(speculative_config=config)
    assert found == expected
    assert accepted > 0.3
    assert texts(speculative_config=config | {"adaptive": True})[0] == expected


def counted(text: list[int], prompt_len: int, most: int) -> tuple[list[int], list[int]]:
    """Count rows, draft tokens and accepted ones in `text`, and accepted ones by position."""
    num_known, totals, places = prompt_len + 1, [0, 0, 0], [0] * most
    while num_known < len(text):
        drafts = searched(text[:num_known], 1, 4, most, WINDOW)[: len(text) - 1 - num_known]
        accepted = 0
        for draft, token in zip(drafts, text[num_known:], strict=False):
            if draft != token:
                break
            places[accepted] += 1
            accepted += 1
        num_draft_tokens = sum(draft >= 0 for draft in drafts)
        for i, number in enumerate((num_draft_tokens > 0, num_draft_tokens, accepted)):
            totals[i] += number
        num_known += accepted + 1
    return totals, places


@pytest.mark.parametrize("captured", [True, False])
def test_proposed_drafts_are_counted(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if captured:
        graph_support.capture(monkeypatch)
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False,
              "prompt_lookup_min": 1, "prompt_lookup_max": 4}  # fmt: skip
    options: dict[str, Any] = {"max_model_len": WINDOW, "num_threads": 1, "show_progress": False,
                               "max_num_seqs": 2, "max_num_batched_tokens": 32}  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [500, 501, 502, 503, 504]
    with LLM("nano", enable_overlap=False, speculative_config=config, **options) as llm:
        outputs = list(llm.stream(prompt, params))
        stats = llm.stats()
    text = prompt + [token for output in outputs for token in output.token_ids]
    totals, places = counted(text, len(prompt), 3)
    assert [stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens] == totals
    assert list(stats.accepted_per_position) == places
    assert outputs[-1].drafts == tuple(totals)
    assert 0 < totals[0] < len(outputs) - 3 and 0 < totals[2] < totals[1]
