import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.engine.core.expert_balancer import ExpertBalancer
from negamax.engine.core.expert_location import place_experts
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.expert_placement import rank_loads

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


def test_experts_lie_in_order_by_default() -> None:
    assert place(RANKS, "trivial") == RANKS
    assert place(ParallelLayout(), "trivial", Spec(experts=None)) == ParallelLayout()


def test_counts_determine_the_placement(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    # a server's answer, with fields that do not matter here
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
        # that server's dump is left in place
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
        ({"logical_count": [GOOD]}, "has 1 layers, the model has 3"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3]]}, "3 numbers in layer 2; expected: 4 experts"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, -4]]}, r"\$\.logical_count\[2\]\[3\]|>= 0"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, 2**60]]}, "<="),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, 1.5]]}, "got `float`"),
        ({"logical_count": [GOOD, GOOD, [1, 2, 3, True]]}, "got `bool`"),
        ({"logical_count": {"0": GOOD}}, "got `object`"),
        ({"physical_to_logical_map": [GOOD] * 4}, "has 4 layers"),
        ({"physical_to_logical_map": [GOOD, GOOD, [0, 1, 2, 4]]}, "is expert 4; allowed: 0 to 3"),
        ({"physical_to_logical_map": [GOOD, [0, 1, 2, 2], GOOD]}, "layer 1.* expert 3 has no slot"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]] * 3}, 'num_redundant_experts": 2'),
    ],
)
def test_data_of_another_model_is_refused(location: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="--init-expert-location") as caught:
        place(RANKS, location)
    assert re.search(words, f"{caught.value.message} {caught.value.hint}")


def test_no_rank_gets_an_expert_twice() -> None:
    with pytest.raises(ConfigError, match="rank 1 of 2 has expert 3 2 times"):
        place(COPIES, {"physical_to_logical_map": [[0, 1, 2, 3, 3, 0]] * 3})


def test_sharded_experts_are_refused() -> None:
    text = json.dumps({"logical_count": COUNTS})
    with pytest.raises(ConfigError, match="a part of every expert") as caught:
        place(ParallelLayout(tp=2), text)
    assert caught.value.hint == "add --enable-expert-parallel"
    with pytest.raises(ConfigError, match="the model has none"):
        place(RANKS, text, Spec(experts=None))


def test_copies_are_allowed_without_rebalancing() -> None:
    copies = {"num_redundant_experts": 2}
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    placed = EngineOptions("m", **sizes, eplb_config=copies, init_expert_location="{}")
    assert placed.parallel.redundant_experts == 2 and placed.eplb is None
    for config, location in ((copies, "trivial"), (copies | {"window_size": 2}, "{}")):
        with pytest.raises(ConfigError, match="experts stay where they are"):
            EngineOptions("m", **sizes, eplb_config=config, init_expert_location=location)
