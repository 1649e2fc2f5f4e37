"""Count how many tokens select each expert, and move experts between ranks (EPLB).

A rebalance starts with the least balanced layer, and moves a few experts in each step. The
balancer's placement already includes moves that ranks have not made yet.
"""

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from negamax.base.errors import InvalidRequestError
from negamax.base.log import get_logger
from negamax.engine.wire import ExpertDump, ExpertStats
from negamax.options.eplb import EplbConfig
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.expert_placement import best_placement, next_moves, rank_loads
from negamax.scheduler.step import ExpertMove, ExpertStep

logger = get_logger(__name__)

COUNT_STEPS = 100  # Largest number of steps between two counts of expert selections.
# Move a layer's experts if the busiest rank's load falls at least by the fraction `LEAST_GAIN`.
LEAST_GAIN = 0.02


class ExpertBalancer:
    def __init__(
        self,
        layout: ParallelLayout,
        *,
        num_layers: int,
        num_experts: int,
        config: EplbConfig | None,
    ) -> None:
        """Count selections of experts. `config` sets when experts move; None means never."""
        self._config, self._num_ranks = config, layout.ep
        self._shape = num_layers, num_experts
        self._slots = [list(layout.expert_slots(num_experts, at)) for at in range(num_layers)]
        self._num_steps = 0
        # Selections of each expert since the ranks started; None before the first count.
        self._total: NDArray[np.int64] | None = None
        self._interval = COUNT_STEPS
        if config is not None:
            self._interval = min(COUNT_STEPS, config.window_size, config.step_interval)
        num_steps = config.window_size if config else COUNT_STEPS
        # Selections of each expert in each of the latest intervals between counts.
        self._recent: deque[NDArray[np.int64]] = deque(maxlen=-(-num_steps // self._interval))
        self._next_rebalance = config.step_interval if config else 0
        self._version = 0  # Number of steps so far that moved experts.
        self._due: deque[int] = deque()  # Layers that the current rebalance has not finished.
        self._loads = np.zeros(self._shape, dtype=np.int64)  # Selection counts for the rebalance.
        self._target: list[int] | None = None  # New placement of the first layer in `_due`.
        self._num_moved_before = 0
        self.stats = ExpertStats()
        # Copies of `_total` from the start of a recording and, after its end, from the end.
        self._record: list[NDArray[np.int64]] = []

    def direct(self) -> ExpertStep | None:
        """Return an `ExpertStep` if the next step moves experts or counts selections, else None."""
        self._num_steps += 1
        is_due = self._num_steps % self._interval == 1 % self._interval
        moves = self._next_moves() if self._due else []
        if not is_due and not moves:
            return None
        self._version += bool(moves)
        return ExpertStep(self._version, is_due, moves)

    def take(self, counts: bytes) -> None:
        """Update the statistics by `counts`, the selections of experts since the ranks started."""
        before, total = self._total, np.frombuffer(counts, dtype=np.int64).reshape(self._shape)
        self._total = total
        if before is None:
            return
        self._recent.append(total - before)
        now = self._balancedness(self._recent[-1])
        self.stats = msgspec.structs.replace(self.stats, balancedness=now)
        config = self._config
        if config is None:
            return
        if config.log_balancedness:
            logger.info("balancedness of experts: %.3f", now)
        if not self._due and self._num_steps >= self._next_rebalance:
            self._next_rebalance = self._num_steps + config.step_interval
            self._begin(config)

    def record(self, action: str, counts: bytes) -> ExpertDump | None:
        """Start, stop or dump a recording of expert selections. Raises `InvalidRequestError`."""
        now = np.frombuffer(counts, dtype=np.int64).reshape(self._shape)
        if action == "start":
            self._record = [now]
            return None
        if not self._record:
            raise InvalidRequestError(
                "no expert distribution recording was started",
                hint="start a recording first",
                code="no_expert_record",
            )
        if action == "stop":
            self._record = [self._record[0], now]
            return None
        recorded = [*self._record, now][1] - self._record[0]
        slots = [list(of_layer) for of_layer in self._slots]
        return ExpertDump(recorded.tolist(), slots, self._balancedness(recorded))

    def _begin(self, config: EplbConfig) -> None:
        self._loads = np.sum(self._recent, axis=0)
        if self._balancedness(self._loads) > config.min_rebalancing_utilization_threshold:
            return
        of_ranks = self._rank_loads(self._loads)
        excess = of_ranks.max(axis=1) - of_ranks.mean(axis=1)
        worst_first = np.argsort(-excess, kind="stable")
        self._due.extend(worst_first[excess[worst_first] > 0].tolist())
        self._num_moved_before = self.stats.num_moved

    def _next_moves(self) -> list[ExpertMove]:
        """Return the next moves of layer `_due[0]`, after computing its new placement if needed."""
        layer = self._due[0]
        slots = self._slots[layer]
        if self._target is None:
            loads = self._loads[layer].tolist()
            self._target = best_placement(loads, slots, self._num_ranks)
            before, after = (
                max(rank_loads(loads, each, self._num_ranks)) for each in (slots, self._target)
            )
            if after > (1 - LEAST_GAIN) * before:
                self._target = slots
        moves = next_moves(slots, self._target, self._num_ranks)
        if not moves:
            self._end_layer()
            return []
        moved = [slots[source] for source, _ in moves]
        for (_, target), expert in zip(moves, moved, strict=True):
            slots[target] = expert
        num_moved = self.stats.num_moved + len(moves)
        self.stats = msgspec.structs.replace(self.stats, num_moved=num_moved)
        return [ExpertMove(layer, source, target) for source, target in moves]

    def _end_layer(self) -> None:
        self._due.popleft()
        self._target = None
        num_moved = self.stats.num_moved - self._num_moved_before
        if self._due or not num_moved:
            return
        number = self.stats.num_rebalances + 1
        self.stats = msgspec.structs.replace(self.stats, num_rebalances=number)
        logger.info(
            "%d experts were moved; with the new placement, the balancedness of the last %d steps "
            "would have been %.3f",
            num_moved,
            len(self._recent) * self._interval,
            self._balancedness(self._loads),
        )

    def _balancedness(self, loads: NDArray[np.int64]) -> float:
        """Return sum(mean load of ranks) / sum(load of the busiest rank), with sums over layers."""
        of_ranks = self._rank_loads(loads)
        busiest = float(of_ranks.max(axis=1).sum())
        return float(of_ranks.mean(axis=1).sum()) / busiest if busiest else 1.0

    def _rank_loads(self, loads: NDArray[np.int64]) -> NDArray[np.float64]:
        """Convert loads of experts [layers, experts] to loads of ranks [layers, ranks]."""
        slots = np.array(self._slots)
        copies = np.zeros(self._shape)
        np.add.at(copies, (np.arange(len(slots))[:, None], slots), 1)
        shares = np.take_along_axis(loads / copies, slots, axis=1)
        return shares.reshape(len(slots), self._num_ranks, -1).sum(axis=2)
