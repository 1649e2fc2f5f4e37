from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_support import GREEDY

from negamax.kernels.attention import triton as attention
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape, attention_metadata
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import batch, step_shapes
from negamax.worker.device import pool_bytes
from negamax.worker.request_state import RequestState

SHAPE = PagedShape(kv_heads=1, group=2, block_size=16)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_device_counts_tiles_as_the_host(sequences: list[tuple[int, int]], padding: int) -> None:
    sequences = [(cached, count) for cached, count in sequences if count] or [(0, 1)]
    counts = [count for _, count in sequences]
    lengths = [cached + count for cached, count in sequences]
    tables = torch.zeros(len(sequences) + padding, 40, dtype=torch.int32)
    known = attention_metadata(tables, lengths, counts)
    host = attention.plan_prefill(known, SHAPE)
    bounds = replace(known, host_seq_lens=tuple(end + 3 for end in lengths), is_exact=False)
    num_tokens = -(-sum(counts) // 128) * 128
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    queries = AttentionMetadata(
        positions=zeros, token_slots=zeros, block_tables=tables, num_decodes=0,
        block_table_indices=torch.arange(len(sequences) + padding),
        seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
        query_starts=torch.tensor(starts + [starts[-1]] * padding, dtype=torch.int32),
        host_seq_lens=(), host_query_lens=(),
    )  # fmt: skip
    for alike in (queries, bounds):
        device = attention.plan_prefill(alike, SHAPE)
        found = {tuple(tile) for tile in device.tiles.tolist() if tile[1] > 0}
        assert device.block_m == host.block_m
        assert found == {tuple(tile) for tile in host.tiles.tolist()}
        assert sum(tile[1] > 0 for tile in device.tiles.tolist()) == len(host.tiles)
        assert all(tile[2] >= 0 for tile in device.tiles.tolist())


@pytest.mark.parametrize(
    ("kind", "largest", "first", "step", "part"),
    [
        *((step_shapes.ROWS, largest, 1, 1, 8) for largest in (1, 2, 16, 17, 100, 256, 300)),
        *((step_shapes.TOKENS, largest, 640, 37, 5) for largest in (64, 128, 2048, 8192, 10000)),
    ],
)
def test_captures_waste_little(kind: str, largest: int, first: int, step: int, part: int) -> None:
    sizes = step_shapes.capture_sizes(kind, largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes))
    for count in range(first, largest + 1, step):
        size = next(size for size in sizes if size >= count)
        assert size - count <= size // part or size == largest or size <= 24


def test_steps_with_drafts_take_no_more_tokens_than_others() -> None:
    lengths = 1, 3, 99
    sizes = {"max_rows": 48, "max_tokens": 64, "max_num_seqs": 48, "draft_lengths": lengths}
    shapes = step_shapes.capture_shapes(**sizes)[step_shapes.DRAFTS]
    rows = {n: [shape.num_seqs for shape in shapes if shape.num_drafts == n] for n in lengths}
    assert rows == {1: [1, 2, 4, 8, 16, 32], 3: [1, 2, 4, 8, 16], 99: []}
    assert all(shape.num_tokens == shape.num_seqs * (shape.num_drafts + 1) for shape in shapes)


def test_late_results_leave_bounds_of_reassigned_slots_alone() -> None:
    requests = RequestState(2, 64, max_blocks=8, eos_token_ids=(1,), device=torch.device("cpu"))
    for slot in (0, 1):
        requests._assign(NewRow(slot, [5] * 9, 6, 8, [slot], GREEDY))
    plan = StepPlan(0, [], [], [], [0, 1], [4, 4], [3, 3], [True, True])
    requests.raise_bounds(plan, postponed=())
    assert requests.num_computed_bound[:2].tolist() == [12, 12]
    requests._assign(NewRow(1, [5] * 9, 6, 0, [1], GREEDY))
    assert not requests.are_bounds_exact([0, 1]) and requests.are_bounds_exact([1])
    requests.lower_bounds(plan, {0: 1, 1: 0})
    assert requests.num_computed_bound[:2].tolist() == [10, 0]
    assert requests.are_bounds_exact([0, 1])


@pytest.mark.parametrize("apart", [True, False])
def test_a_resumed_sequence_runs_token_by_token_only_for_invariance(apart: bool) -> None:
    rows = RequestState(4, 64, max_blocks=8, eos_token_ids=(1,), device=torch.device("cpu"))
    for slot, (known, prompt_len, num_computed) in enumerate(((10, 6, 2), (5, 5, 4), (9, 3, 8))):
        rows._assign(NewRow(slot, list(range(known)), prompt_len, num_computed, [slot], GREEDY))
    plan = StepPlan(0, [], [], [], [2, 0, 1], [1, 8, 1], [0, 0, 0], [True] * 3)
    layout = batch.build_batch_layout(plan, rows, generated_apart=apart)
    columns = layout.columns
    token_slots = columns.token_slots.tolist()
    positions = (columns.token_offsets + rows.num_computed_bound[token_slots]).tolist()
    assert batch.build(layout, rows)[1].positions.tolist() == positions
    tokens = list(zip(token_slots, positions, strict=True))
    if apart:
        assert tokens == [(2, 8), *((0, p) for p in (*range(6, 10), *range(2, 6))), (1, 4)]
        assert layout.num_decodes == 5 and layout.sample_tokens.tolist() == [0, 4, 9]
    else:
        assert tokens == [(2, 8), *((0, p) for p in range(2, 10)), (1, 4)]
        assert layout.num_decodes == 1 and layout.sample_tokens.tolist() == [0, 8, 9]
    assert columns.query_starts.tolist() == ([*range(6), 9, 10] if apart else [0, 1, 9, 10])
    assert [token_slots[i] for i in layout.sample_tokens] == [2, 0, 1]
    assert layout.sample_offsets.tolist() == [1, 8, 1]
    inputs = batch.sample_inputs(layout.sample_slots, layout.sample_offsets, rows)
    assert inputs.bounds == inputs.positions_device.tolist() == [9, 10, 5]


def test_only_the_segments_of_the_pool_count(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1 << 30},
        {"segment_pool_id": (0, 7), "total_size": 3 << 20},
        {"segment_pool_id": (0, 7), "total_size": 2 << 20},
        {"segment_pool_id": (0, 8), "total_size": 1 << 20},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert pool_bytes((0, 7)) == 5 << 20
    assert pool_bytes((0, 9)) == 0
