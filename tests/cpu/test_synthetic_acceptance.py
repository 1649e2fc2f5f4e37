from typing import Any

import graph_support
import pytest
import torch

from negamax import LLM, SamplingParams
from negamax.worker.synthetic_acceptance import SyntheticAcceptance


def test_requests_with_consecutive_seeds_differ_in_accepted_drafts() -> None:
    """64 of 129 tokens must have the mean of many draws, not of one draw."""
    rates = (0.8, 0.45, 0.25)
    schedule = SyntheticAcceptance(rates)
    for first in range(0, 2000, 100):
        lengths, end, total, rows = torch.full((64,), 1000), 1129, 0, 0
        while (runs := lengths < end).any():
            seeds = first + torch.arange(64)[runs]
            accepted = schedule.count(torch.full_like(seeds, 3), seeds, lengths[runs])
            lengths[runs] += accepted + 1
            total, rows = total + int(accepted.sum()), rows + len(seeds)
        assert total / rows == pytest.approx(sum(rates), abs=0.08)


@pytest.mark.parametrize("is_captured", [True, False])
def test_mean_length_is_as_requested(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_captured:
        graph_support.install(monkeypatch, graph_support.runtime(graph_support.RepeatedSteps()))
    config: dict[str, Any] = {
        "method": "ngram", "num_speculative_tokens": 3, "adaptive": False,
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5,
    }  # fmt: skip
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM("nano", speculative_config=config, **options) as llm:
        llm.generate([[5, 6, 7]] * 4, params)
        stats = llm.stats()
        assert llm.info.speculation is not None
        assert llm.info.speculation.synthetic_acceptance_length == 2.5
        assert "SYNTHETIC ACCEPTANCE of 2.50" in llm._loop.executor.ready.load_summary
    assert stats.num_drafts > 50
    shares = [count / stats.num_drafts for count in stats.accepted_per_position]
    # At the end of a request, a row has fewer draft tokens.
    assert shares == pytest.approx([1.0, 0.5, 0.0], abs=0.15)
    assert shares[2] == 0.0
