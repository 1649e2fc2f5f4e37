from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.base.errors import ConfigError
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout, share


@st.composite
def grids(draw: st.DrawFn) -> list[ParallelLayout]:
    tp, dp, pp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if (dp * cp * tp) % n == 0]))
    world = pp * dp * cp * tp
    return [ParallelLayout(rank=rank, tp=tp, ep=ep, dp=dp, pp=pp, cp=cp) for rank in range(world)]


@given(grids())
def test_ranks_are_a_bijection_onto_grid_positions(grid: list[ParallelLayout]) -> None:
    positions = {(r.pp_rank, r.dp_rank, r.cp_rank, r.tp_rank) for r in grid}
    assert len(positions) == len(grid) == grid[0].world_size


@given(grids())
def test_each_attention_group_covers_all_heads_once(grid: list[ParallelLayout]) -> None:
    for layout in grid:
        group = [grid[rank] for rank in layout.attention.ranks]
        assert layout.attention.ranks[layout.attention.rank] == layout.rank
        assert [head for member in group for head in member.attention.heads(48)] == list(range(48))


@given(grids(), st.sampled_from([1, 2, 4, 8]))
def test_kv_heads_are_split_or_replicated_next_to_their_query_heads(
    grid: list[ParallelLayout], num_kv_heads: int
) -> None:
    num_heads = 16
    for layout in grid:
        attention = layout.attention
        needed = {head // (num_heads // num_kv_heads) for head in attention.heads(num_heads)}
        assert needed == set(attention.kv_heads(num_kv_heads))


@given(grids(), st.sampled_from([1, 8, 24, 128]))
def test_each_stage_covers_every_expert_slice_once(grid: list[ParallelLayout], unit: int) -> None:
    num_experts, width = 16, 64
    for stage in range(grid[0].pp):
        cells = Counter(
            (expert, row)
            for layout in grid
            if layout.pp_rank == stage
            for expert in layout.experts.experts(num_experts)
            for row in layout.experts.width(width, unit=unit).part
        )
        assert len(cells) == num_experts * width
        assert set(cells.values()) == {1}


@given(st.integers(1, 70), st.integers(1, 8))
def test_stages_hold_consecutive_layers_of_nearly_equal_number(num_layers: int, pp: int) -> None:
    if num_layers < pp:
        with pytest.raises(ConfigError, match="pipeline"):
            ParallelLayout(pp=pp).layers(num_layers)
        return
    stages = [ParallelLayout(rank=rank, pp=pp).layers(num_layers) for rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_stages_hold_the_layers_that_a_partition_gives_them() -> None:
    options = ParallelOptions(pipeline_parallel_size=3, pp_layer_partition="2, 5,1")
    stages = [ParallelLayout.of(options).replace_rank(rank) for rank in range(3)]
    assert [stage.layers(8) for stage in stages] == [range(2), range(2, 7), range(7, 8)]
    with pytest.raises(ConfigError, match=r"adds up to 8 layers, the model has 9 .*3,3,3"):
        stages[0].layers(9)


@given(grids())
def test_ranks_in_one_place_of_their_stages_are_a_pipeline(grid: list[ParallelLayout]) -> None:
    for layout in grid:
        ranks = layout.pipeline_ranks
        assert ranks[layout.pp_rank] == layout.rank and len(ranks) == layout.pp
        places = {(grid[rank].dp_rank, grid[rank].cp_rank, grid[rank].tp_rank) for rank in ranks}
        assert len(places) == 1


def test_real_m2_shards() -> None:
    """TP16, 8 KV heads: rank r holds KV head r // 2 and 3 of 48 query heads."""
    ranks = [ParallelLayout(rank=rank, tp=16) for rank in range(16)]
    assert [list(r.attention.kv_heads(8)) for r in ranks] == [[rank // 2] for rank in range(16)]
    assert {len(r.attention.heads(48)) for r in ranks} == {3}
    assert {len(r.vocab(200_064)) for r in ranks} == {12_504}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"tp": 0}, "tp is 0"), ({"rank": 2, "tp": 2}, "rank is 2"), ({"tp": 4, "ep": 3}, "3")],
)
def test_impossible_layouts_are_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelLayout(**arguments)


@pytest.mark.parametrize(
    ("size", "unit", "lengths", "room"),
    [
        (8, 1, {192}, 192),
        (8, 128, {128, 256}, 256),
        (16, 128, {0, 128}, 128),
        (16, 64, {64, 128}, 128),
        (16, 32, {96}, 96),
        (1, 1000, {1536}, 2000),
    ],
)
def test_no_share_cuts_a_unit_and_all_have_room_for_the_largest(
    size: int, unit: int, lengths: set[int], room: int
) -> None:
    shares = [share(1536, rank=rank, size=size, unit=unit) for rank in range(size)]
    assert [row for each in shares for row in each.part] == list(range(1536))
    assert all(each.part.start % unit == 0 or not each.part for each in shares)
    assert {len(each.part) for each in shares} == lengths
    assert {each.size for each in shares} == {room}


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="48"):
        ParallelLayout(tp=5).attention.heads(48)
    with pytest.raises(ConfigError, match="KV heads"):
        ParallelLayout(tp=3).attention.kv_heads(2)
    with pytest.raises(ConfigError, match="vocabulary"):
        ParallelLayout(tp=3).vocab(4160)


def test_neighbours_share_out_the_cache_of_a_kv_head() -> None:
    """Four of 16 ranks have copies of each of four KV heads, and shard their blocks in pairs."""
    for rank in range(16):
        view = ParallelLayout(rank=rank, tp=16, dcp=2).attention
        assert view.cache_ranks == (rank - rank % 2, rank - rank % 2 + 1)
        assert view.ranks[view.rank] == view.cache_ranks[view.cache_rank] == rank
        others = [ParallelLayout(rank=each, tp=16, dcp=2).attention for each in view.cache_ranks]
        assert {each.kv_heads(4) for each in others} == {view.kv_heads(4)}
        heads = [head for each in others for head in each.heads(64)]
        assert heads == list(view.cache_heads(64))
    with pytest.raises(ConfigError, match="groups of 3"):
        ParallelLayout(tp=8, dcp=3)
