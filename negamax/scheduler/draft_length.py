"""Choose how many draft tokens each row verifies, to maximize tokens per second.

If each of `rows` rows verifies k drafts, the step takes T(rows, k) seconds and yields 1 + p1 + p1
p2 + ... tokens per row. p_i is the probability that a row accepts draft i after it has accepted all
earlier drafts. Committed steps update the estimates of T and p_i:

- T is the step time measured at start, multiplied by two factors: a factor for all k, which follows
  the growth of contexts, and a factor for each k. A Kalman filter estimates the logarithms of both
  factors. A draft length k with an uncertain factor gets a better score, so that the scheduler
  tries this k. The uncertainty of the factor for k grows in steps that do not use k.
- p_i is the share of accepted drafts among recently verified drafts, combined with a prior. The
  scheduler tries an unused k again after growing intervals, because the weight of old trials
  decays. If the draft model has a confidence head, p_i is the mean of the head's recent estimates,
  corrected by their mean error. With the confidence head, p_i adapts to changes after few trials.

The chosen lengths depend only on the sequence of calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from negamax.scheduler.step import StepPlan, StepResult

StepSeconds = tuple[int, int, float]  # (number of rows, drafts per row, seconds of a step)

# steps between choices of the draft length; odd, because steps may alternate between two batches
STEPS_PER_CHOICE = 5
_GAIN = 1.01  # factor by which the score of a new draft length must exceed the current score

# The weight of a trial (a verified draft) falls to a third after `_TRIALS` newer trials and at
# least `_TRIAL_STEPS` steps. The acceptance rate `_PRIOR` has the weight of `_PRIOR_TRIALS` trials.
_TRIALS, _TRIAL_STEPS, _PRIOR, _PRIOR_TRIALS = 192, 8, 0.6, 12.0
# Acceptance rates that the draft model estimates. The weight of an estimate falls to a third after
# `_ESTIMATES` newer rows and at least `_ESTIMATE_STEPS` steps. When estimates end, the last one
# counts as at least `_ESTIMATE_TRIALS` trials. From `_LEAST_BIAS_TRIALS` trials on, estimates are
# corrected by their mean error.
_ESTIMATES, _ESTIMATE_STEPS, _ESTIMATE_TRIALS = 32, 2, 48.0
_LEAST_BIAS_TRIALS, _BIAS_TRIALS = 32.0, 1024.0
_FIRST_REST, _LAST_REST = 16.0, 256.0  # first and largest value of `_Shares.rest`
_UNTIMED_STEPS = 256  # steps between trials of other draft lengths while step times are unusable.
# `_ERROR`: initial variance of the log step time with the longest drafts. The variance is large,
# because times measured at start exclude the host's work. Shorter drafts have a smaller variance.
# `_OWN_ERROR`: additional variance for each draft length. `_NOISE`: variance of one log time.
_ERROR, _OWN_ERROR, _NOISE = 0.6**2, 0.15**2, 0.1**2
_NEAR = 0.07**2  # variance added to each draft length if a new size class starts from another class
# bounds of the noise estimate, and number of steps over which it adapts
_LEAST_NOISE, _MOST_NOISE, _NOISE_STEPS = 0.005**2, 0.3**2, 32
_OUTLIERS = 3  # consecutive outlying step times after which all time estimates are reset
# initial variance of the common factor; increase per step of its variance, and of a length's own
_UNKNOWN, _DRIFT, _LENGTH_DRIFT = 1e2, 0.004**2, 0.0004**2
_ASSUMED_COST = 0.2  # time of a draft token / time of a step, if no times are measured
_TRIED = 2.0  # number of standard deviations to subtract from an uncertain log time


class DraftLength(Protocol):
    """Chooses the number of draft tokens per plan, using only `num_rows` and earlier calls."""

    def choose(self, num_rows: int) -> int:
        """Return the draft length, to verify and to propose, for a plan with `num_rows` decodes."""

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Record that `plan` took `seconds` (0: unknown). The caller records plans in order."""


class FixedDraftLength:
    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def choose(self, num_rows: int) -> int:
        return self._num_tokens

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        pass


class _Times:
    """Corrections to the logarithms of step times, for one size class. A correction is a number for
    all draft lengths plus a number for one length. A Kalman filter estimates these numbers.
    """

    def __init__(self, lengths: Sequence[int], step: int) -> None:
        self._lengths, self._latest = lengths, step
        self._reset()
        self._most = [row[i] for i, row in enumerate(self._covariances)]

    def _reset(self) -> None:
        self._noise, self._outliers = _NOISE, 0
        self._means = [0.0] * (len(self._lengths) + 1)  # a common correction, then one per length
        most = math.log1p(self._lengths[-1])
        # an error in the time of long drafts also changes the estimates of shorter drafts, but less
        shares = [math.log1p(length) / most for length in self._lengths]
        self._covariances = [[_UNKNOWN, *(0.0 for _ in shares)]]
        for i, share in enumerate(shares):
            row = [_ERROR * share * other for other in shares]
            row[i] += _OWN_ERROR
            self._covariances.append([0.0, *row])

    def extrapolate(self, step: int) -> _Times:
        """Return the initial state for a size class with half or twice the rows of this class."""
        times = _Times(self._lengths, step)
        times._means = self._means[:]
        times._covariances = [row[:] for row in self._covariances]
        for i, row in enumerate(times._covariances):
            row[i] += _NEAR if i else _UNKNOWN
        return times

    def error(self, index: int, other: int) -> float:
        """Return the standard deviation of correction `index` minus correction `other`."""
        rows, i, j = self._covariances, index + 1, other + 1
        return math.sqrt(max(0.0, rows[i][i] + rows[j][j] - 2.0 * rows[i][j]))

    def correct(self, index: int, found: float, *, step: int) -> None:
        """Update the corrections with a step. `found`: log(step time / expected step time)."""
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
        if self._outliers == _OUTLIERS:  # outliers affect all lengths: reset all estimates
            self._reset()
            self.correct(index, found, step=step)
            return
        error = min(bound, max(-bound, error))
        if expected < self._noise:  # `error` is mostly measurement noise
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
    """Counts verified and accepted drafts at one draft position. Old drafts have less weight."""

    accepted: float = 0.0
    trials: float = 0.0
    new_accepted: int = 0  # number of drafts accepted in the current step
    new_trials: int = 0
    tried: int = 0  # number of steps with trials since the last pause in trials
    untried: int = 0  # number of steps since the last trial
    rest: float = _FIRST_REST  # after this many steps without trials, old trials weigh a third
    estimate: float | None = None  # mean of the draft model's recent estimates
    latest: float = 0.0  # the draft model's latest estimate
    error: float = 0.0  # decayed sum of (number of accepted drafts - estimated number)
    bias: float = 0.0  # mean error per trial, over the last `bias_trials` trials
    bias_trials: float = 0.0

    def share(self, prior: float) -> float:
        """Return this position's acceptance rate. `prior`: the rate of the position before."""
        if self.estimate is None or self.bias_trials < _LEAST_BIAS_TRIALS:  # no usable estimate
            return (self.accepted + prior * _PRIOR_TRIALS) / (self.trials + _PRIOR_TRIALS)
        error = (self.error + self.bias * _PRIOR_TRIALS) / (self.trials + _PRIOR_TRIALS)
        return min(1.0, max(0.0, self.estimate + error))

    def expect(self, share: float | None, num_rows: int) -> None:
        """Record the draft model's mean estimate (None: no estimate) for `num_rows` rows."""
        if share is not None:
            weight = 1.0 - math.exp(-min(num_rows / _ESTIMATES, 1.0 / _ESTIMATE_STEPS))
            before = share if self.estimate is None else self.estimate
            self.estimate, self.latest = before + weight * (share - before), share
        elif self.estimate is not None:
            if self.bias_trials >= _LEAST_BIAS_TRIALS:  # convert the estimate to trials
                most = max(self.trials, _ESTIMATE_TRIALS)
                self.accepted, self.error = self.share(0.0) * most, self.bias * most
                self.trials = most
            self.estimate = None

    def end_step(self, num_rows: int) -> None:
        """Add the trials of a step with `num_rows` rows, and reduce the weight of old trials."""
        if self.new_trials:
            if self.untried > STEPS_PER_CHOICE:
                self.tried, self.rest = 0, min(2.0 * self.rest, _LAST_REST)
            self.tried, self.untried = self.tried + 1, 0
            if self.tried > 3 * STEPS_PER_CHOICE:  # drafts at this position are verified regularly
                self.rest = _FIRST_REST
            kept = math.exp(-min(self.new_trials / _TRIALS, 1.0 / _TRIAL_STEPS))
        else:
            self.untried += 1
            kept = math.exp(-min(1.0, num_rows / 4) / self.rest)
        self.accepted = self.accepted * kept + self.new_accepted
        self.trials = self.trials * kept + self.new_trials
        self.error *= kept
        if self.estimate is not None and self.new_trials:
            error = self.new_accepted - self.new_trials * self.latest
            self.error += error
            self.bias_trials = min(self.bias_trials + self.new_trials, _BIAS_TRIALS)
            share = min(1.0, self.new_trials / self.bias_trials)
            self.bias += share * (error / self.new_trials - self.bias)
        self.new_accepted = self.new_trials = 0


class AdaptiveDraftLength:
    """Chooses the number of drafts with the highest estimate of tokens per second."""

    def __init__(self, lengths: Sequence[int], measured: Sequence[StepSeconds] = ()) -> None:
        """`lengths`: numbers of drafts to choose from, ascending, without 0. `measured`: step
        times, in any order. If a draft length has no step time, all lengths use assumed times.
        """
        self._lengths = (0, *lengths)
        self._places = [_Shares() for _ in range(self._lengths[-1])]
        self._times: dict[int, _Times] = {}  # `_size_class` of the number of rows -> times
        self._measured = {drafts: list[tuple[int, float]]() for drafts in self._lengths}
        for rows, drafts, seconds in sorted(measured):
            if drafts in self._measured and seconds > 0.0:
                self._measured[drafts].append((rows, math.log(seconds)))
        self._is_measured = all(self._measured.values())
        # number of rows with estimates in this step; sum of these estimates by draft position
        self._num_expected, self._expected = 0, [0.0] * len(self._places)
        self._num_steps = 0
        self._timed_at = 0  # number of the latest step with a usable time
        self._chosen, self._chosen_for = len(lengths), -1
        self._tried_at = 0  # number of the latest step that considered another draft length

    def choose(self, num_rows: int) -> int:
        if not num_rows:  # no sequence is running
            return self._lengths[self._chosen]
        size = _size_class(num_rows)
        if size != self._chosen_for:
            scores = self._scores(num_rows, tried=0.0)
            self._chosen, self._chosen_for = scores.index(max(scores)), size
        if self._num_steps >= self._tried_at + STEPS_PER_CHOICE:
            self._tried_at = self._num_steps
            # if prompts make times unusable, trials of other draft lengths yield little information
            untimed = (self._num_steps - self._timed_at) % _UNTIMED_STEPS
            scores = self._scores(num_rows, tried=_TRIED if untimed < STEPS_PER_CHOICE else 0.0)
            best = scores.index(max(scores))
            if scores[best] > scores[self._chosen] * _GAIN:
                self._chosen = best
        return self._lengths[self._chosen]

    def acceptance(self) -> list[float]:
        """For each draft i, estimate the share of rows that accept all of the drafts 0 to i."""
        shares, share, prior = [], 1.0, _PRIOR
        for place in self._places:
            prior = place.share(prior)
            share *= prior
            shares.append(share)
        return shares

    def record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.record_all([(plan, result)], seconds)

    def record_all(self, ranks: Sequence[tuple[StepPlan, StepResult]], seconds: float) -> None:
        """Record one step of all ranks. All plans with rows propose the same number of drafts."""
        num_proposed, num_rows, is_even = 0, 0, True
        for plan, result in ranks:
            if not plan.slots:
                continue
            accepted, drafts = result.num_accepted, plan.num_draft_tokens
            rows = Counter((count, accepted.get(row, 0)) for row, count in enumerate(drafts))
            for (count, num_accepted), rows_alike in rows.items():
                self.add_rows(rows_alike, count, num_accepted)
            num_drafts, full = sum(drafts), len(drafts) * plan.num_proposed
            # a time is usable if no prompt tokens run and nearly all rows verify all planned drafts
            is_even &= plan.num_tokens == len(drafts) + num_drafts
            is_even &= 0.9 * full <= num_drafts <= full
            num_proposed, num_rows = plan.num_proposed, max(num_rows, len(drafts))
            if result.expected or not plan.num_proposed:
                self.add_expected(sum(plan.needs_sampling), result.expected)
        self.end_step(num_rows, num_proposed if is_even else None, seconds)

    def add_rows(self, num_rows: int, num_drafts: int, num_accepted: int) -> None:
        """Record rows that each verified `num_drafts` drafts and accepted `num_accepted` drafts."""
        for place in self._places[: min(num_drafts, num_accepted + 1)]:
            place.new_trials += num_rows
        for place in self._places[:num_accepted]:
            place.new_accepted += num_rows

    def add_expected(self, num_rows: int, shares: Sequence[float]) -> None:
        """Record the draft model's acceptance estimates for `num_rows` rows. `shares[i]` is the
        share of rows that the draft model expects to accept drafts 0 to i.
        """
        self._num_expected += num_rows
        for place, share in enumerate(shares[: len(self._places)]):
            self._expected[place] += num_rows * share

    def end_step(self, num_rows: int, num_drafts: int | None, seconds: float) -> None:
        """End a step. `num_drafts`: number of drafts per row; None if `seconds` is unusable."""
        self._num_steps += 1
        for place in self._places:
            place.end_step(num_rows)
        if self._num_expected:
            reached = float(self._num_expected)
            for place, share in zip(self._places, self._expected, strict=True):
                place.expect(share / reached if share > 0.0 else None, self._num_expected)
                reached = share
            self._num_expected, self._expected = 0, [0.0] * len(self._places)
        if num_drafts in self._measured and num_rows and seconds > 0.0:
            found = math.log(seconds) - self._log_seconds(num_rows, num_drafts)
            index, self._timed_at = self._lengths.index(num_drafts), self._num_steps
            self._times_of(num_rows).correct(index, found, step=self._num_steps)

    def _scores(self, num_rows: int, *, tried: float) -> list[float]:
        """Return tokens/s of each length, with times reduced by `tried` standard deviations."""
        times = self._times_of(num_rows)
        shares = self.acceptance()
        scores = []
        for index, drafts in enumerate(self._lengths):
            seconds = self._log_seconds(num_rows, drafts) + times._means[index + 1]
            seconds -= tried * times.error(index, self._chosen)
            scores.append((1.0 + sum(shares[:drafts])) * math.exp(-seconds))
        return scores

    def _times_of(self, num_rows: int) -> _Times:
        size = _size_class(num_rows)
        if size not in self._times:
            near = self._times.get(size + 1) or self._times.get(size - 1)
            step, lengths = self._num_steps, self._lengths
            self._times[size] = near.extrapolate(step) if near else _Times(lengths, step)
        return self._times[size]

    def _log_seconds(self, num_rows: int, drafts: int) -> float:
        """Return the logarithm of a step's time, which was measured at start or is assumed."""
        if not self._is_measured:
            return math.log(1.0 + _ASSUMED_COST * drafts)
        points = self._measured[drafts]
        right = bisect_left(points, num_rows, key=lambda point: point[0])
        if right == 0 or right == len(points):
            return points[min(right, len(points) - 1)][1]
        (low, first), (high, last) = points[right - 1], points[right]
        return first + (last - first) * (num_rows - low) / (high - low)


class RankDraftLength:
    """Chooses the draft length of one data-parallel rank. All ranks use the same length, because
    the rank with the most rows determines the time of a step.
    """

    def __init__(self, joint: AdaptiveDraftLength, ranks: list[RankDraftLength]) -> None:
        """Append this rank to `ranks`. All ranks plan and commit in the order of this list."""
        self._joint, self._ranks = joint, ranks
        self._num_rows = self._number = 0
        self._committed: tuple[StepPlan, StepResult] | None = None
        ranks.append(self)

    def choose(self, num_rows: int) -> int:
        """Return rank 0's choice, which uses the number of rows in each other rank's last plan."""
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


def make_rank_lengths(joint: AdaptiveDraftLength, num_ranks: int) -> Sequence[DraftLength]:
    ranks: list[RankDraftLength] = []
    for _ in range(num_ranks):
        RankDraftLength(joint, ranks)
    return ranks if num_ranks > 1 else [joint]


def _size_class(num_rows: int) -> int:
    """Map a number of rows to a size class: 1, 2, 3 to 4, 5 to 8, and so on."""
    return (num_rows - 1).bit_length()
