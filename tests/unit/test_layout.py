import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint import split
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import dequantized, expert_padding, weight_bytes
from negamax.models.registry import bundled_names, bundled_spec, import_names
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout, share
from negamax.parallel.split import check_split, possible_splits
from tests.tables import read_table


@st.composite
def grids(draw: st.DrawFn) -> list[ParallelLayout]:
    tp, dp, pp, cp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if (dp * cp * tp) % n == 0]))
    world = pp * dp * cp * tp
    return [ParallelLayout(rank=rank, tp=tp, ep=ep, dp=dp, pp=pp, cp=cp) for rank in range(world)]


@given(grids())
def test_attention_groups_cover_heads_and_stages_are_pipelines(grid: list[ParallelLayout]) -> None:
    for layout in grid:
        group = [grid[rank] for rank in layout.attention.ranks]
        assert layout.attention.ranks[layout.attention.rank] == layout.rank
        assert [head for member in group for head in member.attention.heads(48)] == list(range(48))
        ranks = layout.pipeline_ranks
        assert ranks[layout.pp_rank] == layout.rank and len(ranks) == layout.pp
        places = {(grid[rank].dp_rank, grid[rank].cp_rank, grid[rank].tp_rank) for rank in ranks}
        assert len(places) == 1
    positions = {(r.pp_rank, r.dp_rank, r.cp_rank, r.tp_rank) for r in grid}
    assert len(positions) == len(grid) == grid[0].world_size


@given(grids(), st.sampled_from([1, 2, 4, 8]))
def test_kv_heads_follow_query_heads(grid: list[ParallelLayout], num_kv_heads: int) -> None:
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
    with pytest.raises(ConfigError, match=r"adds up to 8 layers; the model has 9 .*3,3,3"):
        stages[0].layers(9)


def test_kv_heads_are_copied_to_ranks_or_shared_out() -> None:
    """Ranks of TP16 hold copies of 8 KV heads, or shard the blocks of 4 KV heads."""
    ranks = [ParallelLayout(rank=rank, tp=16) for rank in range(16)]
    assert [list(r.attention.kv_heads(8)) for r in ranks] == [[rank // 2] for rank in range(16)]
    assert {len(r.attention.heads(48)) for r in ranks} == {3}
    assert {len(r.vocab(200_064)) for r in ranks} == {12_504}
    # Four of 16 ranks hold each of four KV heads, and pairs of ranks shard its blocks.
    for rank in range(16):
        view = ParallelLayout(rank=rank, tp=16, dcp=2).attention
        assert view.cache_ranks == (rank - rank % 2, rank - rank % 2 + 1)
        assert view.ranks[view.rank] == view.cache_ranks[view.cache_rank] == rank
        others = [ParallelLayout(rank=each, tp=16, dcp=2).attention for each in view.cache_ranks]
        assert {each.kv_heads(4) for each in others} == {view.kv_heads(4)}
        assert [head for each in others for head in each.heads(64)] == list(view.cache_heads(64))
    with pytest.raises(ConfigError, match="groups of 3"):
        ParallelLayout(tp=8, dcp=3)


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
        (8, 1, {192}, 192), (8, 128, {128, 256}, 256), (16, 128, {0, 128}, 128),
        (16, 64, {64, 128}, 128), (16, 32, {96}, 96), (1, 1000, {1536}, 2000),
    ],
)  # fmt: skip
def test_no_share_splits_a_unit(size: int, unit: int, lengths: set[int], room: int) -> None:
    shares = [share(1536, rank=rank, size=size, unit=unit) for rank in range(size)]
    assert [row for each in shares for row in each.part] == list(range(1536))
    assert all(each.part.start % unit == 0 or not each.part for each in shares)
    assert {len(each.part) for each in shares} == lengths
    assert {each.size for each in shares} == {room}


def test_undivided_heads_and_models_without_dcp_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="48"):
        ParallelLayout(tp=5).attention.heads(48)
    with pytest.raises(ConfigError, match="KV heads"):
        ParallelLayout(tp=3).attention.kv_heads(2)
    with pytest.raises(ConfigError, match="vocabulary"):
        ParallelLayout(tp=3).vocab(4160)
    monkeypatch.setattr(type(M2), "supports_dcp", False)
    with pytest.raises(ConfigError, match=r"KV cache of MiniMaxM2ForCausalLM cannot be sharded"):
        check_split(ParallelLayout(tp=16, dcp=2), M2)


# --- options -------------------------------------------------------------------------------------


NAMES = {
    "tp": "tensor_parallel_size", "ep": "expert_parallel_size", "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size", "pcp": "prefill_context_parallel_size",
    "dcp": "decode_context_parallel_size", "whole": "enable_expert_parallel",
    "layers": "pp_layer_partition", "interleave": "cp_kv_cache_interleave_size",
}  # fmt: skip


def options(**short: Any) -> dict[str, Any]:
    return {NAMES[name]: value for name, value in short.items()}


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({}, (1, 1)), (options(tp=4), (4, 1)), (options(tp=4, whole=True), (4, 4)),
        (options(tp=4, ep=2), (4, 2)), (options(tp=4, whole=True, ep=2), (4, 2)),
        (options(whole=True), (1, 1)), (options(tp=2, pcp=2, whole=True), (2, 4)),
    ],
)  # fmt: skip
def test_experts_are_split_over_ranks(given: dict[str, Any], layout: tuple[int, int]) -> None:
    found = ParallelLayout.of(EngineOptions(model="nano", **given).parallel)
    assert (found.tp, found.ep) == layout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (options(tp=0), "--tensor-parallel-size is 0; allowed: 1 or more"),
        (options(ep=-1), "--expert-parallel-size is -1; allowed: 1 or more"),
        (options(tp=4, ep=3), r"-size is 4 \(use one of 1, 2, 4\)"),
        (options(tp=1000000000000, ep=3), "8, 16 with --t.* 16"),
        (options(tp=6, ep=4), "1, 2, 4 with --t.*-size 4"),
        (options(ep=2), r"-size is 1 \(use one of 1\)"),
        (options(tp=2, whole=True, ep=1), "omit --enable-expert-parallel, or use a"),
        (options(dp=0), "--data-parallel-size is 0; allowed: 1 or more"),
        (options(dp=2, tp=2, ep=3), r"2 in each of 2 data-parallel ranks \(use one of 1, 2\)"),
        (options(pp=0), "--pipeline-parallel-size is 0; allowed: 1 or more"),
        (options(pp=2, layers="3,x"), "'3,x'; allowed: numbers"),
        (options(pp=2, layers="3,0"), "'3,0'; allowed: numbers"),
        (options(pp=2, layers="2,2,2"), r"3 stages, but --pipe.*-size is 2 \(use --p.*-size 3"),
        (options(pcp=0), "--prefill-context-parallel-size is 0; allowed: 1 or more"),
        (options(pcp=2, dp=2, ep=3), "of 2 data-parallel ranks in each of 2 context-parallel ra"),
        (options(pcp=2, ep=4), r"is 1 in each of 2 context-parallel ranks \(use one of 1"),
        (options(dcp=2), r"divide --tensor-parallel-size, which is 1 \(use .*-parallel-size 1\)"),
        (options(dcp=5, tp=8), r"which is 8 \(use --decode-context-parallel-size 4\)"),
        (
            options(dcp=2, pcp=2, tp=8),
            r"store the whole KV cache \(use only one of the two options,",
        ),
        (options(interleave=0), "--cp-kv-cache-interleave-size is 0; allowed: 1 or"),
    ],
)
def test_impossible_sizes_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelOptions(**given)


def test_dcp_ranks_hold_whole_blocks() -> None:
    two = ParallelOptions(8, decode_context_parallel_size=2)
    for size in (None, 128):
        replace(two, cp_kv_cache_interleave_size=size).check_interleave(128)
    for size in (1, 64, 256, 100):
        with pytest.raises(ConfigError, match=rf"is {size}; .*whole blocks .*-size 128\)"):
            replace(two, cp_kv_cache_interleave_size=size).check_interleave(128)
    # Without DCP any interleave is accepted.
    ParallelOptions(8, cp_kv_cache_interleave_size=1).check_interleave(128)


# --- splits of models ----------------------------------------------------------------------------


M2 = bundled_spec("minimax-m2")
# Few rank counts divide this model's expert width and its number of experts.
ODD = replace(M2, expert_width=1400, num_experts=6, experts_per_token=2)


def offered(error: ConfigError) -> list[ParallelOptions]:
    found = []
    for part in (error.hint or "").split(", or ", 1):
        is_whole = "--enable-expert-parallel" in part
        sizes = map(int, re.findall(r"\d+", part if is_whole or not found else ""))
        found += [ParallelOptions(size, enable_expert_parallel=is_whole) for size in sizes]
    return found


@pytest.mark.parametrize("spec", [M2, ODD])
@pytest.mark.parametrize("gpus", [None, 1, 2, 3, 6, 8, 12])
def test_sizes_suggested_by_a_refusal_are_accepted(spec: ModelSpec, gpus: int | None) -> None:
    refused = 0
    for size in range(1, 49):
        for ep in (each for each in range(1, size + 1) if size % each == 0):
            try:
                check_split(ParallelLayout(tp=size, ep=ep), spec, gpus=gpus)
            except ConfigError as error:
                refused += 1
                assert offered(error)
                for options in offered(error):
                    check_split(ParallelLayout.of(options), spec, gpus=gpus)
    assert refused


def test_sizes_suggested_without_a_model_suit_every_published_one() -> None:
    lines = [{"tensor_parallel_size": tp, "expert_parallel_size": ep}
             for tp in range(1, 20) for ep in range(1, 20) if tp % ep]  # fmt: skip
    for line in lines:
        with pytest.raises(ConfigError) as caught:
            ParallelOptions(**line)
        sizes = [int(size) for size in re.findall(r"\d+", caught.value.hint or "")]
        assert sizes
        for size in sizes:
            for name in bundled_names():
                check_split(ParallelLayout(tp=size), bundled_spec(name))


def test_documents_state_the_bytes_of_each_split() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d, or]+) \| .+ \| ([\d.]+) GB \| (.+) \|$", text, re.M)
    assert len(rows) == 10
    for ranks, experts, gigabytes, padding in rows:
        for ep in map(int, re.findall(r"\d+", experts)):
            layout = ParallelLayout(tp=int(ranks), ep=ep)
            found = weight_bytes(M2, dtype="bfloat16", layout=layout) / 1e9
            assert f"{found:.1f}" == gigabytes, layout
            said = expert_padding(M2, layout=layout) or "none"
            assert padding.replace(" ", "") in said, layout


def test_fp8_weights_are_split_over_as_many_ranks_as_others() -> None:
    for whole, expected in {False: [1, 2, 4, 8, 16, 24, 48], True: [2, 4, 8, 16]}.items():
        splits = possible_splits(M2, most=48)
        splits = [each for each in splits if each.enable_expert_parallel is whole]
        assert [each.tensor_parallel_size for each in splits] == expected
    with pytest.raises(ConfigError) as caught:
        check_split(ParallelLayout(tp=8), M2, gpus=6)
    assert str(caught.value) == (
        "8 ranks need 8 GPUs; 6 are available (use --tensor-parallel-size 1, 2, 4, or --device cpu)"
    )
    six = replace(ODD, expert_width=1536)
    for layout, words in (
        (ParallelLayout(tp=4, ep=4), "1, 2, 4, 8 without expert parallelism, or 2 with --enable-"),
        (ParallelLayout(dp=4, ep=4), "2 with --enable-expert-parallel without --data-parallel-"),
        (ParallelLayout(tp=3, dp=2), "1, 2, 4, 8 without --data-parallel-size, or --device cpu"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_split(layout, six, gpus=8)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"size 1, 2, 4, or 3, 6 with --enable-expert"):
        check_split(ParallelLayout(tp=5), replace(ODD, num_heads=12, num_kv_heads=1), gpus=12)


@pytest.mark.parametrize(
    ("model", "tp", "holders", "words"), read_table("layout.shards_of_replicated_heads")
)
def test_shards_of_replicated_heads(model: str, tp: int, holders: int, words: str | None) -> None:
    layout, spec = ParallelLayout(tp=tp, dcp=holders), bundled_spec(model)
    if words is None:
        check_split(layout, spec)
        # Each rank also has the query heads of all ranks that share its KV head.
        q = next(each for each in import_names(spec).weights(spec) if each.is_query)
        plain, shared = (
            weight_bytes(spec, dtype="bfloat16", kept=dequantized, layout=each)
            for each in (ParallelLayout(tp=tp), layout)
        )
        per_layer = q.num_elements * 2 * (holders - 1) // tp
        assert 0 <= shared - plain - spec.num_layers * per_layer < 2**20  # norms of queries
        return
    with pytest.raises(ConfigError, match=words):
        check_split(layout, spec)


def test_split_files_without_all_query_heads_are_refused(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 8, "expert_parallel_size": 1, "rank": 0}
    index = tmp_path / split.RANK_INDEX_NAME.format(0)
    index.write_text(json.dumps({"metadata": sizes, "weight_map": {}}))
    split.check_split(tmp_path, ParallelLayout(tp=8))
    words = r"only their own query heads, but .*-size is 2 \(leave the option out"
    with pytest.raises(CheckpointError, match=words):
        split.check_split(tmp_path, ParallelLayout(tp=8, dcp=2))
