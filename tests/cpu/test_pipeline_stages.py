from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from model_support import PagedRun, build, random_weights, tiny_config
from torch import Tensor

from negamax.config.model_spec import ModelSpec
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from tests import tiny_m3


class Pipeline(Decoder):
    """Run all stages of a model in one process; each stage gets only the caches of its layers."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], num_stages: int) -> None:
        self.spec, self.stages = spec, []
        for rank in range(num_stages):
            layout = ParallelLayout(rank=rank, pp=num_stages)
            stage = build(spec, weights, context=replace(ParallelContext.single(), layout=layout))
            assert isinstance(stage, Decoder)
            self.stages.append(stage)

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        *,
        capture: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        x, residual = self.stages[0].embed(token_ids)
        first = 0
        for stage in self.stages:
            own = kv[first : first + len(stage.layers)]
            x, residual = stage.stage(x, residual, metadata, own)
            first += len(own)
        assert first == len(kv)
        assert not capture
        return self.stages[-1].last_norm(x, residual), []

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)


M2 = tiny_config(5, num_hidden_layers=3, vocab_size=64)
# The last two of three stages have no layer with full attention.
M3 = tiny_m3.text_config(
    5, num_hidden_layers=3, vocab_size=64, mlp_layer_types=["dense", "sparse", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
)  # fmt: skip


@pytest.mark.parametrize("config", [M2, M3], ids=["M2", "M3"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_one_after_other_are_whole_model(config: dict[str, object], num_stages: int) -> None:
    spec = read_spec(config)
    weights = random_weights(spec, 7)
    whole = PagedRun(build(spec, weights))
    staged = PagedRun(Pipeline(spec, weights, num_stages))
    steps = [[("a", [3, 1, 4, 1, 5, 9])], [("a", [2]), ("b", [6, 5, 3])], [("a", [5]), ("b", [8])]]
    for step in steps:
        expected, got = whole.step(step), staged.step(step)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_stages_together_hold_every_tensor_once() -> None:
    spec = read_spec(M2)
    held: list[str] = []
    for rank in range(2):
        context = replace(ParallelContext.single(), layout=ParallelLayout(rank=rank, pp=2))
        held += build(spec, loaded=False, context=context).weight_slots()
    assert sorted(held) == sorted(build(spec, loaded=False).weight_slots())
