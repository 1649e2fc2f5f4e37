"""How many draft tokens the rows of a step verify: as many as bring the most tokens per second.

A step of `rows` rows with k drafts each takes T(rows, k) and brings 1 + p1 + p1 p2 + ... tokens per
row, where p_i is how often draft i is right if those before it are. Both are estimated as steps are
committed:

- T: what was measured at start, times a factor for all k of about as many rows (contexts grow) and
  one for each k (measurements err, those of neighbouring k alike), states of a Kalman filter in the
  logarithm. The error that is left makes a length look faster than it is known to be, so that it is
  tried; steps without it let the error grow again.
- p_i: shares over the last trials, with a prior, which trials that are long ago make way for: a
  length that was given up, also drafting as a whole, is tried again, soon first, and then less and
  less often.

Same calls, same choices: nothing here depends on clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from negamax.scheduler.step import StepPlan, StepResult

StepSeconds = tuple[int, int, float]  # rows, drafts per row, seconds

# until another length may be tried; odd, as rows that take turns differ in their number
STEPS_PER_CHOICE = 5
_GAIN = 1.01  # that another length must promise

# acceptance: trials that count, and those of how many steps do in any case; the prior and its
# weight in trials; steps until old trials of a length that is not run are forgotten to a third, as
# it is given up first, and at most, with each vain try twice as many
_TRIALS, _TRIAL_STEPS, _PRIOR, _PRIOR_TRIALS = 192, 8, 0.6, 12.0
_FIRST_REST, _LAST_REST = 16.0, 256.0
_UNTIMED_STEPS = 256  # until a length is tried although times say nothing
# times, as variances of logarithms: of measured ones (of the GPU alone, and its host may be slower)
# and assumed ones, that of the longest drafts, which shorter ones share in part, and each length's
# own; of a step, what a step adds
_ERROR, _OWN_ERROR, _NOISE = 0.6**2, 0.15**2, 0.1**2
_NEIGHBOUR = 0.07**2  # what half or twice as many rows may differ by
_LEAST_NOISE, _MOST_NOISE, _NOISE_STEPS = 0.005**2, 0.3**2, 32
_OUTLIERS = 3  # steps in a row, beyond what errors explain, behind which times are reset
_UNKNOWN, _DRIFT, _LENGTH_DRIFT = 1e2, 0.004**2, 0.0004**2
_ASSUMED_COST = 0.2  # of a draft, as a share of a step, where nothing was measured
_TRIED = 2.0  # standard deviations by which a length that is not known well looks faster


class DraftLength(Protocol):
    """Chooses the number for each plan. It may depend on earlier calls alone."""

    def choose(self, num_rows: int) -> int:
        """Tokens for each of up to `num_rows` generating rows, from 0 to the limit: that many are
        verified, as far as the step before has proposed them, and proposed for the step behind.
        """

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """`plan` has run, in so many seconds, 0 where nobody knows; called for all plans, in
        order.
        """


class FixedDraftLength:
    """Always the same number."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def choose(self, num_rows: int) -> int:
        return self._num_tokens

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        pass


class _Times:
    """What is to be added to the logarithms of the times of steps with about as many rows: a sum of
    one number for all lengths and one for each, which a Kalman filter estimates. Single writer:
    `AdaptiveDraftLength`.
    """

    def __init__(self, lengths: Sequence[int], *, step: int) -> None:
        self._lengths, self._latest = lengths, step
        self._reset()
        self._most = [row[i] for i, row in enumerate(self._covariances)]

    def _reset(self) -> None:
        """Know what is known before a step was seen."""
        self._noise, self._outliers = _NOISE, 0
        self._means = [0.0] * (len(self._lengths) + 1)  # the first is that for all
        # what is wrong about long drafts is wrong about shorter ones, too, but less so
        most = math.log1p(self._lengths[-1])
        shares = [math.log1p(length) / most for length in self._lengths]
        self._covariances = [[_UNKNOWN, *(0.0 for _ in shares)]]
        for i, share in enumerate(shares):
            row = [_ERROR * share * other for other in shares]
            row[i] += _OWN_ERROR
            self._covariances.append([0.0, *row])

    def beside(self, *, step: int) -> _Times:
        """What is known of about half or twice as many rows of which no step was seen."""
        times = _Times(self._lengths, step=step)
        times._means = self._means[:]
        times._covariances = [row[:] for row in self._covariances]
        for i, row in enumerate(times._covariances):
            row[i] += _NEIGHBOUR if i else _UNKNOWN
        return times

    def of_length(self, index: int) -> float:
        """The number of a length."""
        return self._means[index + 1]

    def error(self, index: int, other: int) -> float:
        """Standard deviation of the difference between the numbers of two lengths."""
        rows, i, j = self._covariances, index + 1, other + 1
        return math.sqrt(max(0.0, rows[i][i] + rows[j][j] - 2.0 * rows[i][j]))

    def correct(self, index: int, found: float, *, step: int) -> None:
        """A step of a length took `found` more than was measured or assumed."""
        rows, own, passed = self._covariances, index + 1, step - self._latest
        self._latest = step
        rows[0][0] = min(_UNKNOWN, rows[0][0] + passed * _DRIFT)
        for i in range(1, len(rows)):
            drifted = min(self._most[i], rows[i][i] + passed * _LENGTH_DRIFT)
            rows[i][i] = max(rows[i][i], drifted)
        gains = [row[0] + row[own] for row in rows]
        expected = gains[0] + gains[own]
        variance, error = expected + self._noise, found - self._means[0] - self._means[own]
        bound = 3.0 * math.sqrt(variance)
        self._outliers = self._outliers + 1 if abs(error) > bound else 0
        if self._outliers == _OUTLIERS:  # what bounds steps has changed, and so have all lengths
            self._reset()
            self.correct(index, found, step=step)
            return
        error = min(bound, max(-bound, error))
        if expected < self._noise:  # the error is that of the step
            noise = self._noise + (error * error - variance) / _NOISE_STEPS
            self._noise = min(_MOST_NOISE, max(_LEAST_NOISE, noise))
        for row, gain in zip(rows, gains, strict=True):
            for i, other in enumerate(gains):
                row[i] -= gain * other / variance
        self._means = [
            mean + gain / variance * error for mean, gain in zip(self._means, gains, strict=True)
        ]


@dataclass
class _Shares:
    """How often one place of a draft was right, of the trials that count."""

    right: float = 0.0
    trials: float = 0.0
    new_right: int = 0  # in the step under way
    new_trials: int = 0
    tried: int = 0  # steps with trials since it was given up, and those without behind them
    untried: int = 0
    rest: float = _FIRST_REST  # steps until trials are forgotten to a third

    def end_step(self, num_rows: int) -> None:
        """The step of the new trials had so many rows; without trials old ones are forgotten."""
        if self.new_trials:
            if self.untried > STEPS_PER_CHOICE:
                self.tried, self.rest = 0, min(2.0 * self.rest, _LAST_REST)
            self.tried, self.untried = self.tried + 1, 0
            if self.tried > 3 * STEPS_PER_CHOICE:  # more than a try
                self.rest = _FIRST_REST
            kept = math.exp(-min(self.new_trials / _TRIALS, 1.0 / _TRIAL_STEPS))
        else:
            self.untried += 1
            kept = math.exp(-min(1.0, num_rows / 4) / self.rest)
        self.right = self.right * kept + self.new_right
        self.trials = self.trials * kept + self.new_trials
        self.new_right = self.new_trials = 0


class AdaptiveDraftLength:
    """The number that brings the most tokens per second, as far as is known."""

    def __init__(self, lengths: Sequence[int], measured: Sequence[StepSeconds] = ()) -> None:
        """`lengths`: the numbers to choose from beside 0, ascending. `measured`: times of steps by
        rows and drafts, in any order; where some lengths have none, all have assumed ones.
        """
        self._lengths = (0, *lengths)
        self._places = [_Shares() for _ in range(self._lengths[-1])]
        self._times: dict[int, _Times] = {}  # by `_size_class`
        self._measured: dict[int, list[tuple[int, float]]] = {
            drafts: [] for drafts in self._lengths
        }
        for rows, drafts, seconds in sorted(measured):
            if drafts in self._measured and seconds > 0.0:
                self._measured[drafts].append((rows, math.log(seconds)))
        self._is_measured = all(self._measured.values())
        self._num_steps = 0
        self._timed_at = 0  # the latest step whose time has said something
        self._chosen, self._chosen_for = len(lengths), -1
        self._tried_at = 0  # the step at which another length could be tried

    def choose(self, num_rows: int) -> int:
        if not num_rows:  # a first step of prompts
            return self._lengths[self._chosen]
        size = _size_class(num_rows)
        if size != self._chosen_for:
            scores = self._scores(num_rows, tried=0.0)
            self._chosen, self._chosen_for = scores.index(max(scores)), size
        if self._num_steps >= self._tried_at + STEPS_PER_CHOICE:
            self._tried_at = self._num_steps
            # while times say nothing, beside prompts, trying costs and is hardly of use
            untimed = (self._num_steps - self._timed_at) % _UNTIMED_STEPS
            scores = self._scores(num_rows, tried=_TRIED if untimed < STEPS_PER_CHOICE else 0.0)
            best = scores.index(max(scores))
            if scores[best] > scores[self._chosen] * _GAIN:
                self._chosen = best
        return self._lengths[self._chosen]

    def acceptance(self) -> list[float]:
        """For each place in the draft, the estimated share of drafts that are right up to there."""
        shares, share, prior = [], 1.0, _PRIOR
        for place in self._places:
            prior = (place.right + prior * _PRIOR_TRIALS) / (place.trials + _PRIOR_TRIALS)
            share *= prior
            shares.append(share)
        return shares

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.record_all([(plan, result)], seconds)

    def record_all(self, ranks: Sequence[tuple[StepPlan, StepResult]], seconds: float) -> None:
        """A step of data-parallel ranks, each with its plan of the same number, or without rows."""
        num_proposed, num_rows, is_even = 0, 0, True
        for plan, result in ranks:
            if not plan.slots:
                continue
            accepted, drafts = result.num_accepted, plan.num_draft_tokens
            rows = Counter((count, accepted.get(row, 0)) for row, count in enumerate(drafts))
            for (count, right), rows_alike in rows.items():
                self.add_rows(rows_alike, count, right)
            num_drafts, full = sum(drafts), len(drafts) * plan.num_proposed
            # nothing but generated tokens, and in nearly all rows as many drafts as proposed anew
            is_even &= plan.num_tokens == len(drafts) + num_drafts
            is_even &= 0.9 * full <= num_drafts <= full
            num_proposed, num_rows = plan.num_proposed, max(num_rows, len(drafts))
        self.end_step(num_rows, num_proposed if is_even else None, seconds)

    def add_rows(self, num_rows: int, num_drafts: int, num_accepted: int) -> None:
        """So many rows of a step verified `num_drafts` each, of which the first `num_accepted` were
        right.
        """
        for place in self._places[: min(num_drafts, num_accepted + 1)]:
            place.new_trials += num_rows
        for place in self._places[:num_accepted]:
            place.new_right += num_rows

    def end_step(self, num_rows: int, num_drafts: int | None, seconds: float) -> None:
        """The step of these rows had `num_rows` in all. Each verified `num_drafts` in `seconds`;
        None: not each, or it ran other tokens too, and its time says nothing.
        """
        self._num_steps += 1
        for place in self._places:
            place.end_step(num_rows)
        if num_drafts in self._measured and num_rows and seconds > 0.0:
            found = math.log(seconds) - self._log_seconds(num_rows, num_drafts)
            index, self._timed_at = self._lengths.index(num_drafts), self._num_steps
            self._times_of(num_rows).correct(index, found, step=self._num_steps)

    def _scores(self, num_rows: int, *, tried: float) -> list[float]:
        """Tokens per second of each length, up to a factor that all have; the chosen one's are as
        known, those of others as they may be, `tried` standard deviations faster.
        """
        times = self._times_of(num_rows)
        shares = self.acceptance()
        scores = []
        for index, drafts in enumerate(self._lengths):
            seconds = self._log_seconds(num_rows, drafts) + times.of_length(index)
            seconds -= tried * times.error(index, self._chosen)
            scores.append((1.0 + sum(shares[:drafts])) * math.exp(-seconds))
        return scores

    def _times_of(self, num_rows: int) -> _Times:
        size = _size_class(num_rows)
        if size not in self._times:
            near = next((near for near in (size + 1, size - 1) if near in self._times), None)
            self._times[size] = (
                _Times(self._lengths, step=self._num_steps)
                if near is None
                else self._times[near].beside(step=self._num_steps)
            )
        return self._times[size]

    def _log_seconds(self, num_rows: int, drafts: int) -> float:
        """As measured, between two numbers of rows by their distance, or as assumed."""
        if not self._is_measured:
            return math.log(1.0 + _ASSUMED_COST * drafts)
        points = self._measured[drafts]
        right = bisect_left(points, num_rows, key=lambda point: point[0])
        if right == 0 or right == len(points):
            return points[min(right, len(points) - 1)][1]
        (low, first), (high, last) = points[right - 1], points[right]
        return first + (last - first) * (num_rows - low) / (high - low)


class RankDraftLength:
    """The part of one data-parallel rank in a number that is the same for all. Their steps take
    what the largest takes, so that each by itself would find drafts cheap that slow all down.
    """

    def __init__(self, joint: AdaptiveDraftLength, ranks: list[RankDraftLength]) -> None:
        """Becomes the next of the `ranks`, which plan and commit in their order."""
        self._joint, self._ranks = joint, ranks
        self._num_rows = self._number = 0
        self._committed: tuple[StepPlan, StepResult] | None = None
        ranks.append(self)

    def choose(self, num_rows: int) -> int:
        """Later ranks have as many rows as in the step before."""
        self._num_rows = num_rows
        first = self._ranks[0]
        if self is first:
            self._number = self._joint.choose(max(rank._num_rows for rank in self._ranks))
        return first._number

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._committed = plan, result
        if self is self._ranks[-1]:
            committed = [rank._committed for rank in self._ranks if rank._committed]
            self._joint.record_all(committed, seconds)


def for_ranks(joint: AdaptiveDraftLength, num_ranks: int) -> Sequence[DraftLength]:
    """`joint` for each of so many data-parallel ranks."""
    ranks: list[RankDraftLength] = []
    for _ in range(num_ranks):
        RankDraftLength(joint, ranks)
    return ranks if num_ranks > 1 else [joint]


def _size_class(num_rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ..."""
    return (num_rows - 1).bit_length()
