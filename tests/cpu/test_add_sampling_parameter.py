"""Show how to add a sampling parameter: a field of `SamplingParams` and a stage of the sampler."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.worker import logit_edits
from negamax.worker.logit_edits import ApplyEdit, EditedRow


class Params(SamplingParams, frozen=True, kw_only=True):
    even_bias: float = 0.0  # step 1: add the field, here in a subclass


class EvenBias:  # step 2: add the stage
    def applies(self, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
        return isinstance(params, Params) and params.even_bias != 0.0

    def prepare(
        self, params: SamplingParams, eos_token_ids: Collection[int], device: torch.device
    ) -> ApplyEdit:
        assert isinstance(params, Params)
        bias = params.even_bias

        def apply(logits: Tensor, row: EditedRow) -> None:
            logits[::2] += bias

        return apply


def test_a_parameter_needs_a_field_and_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"temperature": 1.0, "seed": 1, "max_tokens": 12, "ignore_eos": True}
    with LLM("nano", num_threads=1, max_model_len=256) as llm:
        params = [SamplingParams(**options), Params(**options, even_bias=100.0)]
        before = [one.outputs[0].token_ids for one in llm.generate(["Once"] * 2, params)]
        assert before[0] == before[1]
        monkeypatch.setattr(logit_edits, "EDITS", [*logit_edits.EDITS, EvenBias()])
        after = [one.outputs[0].token_ids for one in llm.generate(["Once"] * 2, params)]
    assert after[0] == before[0]
    assert after[1] != before[1] and all(token % 2 == 0 for token in after[1])
