import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.checkpoint import split
from negamax.checkpoint.split import RANK_INDEX_NAME
from negamax.engine.core.expert_balancer import COUNT_STEPS, ExpertBalancer
from negamax.engine.core.expert_location import place_experts
from negamax.models.memory import weight_bytes
from negamax.models.registry import bundled_spec
from negamax.options.engine import EngineOptions
from negamax.options.eplb import EplbConfig
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split
from negamax.scheduler.expert_placement import (
    best_placement,
    copies_of,
    next_moves,
    pack,
    rank_loads,
)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    ranks, experts = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.integers(1, 24))
    return ranks, experts, ranks * draw(st.integers(-(-experts // ranks), experts))


def loads_of(num_experts: int) -> st.SearchStrategy[list[int]]:
    load = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    return st.lists(load, min_size=num_experts, max_size=num_experts)


@given(sizes(), st.data())
def test_packing_gives_every_rank_as_many(size: tuple[int, int, int], data: st.DataObject) -> None:
    ranks, experts, slots = size
    loads = data.draw(loads_of(experts))
    copies = copies_of(loads, slots, ranks)
    assert sum(copies) == slots and min(copies) >= 1 and max(copies) <= ranks
    packs = pack(loads, copies, ranks)
    assert [len(each) for each in packs] == [slots // ranks] * ranks
    found = Counter(expert for each in packs for expert in each)
    assert [found[expert] for expert in range(experts)] == copies


@given(sizes(), st.data())
def test_moves_lead_to_the_placement(size: tuple[int, int, int], data: st.DataObject) -> None:
    ranks, experts, num_slots = size
    per_rank = num_slots // ranks
    start = [slot % experts for slot in range(num_slots)]
    slots = list(start)
    for _ in range(3):
        loads = data.draw(loads_of(experts))
        target = best_placement(loads, slots, ranks)
        assert best_placement(loads, slots, ranks) == target
        assert set(target) == set(range(experts)) and len(target) == num_slots
        busiest = max(rank_loads(loads, target, ranks))
        assert busiest <= max(rank_loads(loads, slots, ranks))
        assert busiest <= max(rank_loads(loads, start, ranks))
        num_steps = 0
        while moves := next_moves(slots, target, ranks):
            sources, targets = zip(*moves, strict=True)
            for places in (sources, targets):
                assert len({slot // per_rank for slot in places}) == len(moves)
            after = list(slots)
            for source, to in moves:
                after[to] = slots[source]
            assert set(after) == set(range(experts))
            slots, num_steps = after, num_steps + 1
            assert num_steps <= num_slots
        for first in range(0, num_slots, per_rank):
            own = slice(first, first + per_rank)
            assert sorted(slots[own]) == sorted(target[own])


def test_experts_keep_their_slots_and_counts_alone_move_nothing() -> None:
    slots = [0, 1, 2, 3, 4, 5, 6, 7]
    target = best_placement([9, 8, 1, 1, 1, 1, 1, 1], slots, 2)
    assert sorted(target[:4]) != [0, 1, 2, 3] and target.index(0) == 0
    assert len(next_moves(slots, target, 2)) == 2  # Two experts exchange their slots.
    own = ExpertBalancer(ParallelLayout(tp=2, ep=2), num_layers=3, num_experts=6, config=None)
    steps = [own.direct() for _ in range(2 * COUNT_STEPS)]
    assert sum(step is not None for step in steps) == 2
    assert not any(step.moves for step in steps if step)


def balancer(**config: int | float | bool) -> ExpertBalancer:
    layout = ParallelLayout(tp=2, ep=2, redundant_experts=2)
    return ExpertBalancer(layout, num_layers=3, num_experts=6, config=EplbConfig(**config))


def run(
    balancer: ExpertBalancer, num_steps: int, per_step: list[int], late: int = 2
) -> list[tuple[int, int]]:
    """Run steps whose results arrive `late` steps later. Return (step, moves) of moving steps."""
    total, waiting = np.zeros((3, 6), dtype=np.int64), []
    moved = []
    for number in range(num_steps):
        step = balancer.direct()
        total[1:] += per_step  # The first layer has no experts.
        waiting.append(total.tobytes() if step and step.wants_counts else b"")
        if step and step.moves:
            moved.append((number, len(step.moves)))
            assert len({move.layer for move in step.moves}) == 1
        if len(waiting) > late and (counts := waiting.pop(0)):
            balancer.take(counts)
    return moved


SKEWED = [2, 2, 40, 20, 2, 2]


def test_a_rebalance_moves_experts_once_and_never_below_its_threshold() -> None:
    own = balancer(step_interval=40, window_size=20)
    assert run(own, 42, SKEWED) == [] and own.stats.num_rebalances == 0
    before = own.stats.balancedness
    own = balancer(step_interval=40, window_size=20)
    moved = run(own, 300, SKEWED)
    assert own.stats.num_rebalances == 1 and own.stats.balancedness > 0.95 > before
    assert own.stats.num_moved == sum(number for _, number in moved) > 0
    assert {step // 20 for step, _ in moved} == {2}  # More moves would gain nothing.
    own = balancer(step_interval=20, window_size=20, min_rebalancing_utilization_threshold=0.5)
    assert run(own, 200, SKEWED) == [] and own.stats.balancedness > 0.5


def test_a_record_counts_between_start_and_dump() -> None:
    own = balancer()
    counts = [np.full((3, 6), number, dtype=np.int64).tobytes() for number in (5, 7, 20)]
    with pytest.raises(InvalidRequestError, match="no expert distribution recording was started"):
        own.record("stop", counts[0])
    own.record("start", counts[0])
    first = own.record("dump", counts[1])
    own.record("stop", counts[1])
    second = own.record("dump", counts[2])
    assert first and second and first == second and first.logical_count == [[2] * 6] * 3
    own.record("start", counts[2])
    third = own.record("dump", counts[2])
    assert third and third.logical_count == [[0] * 6] * 3


BALANCED = {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_eplb": True}
THRESHOLD = "min_rebalancing_utilization_threshold"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_eplb": True}, "a shard of every expert .add --enable-expert-parallel"),
        ({"eplb_config": {"window_size": 3}}, "add --enable-eplb"),
        ({**BALANCED, "eplb_config": {"windw_size": 3}}, "mean window_size"),
        ({**BALANCED, "eplb_config": {"window_size": 0}}, "1 or more"),
        ({**BALANCED, "eplb_config": {"step_interval": True}}, "whole number"),
        ({**BALANCED, "eplb_config": {"policy": "flash"}}, "allowed: default"),
        ({**BALANCED, "eplb_config": {"log_balancedness": 1}}, "true or false"),
        ({"expert_distribution_recorder_mode": "per_pass"}, "allowed: off, stat"),
        ({**BALANCED, "eplb_config": {THRESHOLD: 0}}, "above 0, at most 1"),
    ],
)
def test_refuses_invalid_or_useless_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions("nano", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("redundant", "nearest"), [(1, 0), (6, 4), (1023, 768), (772, 768)])
def test_redundant_experts_are_dealt_out_evenly(redundant: int, nearest: int) -> None:
    spec = bundled_spec("minimax-m2")
    check_split(ParallelLayout(tp=4, ep=4, redundant_experts=nearest), spec)
    with pytest.raises(ConfigError, match=f"use {nearest}, or another"):
        check_split(ParallelLayout(tp=4, ep=4, redundant_experts=redundant), spec)


def test_redundant_experts_take_memory_and_no_checkpoint_of_ranks(tmp_path: Path) -> None:
    """Count one more expert of MiniMax-M2 on each of four ranks: 14.2 MB in 62 layers."""
    spec = bundled_spec("minimax-m2")
    layouts = [ParallelLayout(tp=4, ep=4, redundant_experts=count) for count in (0, 4)]
    sizes = [weight_bytes(spec, dtype="bfloat16", layout=layout) for layout in layouts]
    assert sizes[1] - sizes[0] == pytest.approx(62 * 3 * 3072 * 1536, rel=1e-3)
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    for rank in range(2):
        index = tmp_path / RANK_INDEX_NAME.format(rank)
        index.write_text(json.dumps({"metadata": sizes}))
    split.check_split(tmp_path, ParallelLayout(tp=2, ep=2))
    with pytest.raises(
        CheckpointError, match=r"without redundant experts, but .*leave the option out, or"
    ):
        split.check_split(tmp_path, ParallelLayout(tp=2, ep=2, redundant_experts=2))


# --- locations from files ------------------------------------------------------------------------


EXPERTS = 4
COUNTS = [[90, 80, 1, 2], [0, 0, 0, 0], [5, 5, 5, 400]]
RANKS = ParallelLayout(tp=2, ep=2)
COPIES = ParallelLayout(tp=2, ep=2, redundant_experts=2)


@dataclass(frozen=True)
class Spec:
    num_layers: int = len(COUNTS)
    experts: tuple[int, int] | None = (EXPERTS, 8)

    def expert_sizes(self) -> tuple[int, int] | None:
        return self.experts


def place(layout: ParallelLayout, location: Any, spec: Spec = Spec()) -> ParallelLayout:
    text = location if isinstance(location, str) else json.dumps(location)
    return place_experts(layout, spec, text)  # type: ignore[arg-type]


def test_refuses_locations_that_do_not_suit_the_ranks() -> None:
    assert place(RANKS, "trivial") == RANKS
    assert place(ParallelLayout(), "trivial", Spec(experts=None)) == ParallelLayout()
    with pytest.raises(ConfigError, match="rank 1 of 2 has expert 3 2 times"):
        place(COPIES, {"physical_to_logical_map": [[0, 1, 2, 3, 3, 0]] * 3})
    text = json.dumps({"logical_count": COUNTS})
    with pytest.raises(ConfigError, match="ranks hold parts of experts") as caught:
        place(ParallelLayout(tp=2), text)
    assert caught.value.hint == "add --enable-expert-parallel"
    with pytest.raises(ConfigError, match="the model has no experts"):
        place(RANKS, text, Spec(experts=None))


def test_counts_determine_the_placement(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    # The file is a server's answer, with fields that have no effect.
    path.write_text(json.dumps({"logical_count": COUNTS, "engines": [{"balancedness": 0.5}]}))
    for layout, most in ((RANKS, (91, 0, 405)), (COPIES, (88, 0, 210))):
        placed = place(layout, str(path))
        for layer, (counts, load) in enumerate(zip(COUNTS, most, strict=True)):
            slots = placed.expert_slots(EXPERTS, layer)
            assert set(slots) == set(range(EXPERTS))
            assert max(rank_loads(counts, slots, 2)) <= load
        assert placed.expert_slots(EXPERTS, 1) == layout.expert_slots(EXPERTS, 1)
        balancer = ExpertBalancer(placed, num_layers=3, num_experts=EXPERTS, config=None)
        balancer.record("start", bytes(8 * 3 * EXPERTS))
        dump = balancer.record("dump", bytes(8 * 3 * EXPERTS))
        assert dump is not None
        assert tuple(map(tuple, dump.physical_to_logical_map)) == placed.expert_placement
        # The dump of that server gives the same placement.
        again = place(layout, {"physical_to_logical_map": dump.physical_to_logical_map})
        assert again == placed


GOOD = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("/no/such/file.json", "cannot be read: No such file"),
        ("trival", "use 'trivial', or the path"),
        ("\0", "is invalid"),
        ("counts.pt", "a pickle can run any code.*as JSON"),
        ("{", "is invalid"),
        ("{}", "neither logical_count nor.*POST /dump_expert"),
        ({"logical_count": []}, "is invalid"),
        ({"logical_count": [GOOD]}, "has 1 layers, but the model has 3"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3]]}, "3 numbers in layer 2; expected: 4 experts"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, -4]]}, r"\$\.logical_count\[2\]\[3\]|>= 0"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, 2**60]]}, "<="),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, 1.5]]}, "got `float`"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, True]]}, "got `bool`"),
        ({"logical_count": {"0": GOOD}}, "got `object`"),
        ({"physical_to_logical_map": [GOOD] * 4}, "has 4 layers"),
        ({"physical_to_logical_map": [GOOD, GOOD, [0, 1, 2, 4]]}, "has expert 4; allowed: 0 to 3"),
        ({"physical_to_logical_map": [GOOD, [0, 1, 2, 2], GOOD]}, "layer 1.* expert 3 has no slot"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]] * 3}, 'num_redundant_experts": 2'),
    ],
)
def test_data_of_another_model_is_refused(location: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="--init-expert-location") as caught:
        place(RANKS, location)
    assert re.search(words, f"{caught.value.message} {caught.value.hint}")


def test_copies_are_allowed_without_rebalancing() -> None:
    copies = {"num_redundant_experts": 2}
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    placed = EngineOptions("m", **sizes, eplb_config=copies, init_expert_location="{}")
    assert placed.parallel.redundant_experts == 2 and placed.eplb is None
    for config, location in ((copies, "trivial"), (copies | {"window_size": 2}, "{}")):
        with pytest.raises(ConfigError, match="has no effect without --enable-eplb"):
            EngineOptions("m", **sizes, eplb_config=config, init_expert_location=location)
