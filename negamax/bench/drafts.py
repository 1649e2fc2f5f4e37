"""Counts of draft tokens in a benchmark, read from an engine or a server's /metrics."""

import math
import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from negamax.engine.wire import EngineStats
from negamax.options.speculation import SpeculationConfig

_PREFIX = "vllm:spec_decode_num_"
_POSITION = re.compile(r"[0-9]{1,3}")
SYNTHETIC = "negamax:synthetic_acceptance_length"


@dataclass(frozen=True)
class DraftCounts:
    """Numbers of drafts, draft tokens and accepted draft tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    is_synthetic: bool = False  # whether the engine accepts draft tokens at random

    @staticmethod
    def of_stats(stats: EngineStats, speculation: SpeculationConfig | None) -> "DraftCounts":
        """Read the engine's counters."""
        rates = speculation.synthetic_acceptance_rates if speculation else None
        return DraftCounts(
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.accepted_per_position,
            is_synthetic=rates is not None,
        )

    @staticmethod
    def of_metrics(text: str) -> "DraftCounts":
        """Read the counters in Negamax's or vLLM's /metrics, summed over models and engines."""
        from prometheus_client.parser import text_string_to_metric_families  # this import is slow

        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        try:
            samples = [one for each in text_string_to_metric_families(text) for one in each.samples]
        except ValueError:  # the text has no Prometheus format
            samples = []
        for sample in samples:
            if not math.isfinite(sample.value):
                continue
            name = sample.name.removesuffix("_total")
            sums[name] = sums.get(name, 0.0) + sample.value
            place = sample.labels.get("position", "")
            if name == f"{_PREFIX}accepted_tokens_per_pos" and _POSITION.fullmatch(place):
                positions[int(place)] = positions.get(int(place), 0.0) + sample.value
        names = ("drafts", "draft_tokens", "accepted_tokens")
        drafts, draft_tokens, accepted = (int(sums.get(f"{_PREFIX}{name}", 0)) for name in names)
        places = range(max(positions, default=-1) + 1)
        accepted_at = tuple(int(positions.get(place, 0)) for place in places)
        return DraftCounts(drafts, draft_tokens, accepted, accepted_at, SYNTHETIC in sums)

    def subtract(self, earlier: "DraftCounts") -> "DraftCounts":
        return self._plus(earlier, -1)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return self._plus(other, 1)

    def _plus(self, other: "DraftCounts", sign: int) -> "DraftCounts":
        columns = zip_longest(self.per_position, other.per_position, fillvalue=0)
        return DraftCounts(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(own + sign * more for own, more in columns),
            self.is_synthetic or other.is_synthetic,
        )

    def summary(self) -> dict[str, Any]:
        """Return the counts under vLLM's names, or {} if there were no drafts."""
        if self.drafts <= 0 or self.draft_tokens <= 0:
            return {}
        length = 1.0 + self.accepted / self.drafts
        return {
            "spec_decode_acceptance_rate": 100.0 * self.accepted / self.draft_tokens,
            "spec_decode_acceptance_length": length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": [
                count / self.drafts for count in self.per_position
            ],
            "spec_decode_synthetic": self.is_synthetic,
        }


NO_DRAFTS = DraftCounts()
