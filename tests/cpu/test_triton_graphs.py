from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from graph_support import RepeatedSteps, runtime
from test_triton_model import SPEC, errors, fp8_model, kernel_table, use_few_programs
from torch import Tensor
from triton_support import launches

from negamax.kernels.drafts import triton as drafts
from negamax.kernels.peers import Collective
from negamax.layers.attention import KvCaches
from negamax.models.decoder import Decoder
from negamax.parallel.collectives import SingleRank
from negamax.scheduler.request import SamplingParams
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import batch, kv_cache
from negamax.worker.batch import StepColumns
from negamax.worker.graphs import StepGraphs
from negamax.worker.proposer import DraftRows, Proposer, TokenStates
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import Sampler
from negamax.worker.step_shapes import DRAFTS, ROWS, TOKENS, StepShape

CPU = torch.device("cpu")
SHAPES = {
    ROWS: [StepShape.of_decodes(size, 0) for size in (1, 4)],
    DRAFTS: [StepShape.of_decodes(3, 2)],
    TOKENS: [StepShape(8, 4, 8, is_sampled=False)],
}
SAMPLING = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3})


class Side(NamedTuple):
    requests: RequestState
    kv: list[dict[str, Tensor]]


class Counting(Proposer):
    num_draft_tokens = 2

    def propose(
        self, states: TokenStates, rows: DraftRows, requests: RequestState, num_tokens: int
    ) -> Tensor:
        slots, lengths, ends = rows
        assert torch.equal(states.slots[ends], slots)
        assert torch.equal(states.positions[ends], (lengths - 2).clamp_min(0))
        return lengths.unsqueeze(1) + torch.arange(num_tokens)

    def use_caches(self, caches: Sequence[KvCaches]) -> None:
        """Do nothing, since this proposer has no caches."""


def step_graphs(
    shapes: dict[str, list[StepShape]],
    model: Decoder,
    kv: Sequence[KvCaches],
    requests: RequestState,
    pool: RepeatedSteps,
    proposer: Proposer | None = None,
    group: Collective | None = None,
) -> StepGraphs:
    context = SimpleNamespace(attention_group=group or SingleRank())
    parts = {"model": model, "caches": kv, "requests": requests, "kernels": kernel_table()}
    parts |= {"context": context, "runtime": runtime(pool), "proposer": proposer, "encoder": None}
    return StepGraphs(shapes, SimpleNamespace(**parts))


def side(num_draft_tokens: int = 0) -> Side:
    requests = RequestState(
        4, 64, max_blocks=4, eos_token_ids=(1,), device=CPU, num_draft_tokens=num_draft_tokens
    )
    requests.set_padding_block(16)
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 9}
    known = ([5, 6, 7], 3), ([9], 1), ([3, 4, 5, 6, 7], 2)
    for slot, ((tokens, prompt_len), own) in enumerate(zip(known, SAMPLING, strict=True)):
        sampling = SamplingParams(**(defaults | own | {"seed": slot}))  # type: ignore[arg-type]
        blocks = list(range(4 * slot, 4 * slot + 4))
        requests._assign(NewRow(slot, tokens, prompt_len, 0, blocks, sampling))
    kv = kv_cache.allocate(
        SPEC.kv_caches(), 17, block_size=16, dtype=torch.bfloat16, ranks=1, device=CPU
    )
    return Side(requests, [dict(caches) for caches in kv])


def step(slots: list[int], counts: list[int]) -> StepPlan:
    samples = [True] * len(slots)
    return StepPlan(0, [], [], [], slots, counts, [0] * len(slots), samples)


def eager(model: Decoder, side: Side, plan: StepPlan) -> tuple[batch.BatchLayout, Tensor]:
    layout = batch.build_batch_layout(plan, side.requests, generated_apart=False)
    hidden, _ = model.forward(*batch.build(layout, side.requests), side.kv)
    return layout, hidden


def assert_alike(one: Side, other: Side) -> None:
    """Check that both sides have equal tokens, lengths and caches, except the padding block."""
    assert torch.equal(one.requests.num_computed, other.requests.num_computed)
    assert torch.equal(one.requests.tokens[:3], other.requests.tokens[:3])
    for caches, others in zip(one.kv, other.kv, strict=True):
        for name, cache in caches.items():
            assert (cache[:16].float() - others[name][:16].float()).abs().max() < 0.05


@pytest.mark.full  # The gate has the same comparison in test_triton_captured_rows.py.
def test_captured_steps_compute_what_kernels_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    model = fp8_model()
    alone, captured, pool = side(), side(), RepeatedSteps()
    with torch.inference_mode():
        graphs = step_graphs(SHAPES, model, captured.kv, captured.requests, pool)
        assert graphs.capture(TOKENS, pool, lambda *_: None).startswith("1 up to 8 tokens: 1 MiB")
        assert graphs.capture(ROWS, pool, lambda *_: None).startswith("2 up to 4 rows: 4 MiB")
        assert_alike(alone, captured)  # Only padding rows have run so far.
        for plan in (step([0, 1], [3, 1]), step([0, 1, 2], [1, 1, 5])):
            layout, expected = eager(model, alone, plan)
            columns = layout.columns
            shape = graphs.find(len(columns.token_slots), len(columns.slots))
            assert shape == StepShape(8, 4, 8, is_sampled=False)
            graphs.prepare(shape, columns)
            hidden = graphs.replay(shape).hidden
            assert max(errors(hidden[: len(expected)], expected)) < 0.01
            for one in (alone, captured):
                advance(one.requests, plan)
                for slot in plan.slots:
                    one.requests.tokens[slot, one.requests.num_computed[slot]] = 11 + slot
        assert graphs.find(9, 1) is None and graphs.find(8, 5) is None
        for plan in (step([2, 0, 1], [1, 1, 1]), step([2], [1]), step([0, 2], [1, 1])):
            layout, hidden = eager(model, alone, plan)
            expected = model.local_logits(hidden)
            inputs = batch.sample_inputs(plan.slots, layout.sample_offsets, alone.requests)
            sampled = sampler(alone.requests)(expected.clone(), inputs).token_ids
            alone.requests.tokens[inputs.slots_device, inputs.positions_device] = sampled
            shape = graphs.find_decodes(len(plan.slots))
            assert shape is not None and shape.num_tokens in (1, 4)
            graphs.prepare(shape, StepColumns.of_decodes(plan.slots, plan.num_scheduled))
            buffers = graphs.replay(shape)
            graphs.draw(shape)
            assert max(errors(buffers.logits[: len(expected)], expected)) < 0.01
            assert buffers.token_ids[: len(expected)].tolist() == sampled.tolist()
            advance(alone.requests, plan)
            captured.requests.raise_bounds(plan, postponed=())
            assert_alike(alone, captured)
        assert pool.num_replays == 2 + 2 * 3
        graphs.replay_seconds(2, repeats=1)  # The CPU has no clock for graphs.
        assert pool.num_replays == 2 + 2 * 3 + 2
        captured.requests.tokens.copy_(alone.requests.tokens)  # tokens that `draw` sampled
        assert_alike(alone, captured)
        with launches(monkeypatch) as names:
            graphs.replay(shape)
        assert names[:4] == ["_place", "_embed", "_locate", "_plan_decode"]
        assert names[-3:] == ["_tile_argmax", "_row_argmax", "_store"]
        assert not any(name.startswith("aten") for name in names)


def test_a_captured_step_verifies_drafts_and_proposes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    model, pool = fp8_model(), RepeatedSteps()
    alone, captured = side(1), side(1)
    prompts = step([0, 1, 2], [3, 1, 5])
    plan = StepPlan(1, [], [], [], [2, 0, 1], [2, 2, 1], [1, 1, 0], [True] * 3, num_proposed=1)
    with torch.inference_mode():
        shapes = {ROWS: [], DRAFTS: [StepShape.of_decodes(4, 1)], TOKENS: []}
        graphs = step_graphs(shapes, model, captured.kv, captured.requests, pool, Counting())
        graphs.capture(DRAFTS, pool, lambda *_: None)
        for one in (alone, captured):
            eager(model, one, prompts)
            advance(one.requests, prompts)
            one.requests.tokens[torch.arange(3), torch.tensor([3, 1, 5])] = 11
        # Rows without a draft token show which tokens are accepted.
        proposed = torch.full((3,), -1)
        for _ in range(2):
            alone.requests.drafts[:3, 0] = proposed
            alone.requests.place_drafts(plan)
            layout, hidden = eager(model, alone, plan)
            inputs = batch.sample_inputs(layout.sample_slots, layout.sample_offsets, alone.requests)
            logits = model.local_logits(hidden[layout.sample_tokens])
            sampled = sampler(alone.requests)(logits.clone(), inputs).token_ids
            proposed = torch.stack([sampled[2] + 1, sampled[4], sampled[0]])
        captured.requests.drafts.copy_(alone.requests.drafts)
        shape = graphs.find_decodes(3, 1)
        assert shape == StepShape.of_decodes(4, 1)
        graphs.prepare(shape, StepColumns.of_decodes(plan.slots, plan.num_scheduled))
        buffers = graphs.replay(shape)
        alone.requests.tokens[inputs.slots_device, inputs.positions_device] = sampled
        alone.requests.num_computed[:3] = torch.tensor([3 + 1, 1 + 1, 5 + 2])
        for _ in range(2):  # Repeating the end of a step must change nothing.
            assert max(errors(buffers.logits[:5], logits)) < 0.01
            assert buffers.token_ids[:5].tolist() == sampled.tolist()
            assert buffers.num_accepted[:3].tolist() == [1, 0, 0]
            assert captured.requests.drafts[:3, 0].tolist() == [4 + 1, 2 + 1, 7 + 1]
            assert_alike(alone, captured)
            graphs.finish(shape, buffers.token_ids[:5])


def test_a_kernel_that_is_only_compiled_accepts_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check graph warm-up, where a kernel is only compiled and the counts become indices."""

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: None

    monkeypatch.setattr(drafts, "_count_accepted_kernel", Compiled())
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, 99))
    rows = torch.zeros(2, dtype=torch.int64)
    assert drafts.count_accepted(rows, rows.view(2, 1), rows, rows + 1).tolist() == [0, 0]


def advance(requests: RequestState, plan: StepPlan) -> None:
    requests.advance(torch.tensor(plan.slots), torch.tensor(plan.num_scheduled))
    requests.raise_bounds(plan, postponed=())


def sampler(requests: RequestState) -> Sampler:
    return Sampler(requests, kernels=kernel_table(), group=SingleRank(), on_shards=True)
