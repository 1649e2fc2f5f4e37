"""Figures of engines whose ranks run different layers or different requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import DebugResult


def sizes(options: EngineOptions) -> dict[str, int]:
    """The numbers of ranks that a result belongs to: of the axes but tensor parallelism those that
    are used.
    """
    given = {
        name: getattr(options, name) for name in ("pipeline_parallel_size", "data_parallel_size")
    }
    used = {name: size for name, size in given.items() if size > 1}
    return {"tensor_parallel_size": options.tensor_parallel_size, **used}


def label(result: dict[str, Any]) -> str:
    """Such as "PP2 DP2 TP1", of a result with its `sizes`."""
    names = (("PP", "pipeline"), ("DP", "data"), ("TP", "tensor"))
    keys = ((word, f"{name}_parallel_size") for word, name in names)
    return " ".join(f"{word}{result[key]}" for word, key in keys if key in result)


class Group:
    """The ranks of an engine."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout

    def step_rows(self, num_requests: int) -> int:
        """Rows of one step while so many requests generate: in a pipeline they take turns."""
        return -(-num_requests // self._layout.pp)

    def rank_rows(self, num_requests: int) -> int:
        """Rows of such a step on the data-parallel rank that has the most."""
        return -(-self.step_rows(num_requests) // self._layout.dp)

    def distinct_experts(self, answers: Sequence[DebugResult]) -> float | None:
        """How many experts of a layer the rows of a step have chosen, on all data-parallel ranks
        together: the mean over the layers of all stages. None: no step has run, or nobody knows.
        """
        chosen: dict[int, list[set[int]]] = {}  # by stage, of each of its layers
        for rank, answer in enumerate(answers):
            if answer.experts is None:
                return None
            stage = self._layout.of_rank(rank).pp_rank
            layers = chosen.setdefault(stage, [set() for _ in answer.experts])
            for layer, experts in zip(layers, answer.experts, strict=True):
                layer.update(experts)
        counts = [len(layer) for layers in chosen.values() for layer in layers]
        return sum(counts) / len(counts) if any(counts) else None

    def stage_milliseconds(self, answers: Sequence[DebugResult]) -> list[float]:
        """The time of a step on each stage, by its slowest rank; empty where one is not known."""
        slowest: dict[int, float] = {}
        for rank, answer in enumerate(answers):
            if answer.number is None:
                return []
            stage = self._layout.of_rank(rank).pp_rank
            slowest[stage] = max(1e3 * answer.number, slowest.get(stage, 0.0))
        return list(slowest.values())
