"""In a simulated engine, the adaptive draft length is as fast as the best fixed one."""

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product

import pytest

from negamax.scheduler.draft_length import STEPS_PER_CHOICE, AdaptiveDraftLength, make_rank_lengths
from negamax.scheduler.step import StepPlan, StepResult
from tests.layouts import full

LENGTHS, MOST = (1, 2, 3), 3
# Milliseconds of a step of MiniMax-M2 on four H200, by number of tokens.
# Source: docs/performance.md; times from 256 tokens on are assumed.
STEPS = ((1, 2.61), (4, 4.08), (16, 8.74), (64, 16.79), (100, 18.75), (256, 25.0), (512, 34.0))
DRAFT = 0.12  # ms
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 100, 128)
# acceptance rate by position, if all earlier draft tokens are accepted
CURVES = {
    "M2.5": (0.6, 0.58, 0.71),  # 2.2 tokens per step
    "M3": (0.78, 0.77, 0.75),  # 2.83
    "code": (0.95, 0.95, 0.95),
    "falling": (0.7, 0.3, 0.1),
    "low": (0.3, 0.3, 0.3),
    "none": (0.02, 0.02, 0.02),
}
Curve = tuple[float, ...]
Head = Callable[[float, random.Random], float]  # acceptance rate of a draft -> confidence
HEADS: dict[str, Head] = {
    "exact": lambda rate, rng: rate,
    "too high": lambda rate, rng: rate**0.5,
    "too low": lambda rate, rng: rate**2,
    "always high": lambda rate, rng: 0.9,
    "always low": lambda rate, rng: 0.02,
    "random": lambda rate, rng: rng.random(),
}


def accept(drafts: int, curve: Curve, rng: random.Random) -> int:
    accepted = 0
    while accepted < drafts and rng.random() < curve[accepted]:
        accepted += 1
    return accepted


def noisy(rng: random.Random, deviation: float) -> float:
    return math.exp(rng.gauss(0.0, deviation))


def seconds(rows: int, drafts: int) -> float:
    tokens = rows * (1 + drafts)
    right = max(1, bisect_left(STEPS, (tokens,)))
    (low, first), (high, last) = STEPS[right - 1], STEPS[right]
    return (first + (last - first) * (tokens - low) / (high - low) + DRAFT * drafts) / 1e3


def speeds(rows: int, curve: Curve) -> list[float]:
    tokens = [sum(math.prod(curve[:i]) for i in range(k + 1)) for k in range(MOST + 1)]
    return [rows * tokens[k] / seconds(rows, k) for k in range(MOST + 1)]


def measured(error: float, rng: random.Random) -> list[tuple[int, int, float]]:
    sizes = product((1, 2, 4, 8, 16, 32, 64, 128), range(MOST + 1))
    return [(rows, drafts, seconds(rows, drafts) * noisy(rng, error)) for rows, drafts in sizes]


def informed(error: float) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(LENGTHS, measured(error, random.Random(1)))


class Engine:
    """Run steps of `rows` rows with noisy times, and count tokens and seconds."""

    def __init__(self, policy: AdaptiveDraftLength, rows: int, *, noise: float) -> None:
        self.policy, self.rows, self.noise = policy, rows, noise
        self.rng = random.Random(rows)
        self.chosen: list[int] = []
        self.tokens, self.seconds = 0, 0.0
        self.head: Head | None = None
        self.rates: list[Curve] = []  # acceptance rates of each row's new drafts (head only)

    def propose(self, drafts: int, curve: Curve) -> None:
        """Draw acceptance rates around `curve`, and report the head's estimates of these rates."""
        assert self.head is not None
        draw, places = self.rng.betavariate, range(min(drafts + 1, MOST) if drafts else 0)
        self.rates = [tuple(draw(3 * p, 3 - 3 * p) for p in curve) for _ in range(self.rows)]
        told = [[self.head(rate, self.rng) for rate in row] for row in self.rates]
        shares = [sum(math.prod(row[: place + 1]) for row in told) / self.rows for place in places]
        self.policy.add_expected(self.rows, shares)

    def run(
        self, steps: int, curve: Curve, *, slower: Callable[[int], float] = lambda _: 1,
        is_timed: bool = True,
    ) -> None:  # fmt: skip
        for _ in range(steps):
            drafts = self.policy.choose(self.rows)
            self.chosen.append(drafts)
            rates = self.rates or [curve] * self.rows
            alike = Counter(accept(drafts, rate, self.rng) for rate in rates)
            for accepted, rows in alike.items():
                self.policy.add_rows(rows, drafts, accepted)
                self.tokens += rows * (1 + accepted)
            if self.head is not None:
                self.propose(drafts, curve)
            noise = self.rng.gauss(-(self.noise**2) / 2, self.noise)
            took = seconds(self.rows, drafts) * slower(len(self.chosen)) * math.exp(noise)
            self.seconds += took
            self.policy.end_step(self.rows, drafts if is_timed else None, took)

    def share_of_best(self, phases: Iterable[tuple[int, int, Curve]], *, is_timed: bool) -> float:
        """Run phases of (rows, steps, curve). Return the speed relative to the best length."""
        fixed = [0.0] * (MOST + 1)
        for self.rows, steps, curve in phases:
            before = self.tokens
            self.run(steps, curve, is_timed=is_timed)
            for k, speed in enumerate(speeds(self.rows, curve)):
                fixed[k] += (self.tokens - before) / speed
        return min(fixed) / self.seconds

    def share_by_choices(self, curve: Curve) -> float:
        """Return the speed divided by the best one, computed from mean speeds.

        The random acceptance of single tokens has no effect on the result.
        """
        fixed, took = speeds(self.rows, curve), [seconds(self.rows, k) for k in self.chosen]
        made = sum(fixed[k] * one for k, one in zip(self.chosen, took, strict=True))
        return made / sum(took) / max(fixed)

    def changes(self) -> int:
        return sum(one != other for one, other in zip(self.chosen, self.chosen[1:], strict=False))


GATED = [(1, "measured"), (4, "not measured"), (16, "measured"), (128, "not measured")]
REST = [case for case in product(BATCHES, ("measured", "not measured")) if case not in GATED]


@pytest.mark.parametrize(("rows", "start"), [*GATED, *(full(*case) for case in REST)])
def test_is_as_fast_as_the_best_fixed_number(rows: int, start: str) -> None:
    for name, curve in CURVES.items():
        times = measured(0.04, random.Random(f"{rows} {name}")) if start == "measured" else ()
        engine = Engine(AdaptiveDraftLength(LENGTHS, times), rows, noise=0.03)
        engine.run(1600 if rows < 16 else 800, curve)
        share = engine.tokens / engine.seconds / max(speeds(rows, curve))
        assert share > 0.97, (name, share, engine.chosen[-100:])


@pytest.mark.parametrize("rows", [full(1), 4, full(16), full(64)])
@pytest.mark.parametrize("head", HEADS)
def test_confidences_keep_the_speed(rows: int, head: str) -> None:
    """Check that measured acceptance corrects the confidences of a bad head."""
    for name, curve in CURVES.items():
        engine = Engine(informed(0.04), rows, noise=0.03)
        engine.head = HEADS[head]
        engine.run(1600 if rows < 16 else 800, curve)
        assert engine.share_by_choices(curve) > (0.96 if head == "random" else 0.97), name


@pytest.mark.parametrize("rows", [full(1), 8, full(32)])
@pytest.mark.parametrize("after", ["none", "falling"])
def test_confidences_follow_a_sudden_change(rows: int, after: str) -> None:
    lost = dict.fromkeys(("none", "exact", "too high", "too low"), 0.0)
    for head, seed in product(lost, range(8)):
        engine = Engine(informed(0.02), rows, noise=0.03)
        engine.rng.seed(seed)
        engine.head = HEADS.get(head)
        engine.run(200, CURVES["code"])
        engine.chosen.clear()
        engine.run(60, CURVES[after])
        lost[head] += 1.0 - engine.share_by_choices(CURVES[after])
    without = lost.pop("none")
    assert max(lost.values()) < 0.7 * without, (without, lost)


@pytest.mark.parametrize("rows", [1, full(4), 16, full(64)])
def test_drafting_rests_while_few_are_accepted_and_is_tried_again(rows: int) -> None:
    engine = Engine(informed(0.02), rows, noise=0.03)
    engine.run(400, CURVES["M3"])
    assert engine.chosen[100:].count(0) < 0.1 * 300
    engine.chosen.clear()
    engine.run(1500, CURVES["none"])
    assert engine.chosen.index(0) < 300
    assert engine.chosen[300:].count(0) > 0.9 * 1200
    assert any(engine.chosen[300:])  # The policy still tries drafts.
    engine.chosen.clear()
    engine.run(1500, CURVES["M3"])
    assert engine.chosen[-700:].count(0) < 0.1 * 700


@pytest.mark.parametrize("rows", [1, 8, full(64)])
def test_is_stable_despite_biased_measurements_and_noise(rows: int) -> None:
    times = [(r, k, t * (0.7 if k == 2 else 1.0)) for r, k, t in measured(0.0, random.Random(1))]
    best, changes = max(speeds(rows, CURVES["M3"])), []
    for seed in range(4):
        engine = Engine(AdaptiveDraftLength(LENGTHS, times), rows, noise=0.05)
        engine.rng.seed(seed)
        # As contexts grow, all steps take longer.
        engine.run(2000, CURVES["M3"], slower=lambda step: 1 + step / 2000)
        changes.append(engine.changes())
        late = [speeds(rows, CURVES["M3"])[k] for k in engine.chosen[1000:]]
        assert sum(late) / len(late) > 0.98 * best
    assert sum(changes) / len(changes) < 2000 / STEPS_PER_CHOICE / 5


def test_notices_a_host_that_takes_longer_than_the_gpu() -> None:
    """By GPU times alone, 3 draft tokens (3.4 tokens per step) are best; host times make 0 best."""
    gpu, host = (1.5, 1.7, 1.9, 2.1), (1.6, 4.0, 7.0, 9.8)  # ms
    times = [(rows, k, gpu[k] / 1e3) for rows in (1, 64, 256) for k in range(MOST + 1)]
    policy, rng = AdaptiveDraftLength(LENGTHS, times), random.Random(1)
    chosen: list[int] = []
    for _ in range(400):
        chosen.append(drafts := policy.choose(200))
        for _ in range(200):
            policy.add_rows(1, drafts, accept(drafts, (0.9,) * MOST, rng))
        policy.end_step(200, drafts, max(gpu[drafts], host[drafts]) / 1e3 * rng.uniform(0.9, 1.3))
    assert chosen.index(0) < 80 and chosen[80:].count(0) > 0.9 * 320


@pytest.mark.parametrize("rows", [1, full(4), 16])
def test_forgets_the_times_of_delayed_steps(rows: int) -> None:
    """Delay all steps on the host equally for a while, so that the longest drafts look best."""
    curve = CURVES["falling"]
    for seed in range(6):
        policy = AdaptiveDraftLength(LENGTHS, measured(0.05, random.Random(seed)))
        for _ in range(24):
            drafts = policy.choose(rows)
            policy.add_rows(rows, drafts, min(drafts, 1))
            policy.end_step(rows, drafts, 0.03)
        engine = Engine(policy, rows, noise=0.03)
        engine.run(100, curve)
        engine.tokens, engine.seconds = 0, 0.0
        engine.run(400, curve)
        share = engine.tokens / engine.seconds / max(speeds(rows, curve))
        assert share > 0.96, (seed, share, engine.chosen[-100:])


@pytest.mark.parametrize("most", [16, 64, full(200)])
def test_short_answers_of_a_small_model_need_few_trials(most: int) -> None:
    """Check batches that end after about thirty host-bound steps, where three drafts are best."""
    sizes, curve = product((1, 4, 16, 64, 256), range(MOST + 1)), CURVES["code"]
    tokens = [sum(0.95**place for place in range(k + 1)) for k in range(MOST + 1)]
    times = [(rows, k, (0.45 + 0.0012 * rows * (1 + k) + 0.09 * k) / 1e3) for rows, k in sizes]
    shares: list[list[float]] = [[], [], []]
    for seed in range(6):
        policy, rng = AdaptiveDraftLength(LENGTHS, times), random.Random(seed)
        for share in shares:
            took = used = 0.0
            left = [rng.randint(60, 140) for _ in range(most)]
            while left:
                rows, drafts = len(left), policy.choose(len(left))
                step = (0.9 + 0.01 * rows) * noisy(rng, 0.3) / 1e3
                for row in range(rows):
                    accepted = accept(drafts, curve, rng)
                    policy.add_rows(1, drafts, accepted)
                    left[row] -= 1 + accepted
                policy.end_step(rows, drafts, step)
                left = [missing for missing in left if missing > 0]
                took += step
                used += step * tokens[drafts] / tokens[MOST]
            share.append(used / took)
    means = [sum(share) / len(share) for share in shares]
    assert means[0] > 0.83 and min(means[1:]) > 0.95


@pytest.mark.parametrize("start", ["measured", "not measured"])
@pytest.mark.parametrize("name", ["code", "M3"])
def test_estimates_of_a_batch_size_serve_similar_sizes(name: str, start: str) -> None:
    """As 64 sequences end in turn, three times, the policy must not explore each size anew."""
    policy = informed(0.04) if start == "measured" else AdaptiveDraftLength(LENGTHS)
    rng, shares = random.Random(1), []
    for _ in range(3):
        ideal = took = 0.0
        for step in range(140):
            rows = 64 if step < 20 else max(1, int(64 * (1 - (step - 20) / 120) ** 2))
            drafts = policy.choose(rows)
            for _ in range(rows):
                policy.add_rows(1, drafts, accept(drafts, CURVES[name], rng))
            policy.end_step(rows, drafts, seconds(rows, drafts) * noisy(rng, 0.1))
            fixed = speeds(rows, CURVES[name])
            took += seconds(rows, drafts)
            ideal += seconds(rows, drafts) * fixed[drafts] / max(fixed)
        shares.append(ideal / took)
    assert shares[0] > 0.88 and min(shares[1:]) > 0.97


GOOD, BAD = (0.9, 0.9, 0.9), (0.05, 0.05, 0.05)


@pytest.mark.parametrize(("rows", "good", "bad"), [full(64, 100, 10), (16, 300, 30), (64, 50, 50)])
def test_drafting_resumes_soon_after_a_few_rejected_drafts(rows: int, good: int, bad: int) -> None:
    phases = [(rows, good, GOOD), (rows, bad, BAD)] * 5
    for seed in range(3):
        engine = Engine(informed(0.04), rows, noise=0.05)
        engine.rng.seed(seed)
        assert engine.share_of_best(phases, is_timed=True) > 0.96


def test_explores_alternating_sizes_and_chooses_only_given_lengths() -> None:
    """Alternate between 4 and 5 rows, as 9 sequences in a pipeline of two stages do."""
    engine = Engine(AdaptiveDraftLength(LENGTHS), 4, noise=0.03)
    phases = [(4, 1, CURVES["low"]), (5, 1, CURVES["low"])] * 600
    assert engine.share_of_best(phases, is_timed=True) > 0.97
    engine = Engine(AdaptiveDraftLength((1, 3)), 1, noise=0.03)
    engine.run(600, CURVES["M3"])
    assert set(engine.chosen) <= {0, 1, 3} and engine.chosen[-100:].count(3) > 80


@pytest.mark.parametrize("name", ["code", "low"])
def test_untimed_steps_make_no_trials(name: str) -> None:
    """Check steps that have a chunk of a prompt beside their generated tokens."""
    for rows in (1, 16):
        engine = Engine(informed(0.04), rows, noise=0.03)
        assert engine.share_of_best([(rows, 600, CURVES[name])], is_timed=False) > 0.97


def plan(scheduled: list[int], drafts: list[int], *, proposed: int) -> StepPlan:
    slots = list(range(len(drafts)))
    return StepPlan(0, [], [], [], slots, scheduled, drafts, [True] * len(slots), [], proposed)


@pytest.mark.parametrize(
    ("scheduled", "drafts", "proposed"),
    [
        ([4, 4, 4, 40], [3, 3, 3, 0], 3),  # The step also has a chunk of a prompt.
        ([4, 4, 1, 1], [3, 3, 0, 0], 3),  # Few rows have drafts.
        ([4, 4, 4, 4], [3, 3, 3, 3], 1),  # The step also verifies more than it proposes.
    ],
)
def test_ignores_other_steps(scheduled: list[int], drafts: list[int], proposed: int) -> None:
    policy, other = (informed(0.0) for _ in range(2))
    result = StepResult(0, [], {}, {}, {}, {0: 2, 1: 2})
    for _ in range(100):
        policy.record(plan(scheduled, drafts, proposed=proposed), result, 99.0)
        other.record(plan(scheduled, drafts, proposed=proposed), result, 0.0)
    assert policy._scores(4, tried=2.0) == other._scores(4, tried=2.0)
    other.record(plan([4, 4, 4, 4], [3, 3, 3, 3], proposed=3), result, 99.0)
    assert policy._scores(4, tried=2.0) != other._scores(4, tried=2.0)


def test_acceptance_is_that_of_the_rows() -> None:
    policy = AdaptiveDraftLength(LENGTHS)
    for _ in range(300):
        accepted = {0: 3, 1: 1, 2: 0}  # Two of the four rows have no accepted draft.
        result = StepResult(0, [], {}, {}, {}, accepted)
        policy.record(plan([4] * 4, [3] * 4, proposed=3), result, 0)
    assert policy.acceptance() == pytest.approx([0.5, 0.26, 0.26], abs=0.03)


def test_estimates_of_ranks_count_by_rows_and_end_with_the_drafts() -> None:
    policy = AdaptiveDraftLength(LENGTHS)
    for _ in range(100):  # One row has two accepted drafts; three rows have none.
        plans = [plan([4] * rows, [3] * rows, proposed=3) for rows in (1, 3)]
        one = StepResult(0, [], {}, {}, {}, {0: 2}, expected=[0.9, 0.8])
        others = StepResult(0, [], {}, {}, {}, expected=[0.1, 0])
        policy.record_all(list(zip(plans, (one, others), strict=True)), 0.0)
    assert policy.acceptance() == pytest.approx([0.25, 0.25, 0.03], abs=0.01)
    assert policy._places[0].estimate == pytest.approx((0.9 + 3 * 0.1) / 4)
    assert policy._places[1].estimate == pytest.approx(0.8 / (0.9 + 3 * 0.1))
    policy.record(plan([1], [0], proposed=0), StepResult(0, [], {}, {}, {}), 0.0)
    assert [place.estimate for place in policy._places] == [None] * MOST
    assert policy.acceptance() == pytest.approx([0.25, 0.25, 0.03], abs=0.03)


@pytest.mark.parametrize("name", ["code", "none"])
def test_data_parallel_ranks_do_not_slow_each_other_down(name: str) -> None:
    """A step takes the time of all ranks' tokens, so a rank's own drafts alone look cheap."""
    ranks, rng = make_rank_lengths(informed(0.04), 9), random.Random(1)
    times, tokens = [seconds(8, k) for k in range(MOST + 1)], [8, 0, 0, 0]
    for place in range(MOST):
        tokens[place + 1] = tokens[place] + 8 * math.prod(CURVES[name][: place + 1])
    best = max(made / took for made, took in zip(tokens, times, strict=True))
    made = took = 0.0
    for _ in range(400):
        drafts, *others = (rank.choose(at < 8) for at, rank in enumerate(ranks))
        assert set(others) == {drafts}
        for at, rank in enumerate(ranks):
            accepted = {0: accept(drafts, CURVES[name], rng)}
            is_idle, result = at == 8, StepResult(0, [], {}, {}, {}, accepted)
            columns = ([], []) if is_idle else ([1 + drafts], [drafts])
            rank.record(plan(*columns, proposed=0 if is_idle else drafts), result, times[drafts])
        made, took = made + tokens[drafts], took + times[drafts]
    assert made / took > 0.96 * best
