"""Measurements of engines whose ranks run different layers or requests."""

from collections.abc import Sequence
from typing import Any

from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import DebugResult


def sizes(options: EngineOptions) -> dict[str, int]:
    """Return the tensor-parallel size, and the pipeline and data-parallel sizes above 1."""
    given = {
        name: getattr(options, name) for name in ("pipeline_parallel_size", "data_parallel_size")
    }
    used = {name: size for name, size in given.items() if size > 1}
    return {"tensor_parallel_size": options.tensor_parallel_size, **used}


def label(result: dict[str, Any]) -> str:
    """Return a label such as "PP2 DP2 TP1" for a result that contains `sizes`."""
    names = (("PP", "pipeline"), ("DP", "data"), ("TP", "tensor"))
    keys = ((word, f"{name}_parallel_size") for word, name in names)
    return " ".join(f"{word}{result[key]}" for word, key in keys if key in result)


class Group:
    """Combines the measurements of an engine's ranks."""

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout

    def step_rows(self, num_requests: int) -> int:
        """Return the sequences per step, which is `num_requests` / pipeline stages, rounded up."""
        return -(-num_requests // self._layout.pp)

    def rank_rows(self, num_requests: int) -> int:
        """Return the number of sequences per step on the most loaded data-parallel rank."""
        return -(-self.step_rows(num_requests) // self._layout.dp)

    def distinct_experts(self, answers: Sequence[DebugResult]) -> float | None:
        """Return the mean number of distinct experts per layer and step; None if not counted."""
        chosen: dict[int, list[set[int]]] = {}  # stage -> selected experts of each layer
        for rank, answer in enumerate(answers):
            if answer.experts is None:
                return None
            stage = self._layout.replace_rank(rank).pp_rank
            layers = chosen.setdefault(stage, [set() for _ in answer.experts])
            for layer, experts in zip(layers, answer.experts, strict=True):
                layer.update(experts)
        counts = [len(layer) for layers in chosen.values() for layer in layers]
        return sum(counts) / len(counts) if any(counts) else None

    def stage_milliseconds(self, answers: Sequence[DebugResult]) -> list[float]:
        """Return the step time of each stage's slowest rank, or [] if a rank reports no time."""
        slowest: dict[int, float] = {}
        for rank, answer in enumerate(answers):
            if answer.number is None:
                return []
            stage = self._layout.replace_rank(rank).pp_rank
            slowest[stage] = max(1e3 * answer.number, slowest.get(stage, 0.0))
        return list(slowest.values())
