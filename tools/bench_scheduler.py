"""Measure the scheduler: microseconds per step for plan and commit, with an instant worker.

    python tools/bench_scheduler.py [--steps 2000]

Steps overlap as in the engine: step N is planned before step N-1 is committed. The run "decode" has
n sequences with prompts of 500 to 1,000 tokens. Each sequence gets one token per step. The run
"mixed" has 100 concurrent requests of 100 to 2,000 prompt tokens and 20 to 200 output tokens. A
request arrives whenever another request ends. A third of the prompts begin with the same 256
tokens. The block size is 16, the prefix cache is on, and a step has at most 2,048 tokens.
"""

import argparse
import gc
import itertools
import random
from collections import deque
from dataclasses import replace
from time import perf_counter

from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import StepPlan, StepResult

VOCAB_SIZE = 200_000
EOS = 0  # never sampled


LIMITS = SchedulerLimits(
    max_num_seqs=100,
    max_num_batched_tokens=2048,
    max_model_len=100_000,
    block_size=16,
    num_blocks=20_000,
    enable_prefix_caching=True,
    max_queued_requests=10_000,
    eos_token_ids=frozenset({EOS}),
)


def make_request(
    rng: random.Random,
    index: int,
    *,
    prompt_len: int,
    max_tokens: int,
    prefix: tuple[int, ...] = (),
) -> GenerateRequest:
    body = [rng.randrange(1, VOCAB_SIZE) for _ in range(prompt_len - len(prefix))]
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=f"request {index}", prompt_token_ids=(*prefix, *body), sampling=sampling
    )


class Loop:
    """Overlap steps as the engine does, with an instant worker. Record microseconds per step."""

    def __init__(self, scheduler: GroupScheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.microseconds: list[float] = []
        self.tokens: list[int] = []
        self._in_flight: deque[tuple[list[StepPlan], list[StepResult]]] = deque()
        self._sampled = [rng.randrange(1, VOCAB_SIZE) for _ in range(4096)]

    def step(self) -> None:
        start = perf_counter()
        plans = self.scheduler.plan()
        planned = perf_counter()
        for plan in plans or ():
            sampled = self._sampled[plan.step_id % 1024 :][: sum(plan.needs_sampling)]
            self._in_flight.append(([plan], [StepResult(plan.step_id, sampled, {}, {}, {})]))
        commit_start = perf_counter()
        if len(self._in_flight) > 1 or (plans is None and self._in_flight):
            self.scheduler.commit(*self._in_flight.popleft())
        committed = perf_counter()
        self.microseconds.append((planned - start + committed - commit_start) * 1e6)
        self.tokens.append(plans[0].num_tokens if plans else 0)


def bench_decode(num_running: int, *, steps: int) -> Loop:
    rng = random.Random(num_running)
    num_blocks = num_running * (steps + 2000) // 16 + 1
    scheduler = GroupScheduler(replace(LIMITS, max_num_seqs=num_running, num_blocks=num_blocks))
    for index in range(num_running):
        prompt_len = rng.randint(500, 1000)
        request = make_request(rng, index, prompt_len=prompt_len, max_tokens=steps + 1000)
        scheduler.add(request)
    loop = Loop(scheduler, rng)
    while not loop.tokens or loop.tokens[-1] != num_running:
        loop.step()
    for _ in range(100):  # warm up
        loop.step()
    loop.microseconds.clear()
    loop.tokens.clear()
    for _ in range(steps):
        loop.step()
    assert loop.tokens == [num_running] * steps
    return loop


def bench_mixed(*, steps: int) -> Loop:
    rng = random.Random(0)
    scheduler = GroupScheduler(LIMITS)
    shared = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(256))
    requests = (
        make_request(
            rng,
            index,
            prefix=() if index % 3 else shared,
            prompt_len=rng.randint(100 if index % 3 else 300, 2000),
            max_tokens=rng.randint(20, 200),
        )
        for index in itertools.count()
    )
    loop = Loop(scheduler, rng)
    for _ in range(steps):
        while len(scheduler.sequences()) < 100:
            scheduler.add(next(requests))
        loop.step()
    return loop


def report(name: str, loop: Loop) -> None:
    ordered = sorted(loop.microseconds)
    median, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    mean_tokens = sum(loop.tokens) / len(loop.tokens)
    times = "".join(f"{each:>11.1f}" for each in (median, p99, ordered[-1]))
    print(f"{name:<24}{len(ordered):>8}{mean_tokens:>13.1f}{times}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds per scheduler step (plan + commit).")
    parser.add_argument("--steps", type=int, default=2000, help="timed steps per case")
    steps = parser.parse_args().steps
    times = "".join(f"{name:>11}" for name in ("median us", "p99 us", "max us"))
    print(f"{'case':<24}{'steps':>8}{'tokens/step':>13}{times}")
    for num_running in (1, 16, 100, 256):
        gc.collect()
        report(f"decode, {num_running} running", bench_decode(num_running, steps=steps))
    gc.collect()
    report("mixed, 100 running", bench_mixed(steps=steps))


if __name__ == "__main__":
    main()
