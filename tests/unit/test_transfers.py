"""Let two engines prefill and decode for each other while random faults happen.

The workers record the content of every cell, so that a wrong copy is detected.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from negamax.engine.core.transfer_wire import (
    CloseLease,
    LeaseClosed,
    LeaseOpened,
    LeaseRefused,
    Message,
    OpenLease,
    RenewLeases,
)
from negamax.engine.core.transfers import Peer, Transfers
from negamax.options.transfer import FAIL, RECOMPUTE, KvTransferConfig
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest, ImageInput, RemotePrompt
from negamax.scheduler.shared_blocks import hash_prompt
from negamax.scheduler.step import SequenceUpdate, StepPlan, StepResult
from negamax.worker.lane_wire import ImportBlocks, ImportDone
from tests.unit.plan_support import RankScheduler, make_limits, make_request, make_result
from tests.unit.test_host_tier import HostWorker
from tests.unit.test_scheduler_traces import EOS_IDS, expected_output, request_of

NAMES = ("left", "right")
LIMITS = {"max_model_len": 50, "block_size": 2, "num_blocks": 40, "eos_token_ids": EOS_IDS}


@dataclass
class Copy:
    """Describe an import that reads its blocks one by one."""

    source: str
    command: ImportBlocks
    num_read: int = 0


class Engine:
    """Run one engine without sockets and ranks. `World.network` carries the messages."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name = world, name
        limits = make_limits(**LIMITS, num_host_blocks=world.rng.choice((26, 60)))
        self.limits = limits
        self.scheduler = GroupScheduler(limits)
        self.worker = HostWorker(limits.block_size, identities=world.identities)
        self.in_flight: deque[tuple[list[StepPlan], StepResult | None]] = deque()
        self.copies: list[Copy] = []
        self.is_frozen_until = 0.0
        policy = world.rng.choice((FAIL, RECOMPUTE))
        config = KvTransferConfig(failure_policy=policy, lease_seconds=8.0, timeout_seconds=30.0)
        (rank,) = self.scheduler.ranks
        self.transfers = Transfers(
            config,
            rank.shared,
            block_size=limits.block_size,
            engine_id=f"{name} {number}",
            fingerprint="model",
            lanes=[f"{name} {number}"],
            send=self.send,
            copy=self.copy,
        )

    def send(self, peer: Peer, message: Message) -> None:
        to = peer.decode() if isinstance(peer, bytes) else peer[0]
        self.world.network.append((self, to, isinstance(peer, tuple), message))

    def copy(self, command: ImportBlocks) -> None:
        self.copies.append(Copy(command.lanes[0], command))

    def add(self, request: GenerateRequest) -> None:
        self.transfers.begin(request, now=self.world.now)

    def step(self) -> list[SequenceUpdate]:
        """Run one round of the engine's loop, like `EngineLoop.step`."""
        transfers, rng, updates = self.transfers, self.world.rng, []
        transfers.advance(now=self.world.now)
        for request in transfers.ready:
            self.scheduler.add(request)
        transfers.ready.clear()
        for name, _ in transfers.failed:
            updates.append(SequenceUpdate(name, [], finish_reason="error", error="not arrived"))
        transfers.failed.clear()
        plans = self.scheduler.plan()
        if plans is not None:
            lose = rng.random() < 0.01
            bad = frozenset(row for row in range(len(plans[0].slots)) if rng.random() < 0.01)
            result = self.worker.execute(plans[0], lose=lose, bad_rows=bad)
            self.in_flight.append((plans, None if lose else result))
        elif not self.in_flight:
            assert transfers.shared.holds_kv_blocks or not self.scheduler.has_unfinished, "stuck"
        while len(self.in_flight) > (1 if plans is not None else 0):
            plans_of, found = self.in_flight.popleft()
            updates += (
                self.scheduler.fail(plans_of, "lost")
                if found is None
                else self.scheduler.commit(plans_of, [found])
            )
        transfers.take_updates(updates)
        return updates

    def abort(self, name: str) -> None:
        if self.transfers.abort(name):
            self.world.end(self, SequenceUpdate(name, [], finish_reason="abort"))
        elif (update := self.scheduler.end(name, "abort")) is not None:
            self.transfers.take_updates([update])
            self.world.end(self, update)

    def check_empty(self) -> None:
        (rank,) = self.scheduler.ranks
        assert rank.num_free_blocks == self.limits.num_blocks
        assert rank.host.blocks.num_free + len(rank.host._new_stores) == rank.host.num_blocks
        transfers = self.transfers
        assert not (transfers._pulls or transfers._copies or transfers._held or self.copies)
        assert not (transfers._prefills or transfers._waiting or rank.shared.leases)


@dataclass
class Task:
    """Describe a request as its router sees it: one engine prefills, then the other one decodes."""

    request: GenerateRequest
    source: str
    target: str
    uses_room: bool
    lease_id: str
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    prefilled: str = ""  # id of the engine that prefilled


class World:
    """Hold both engines, their network and their router."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.now = 0.0
        self.identities: dict[tuple[int, int], int] = {}
        self.network: list[tuple[Engine, str, bool, Message]] = []
        self.engines = {name: Engine(self, name, 0) for name in NAMES}
        self.tasks: dict[str, Task] = {}
        self.to_decode: list[Task] = []
        self.counts: Counter[str] = Counter()

    def run(self, num_actions: int) -> None:
        actions = (
            *(self.step,) * 12,
            *(self.deliver,) * 8,
            *(self.read,) * 8,
            *(self.route,) * 2,
            self.start,
            self.start,
            self.wait,
            self.trouble,
        )
        for _ in range(num_actions):
            self.rng.choice(actions)()
        for _ in range(100_000):  # everything ends
            self.now += 0.05
            for action in (self.step, self.deliver, self.read, self.route):
                action()
            if not (self.network or self.to_decode or any(map(self.is_busy, NAMES))):
                break
        for engine in self.engines.values():
            engine.check_empty()
            for name, count in vars(engine.transfers.counts).items():
                self.counts[name] += count
        for task in self.tasks.values():
            expected, *reasons = expected_output(task.request, make_limits(**LIMITS))
            assert task.reason, f"{task} did not end"
            if task.reason in ("abort", "error"):
                assert task.tokens == expected[: len(task.tokens)]
            else:
                assert (task.tokens, task.reason) == (expected, reasons[0])
            self.counts[task.reason] += 1

    def is_busy(self, name: str) -> bool:
        engine = self.engines[name]
        transfers = engine.transfers
        return bool(
            engine.scheduler.has_unfinished
            or engine.in_flight
            or engine.copies
            or transfers.has_timers
            or transfers.has_work
        )

    def start(self) -> None:
        source, target = self.rng.sample(NAMES, 2)
        request = request_of(self.seed * 1_000 + len(self.tasks), make_limits(**LIMITS))
        name, uses_room = f"{request.request_id} {len(self.tasks)}", self.rng.random() < 0.3
        if len([1 for task in self.tasks.values() if not task.reason]) > 12:
            return
        sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
        request = msgspec.structs.replace(request, request_id=name, sampling=sampling)
        # A worker samples each position of a seed once, so the two engines get two seeds.
        task = Task(request, source, target, uses_room, f"lease {len(self.tasks)}")
        self.tasks[name] = task
        once = msgspec.structs.replace(
            sampling, max_tokens=1, min_tokens=0, seed=10**6 + len(self.tasks)
        )
        prefill = msgspec.structs.replace(
            request, request_id=f"{name} prefill", sampling=once, lease_id=task.lease_id
        )
        if uses_room:
            self.decode(task, "")
        self.engines[source].add(prefill)

    def decode(self, task: Task, engine_id: str) -> None:
        remote = RemotePrompt(task.source, 1, task.lease_id, engine_id)
        self.engines[task.target].add(msgspec.structs.replace(task.request, remote=remote))

    def route(self) -> None:
        if self.to_decode and self.rng.random() < 0.6:
            task = self.to_decode.pop(self.rng.randrange(len(self.to_decode)))
            self.decode(task, task.prefilled)

    def step(self) -> None:
        engine = self.engines[self.rng.choice(NAMES)]
        if engine.is_frozen_until > self.now:
            return
        for update in engine.step():
            self.end(engine, update)

    def end(self, engine: Engine, update: SequenceUpdate) -> None:
        name = update.request_id.removesuffix(" prefill")
        task = self.tasks[name]
        if name == update.request_id:
            task.tokens += update.token_ids
            task.reason = update.finish_reason or ""
        elif not task.uses_room and update.finish_reason in ("stop", "length"):
            task.prefilled = engine.transfers.engine_id
            self.to_decode.append(task)
        elif not task.uses_room and update.finish_reason is not None:
            task.reason = update.finish_reason

    def deliver(self) -> None:
        """Deliver the oldest message between a random pair of engines.

        A later message of another pair may arrive first.
        """
        if not self.network:
            return
        first = self.network[self.rng.randrange(len(self.network))]
        same = next(one for one in self.network if one[:3] == first[:3])
        self.network.remove(same)
        sender, name, is_request, message = same
        if sender is not self.engines[sender.name]:
            return  # The sender is dead.
        target, peer = self.engines[name].transfers, (sender.name, 1)
        target.handle(sender.name.encode() if is_request else peer, message, now=self.now)

    def read(self) -> None:
        """Copy the current content of one block of a random import."""
        engine = self.engines[self.rng.choice(NAMES)]
        if not engine.copies:
            return
        copy = self.rng.choice(engine.copies)
        source = next(
            (one for one in self.engines.values() if one.transfers.lanes == [copy.source]), None
        )
        command, problem = copy.command, "" if source else "it is gone"
        if self.rng.random() < 0.01:
            problem = "the network failed"
        if not problem:
            assert source is not None
            place, remote = command.places[copy.num_read], command.remote_places[copy.num_read]
            for at in range(engine.limits.block_size):
                engine.worker.host[place, at] = source.worker.host.get((remote, at), -5)
            copy.num_read += 1
        if problem or copy.num_read == len(command.places):
            engine.copies.remove(copy)
            engine.transfers.take_copied(ImportDone(command.number, problem), now=self.now)

    def wait(self) -> None:
        self.now += self.rng.choice((0.1, 0.5, 0.5, 2.0))

    def trouble(self) -> None:
        engine, kind = self.engines[self.rng.choice(NAMES)], self.rng.random()
        if kind < 0.5 and self.tasks:
            name = self.rng.choice([*self.tasks][-12:]) + self.rng.choice(("", " prefill"))
            engine.abort(name)
        elif kind < 0.6:
            engine.scheduler.reset_prefix_cache()
        elif kind < 0.7:  # The leases of other engines may expire while this engine is frozen.
            engine.is_frozen_until = self.now + self.rng.uniform(0, 12)
        elif kind < 0.76:
            self.replace(engine)

    def replace(self, engine: Engine) -> None:
        """Let the engine die, and start another one at its address."""
        self.counts["deaths"] += 1
        self.network = [one for one in self.network if one[0] is not engine]
        live = {sequence.request_id for sequence in engine.scheduler.sequences()}
        live |= {*engine.transfers.request_ids(), *engine.transfers._prefills}
        live |= {request.request_id for request in engine.transfers.ready}
        live |= {name for name, _ in engine.transfers.failed}
        for name in sorted(live):
            if not self.tasks[name.removesuffix(" prefill")].reason:
                self.end(engine, SequenceUpdate(name, [], finish_reason="error"))
        self.engines[engine.name] = Engine(self, engine.name, self.counts["deaths"])
        self.engines[next(name for name in NAMES if name != engine.name)].transfers.lose(
            (engine.name, 1)
        )


def test_random_interleavings_of_two_engines() -> None:
    """Run 60,000 actions. Nothing leaks, and no request reads the blocks of another prompt."""
    counts: Counter[str] = Counter()
    for seed in range(12):
        world = World(seed)
        world.run(5_000)
        counts += world.counts
    assert min(counts[reason] for reason in ("stop", "length", "abort", "error")) > 100
    names = ("num_remote_prefills", "num_failed_prefills", "num_expired_leases", "deaths")
    assert min(counts[name] for name in names) > 50, counts
    assert counts["num_pulled_blocks"] > 1_000


class Alone:
    """Hold the transfers of one engine, whose peers the test plays."""

    def __init__(self, policy: str = FAIL, **sizes: int) -> None:
        self.scheduler = RankScheduler(make_limits(**{"num_host_blocks": 16, **sizes}))
        self.sent: list[tuple[Peer, Message]] = []
        self.copies: list[ImportBlocks] = []
        self.shared = self.scheduler.rank.shared
        self.transfers = Transfers(
            KvTransferConfig(failure_policy=policy, lease_seconds=6.0, timeout_seconds=20.0),
            self.shared,
            block_size=4,
            engine_id="me",
            fingerprint="model",
            lanes=["rank 0", "rank 1"],
            send=lambda peer, message: self.sent.append((peer, message)),
            copy=self.copies.append,
        )

    def take_sent(self) -> list[Message]:
        sent, self.sent = self.sent, []
        return [message for _, message in sent]

    def prefill(self, name: str = "a", length: int = 10) -> bytes:
        """Compute a prompt for lease `name`. Return the prompt's hash."""
        request = make_request(name, length, max_tokens=1, lease_id=name)
        self.transfers.begin(request, now=0.0)
        (ready,) = self.transfers.ready
        self.transfers.ready.clear()
        self.scheduler.group.add(ready)
        while (plan := self.scheduler.plan()) is not None:
            self.transfers.take_updates(self.scheduler.commit(plan))
        self.transfers.advance(now=0.0)
        return hash_prompt(request, block_size=4)

    def pull(self, name: str = "a", *, lease: str = "lease", length: int = 10) -> OpenLease:
        remote = RemotePrompt("peer", 1, lease, "it")
        self.transfers.begin(make_request(name, length, remote=remote), now=0.0)
        (message,) = (one for one in self.take_sent() if isinstance(one, OpenLease))
        return message

    def answer(self, message: Message, *, now: float = 0.0) -> None:
        self.transfers.handle(("peer", 1), message, now=now)
        self.transfers.advance(now=now)

    @property
    def num_held(self) -> int:
        return self.shared._host.num_blocks - self.shared._host.blocks.num_free


def test_a_lease_opens_once_stored_and_lives_while_renewed() -> None:
    engine = Alone()
    opened = OpenLease("a", "me", "model", engine.prefill(), 2)
    assert engine.shared.leases["a"].step_id == engine.shared.last_step == 1  # stores it
    engine.transfers.handle(b"d", opened, now=1.0)
    (answer,) = engine.take_sent()
    assert isinstance(answer, LeaseOpened) and len(answer.places) == engine.num_held == 2
    engine.transfers.handle(b"d", CloseLease("a"), now=2.0)
    engine.transfers.handle(b"d", CloseLease("a"), now=2.0)
    assert engine.take_sent() == [LeaseClosed("a", True), LeaseClosed("a", False)]
    assert engine.num_held == 0
    engine = Alone()
    engine.prefill()
    for now in (4.0, 8.0, 12.0):
        engine.transfers.handle(b"d", RenewLeases(["a", "unknown"]), now=now)
        engine.transfers.advance(now=now + 1)
        assert engine.num_held == 2
    engine.transfers.advance(now=18.5)
    assert engine.num_held == 0 and engine.transfers.counts.num_expired_leases == 1


def test_the_hashes_of_a_pulled_prompt_cover_its_images() -> None:
    engine, found = Alone(), set()
    for digest in (b"", b"one", b"other"):
        images = [ImageInput(2, 4, (2, 8), digest, b"")] if digest else []
        remote = RemotePrompt("peer", 1, f"{digest!r}", "it")
        request = make_request(f"{digest!r}", 10, images=images, remote=remote)
        engine.transfers.begin(request, now=0.0)
        (message,) = (one for one in engine.take_sent() if isinstance(one, OpenLease))
        assert message.prompt_hash == hash_prompt(request, block_size=4)
        *_, pull = engine.transfers._pulls.values()
        assert pull.hashes[-1] == message.prompt_hash  # The request has no salt.
        found.add(message.prompt_hash)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engine_id": "before"}, "was replaced by another engine"),
        ({"fingerprint": "other"}, "differ in version, model"),
        ({"prompt_hash": b"other"}, "different prompts"),
        ({"num_blocks": 1}, "different prompts"),
        ({"lease_id": "b"}, "the lease has ended"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_copy(change: dict[str, Any], reason: str) -> None:
    engine = Alone()
    message = OpenLease("a", "me", "model", engine.prefill(), 2)
    engine.transfers.handle(b"d", msgspec.structs.replace(message, **change), now=0.0)
    (answer,) = engine.take_sent()
    assert isinstance(answer, LeaseRefused) and reason in answer.reason


def test_an_open_before_the_prompt_waits_for_it_or_for_the_end_of_its_request() -> None:
    engine = Alone()
    for name in "ab":
        early = OpenLease(name, "", "model", b"", 2)
        engine.transfers.handle(name.encode(), early, now=0.0)
    engine.transfers.begin(make_request("b", 10, lease_id="b"), now=0.0)
    engine.transfers.take_updates([SequenceUpdate("b", [], finish_reason="abort")])
    assert [(peer, type(message)) for peer, message in engine.sent] == [(b"b", LeaseRefused)]
    engine.sent.clear()
    engine.transfers.ready.clear()
    engine.prefill()
    (answer,) = engine.take_sent()
    assert isinstance(answer, LeaseRefused) and "different prompts" in answer.reason


def test_blocks_are_used_only_after_the_return_of_the_lease() -> None:
    engine = Alone()
    engine.pull()
    engine.answer(LeaseOpened("lease", ["p"], [5, 6], 7, 3))
    (command,) = engine.copies
    assert command.remote_places == [5, 6] and command.remote_step == 7
    for _ in range(2):  # both ranks
        assert engine.take_sent() in ([], [RenewLeases(["lease"])])
        engine.transfers.take_copied(ImportDone(command.number), now=0.0)
    assert engine.take_sent() == [CloseLease("lease")] and not engine.transfers.ready
    engine.answer(LeaseClosed("lease", True))
    (request,) = engine.transfers.ready
    assert request.num_remote_cached_tokens == 3 and engine.num_held == 2
    engine.scheduler.group.add(request)
    first = engine.scheduler.next_plan()
    assert first.copies is not None and first.copies.loaded_places == command.places
    result = msgspec.structs.replace(make_result(first), loaded_step=first.step_id)
    engine.transfers.take_updates(engine.scheduler.commit(first, result))
    plan = engine.scheduler.next_plan()
    assert plan.new_rows[0].num_computed == 8
    (update,) = engine.scheduler.commit(plan)
    engine.transfers.take_updates([update])
    assert update.num_cached_tokens == 3 and engine.num_held == 0
    # A later choice of the same request finds the blocks and reads nothing.
    remote = RemotePrompt("peer", 1, "lease", "it")
    engine.transfers.ready.clear()
    engine.transfers.begin(make_request("a", 10, remote=remote), now=0.0)
    assert len(engine.transfers.ready) == 1 and not engine.sent


@pytest.mark.parametrize("policy", [FAIL, RECOMPUTE])
@pytest.mark.parametrize("event", ["refusal", "expiry", "copy", "loss", "silence", "blocks"])
def test_a_pull_that_fails_leaves_nothing(policy: str, event: str) -> None:
    engine = Alone(policy)
    engine.pull()
    if event == "refusal":
        engine.answer(LeaseRefused("lease", "no"))
    elif event == "silence":
        engine.transfers.advance(now=19.0)
        assert not (engine.transfers.failed or engine.transfers.ready)
        engine.transfers.advance(now=20.5)
    elif event == "blocks":
        engine.answer(LeaseOpened("lease", ["p"], [5], 7, 0))
    elif event == "loss":
        engine.transfers.lose(("other", 1))
        assert not (engine.transfers.failed or engine.transfers.ready)
        engine.transfers.lose(("peer", 1))
    else:
        engine.answer(LeaseOpened("lease", ["p"], [5, 6], 7, 0))
        engine.transfers.take_copied(ImportDone(0, "x" * (event == "copy")), now=0.0)
        engine.transfers.lose(("peer", 1)) if event == "copy" else None
        assert engine.num_held == 2  # The other rank may still write to these blocks.
        engine.transfers.take_copied(ImportDone(0), now=0.0)
        engine.answer(LeaseClosed("lease", False))
    names = [request.request_id for request in engine.transfers.ready]
    failed = [name for name, _ in engine.transfers.failed]
    assert (names, failed) == ((["a"], []) if policy == RECOMPUTE else ([], ["a"]))
    assert engine.num_held == 0 and engine.transfers.counts.num_failed_prefills == 1
    assert engine.scheduler.rank.host.num_used == 0


def test_an_abort_returns_the_lease_and_keeps_blocks_that_are_written() -> None:
    engine = Alone()
    engine.pull()
    assert engine.transfers.abort("a") and not engine.transfers.abort("a")
    assert engine.take_sent() == [CloseLease("lease")]
    engine.pull("b", lease="second")
    engine.answer(LeaseOpened("second", ["p"], [5, 6], 7, 0))
    engine.sent.clear()
    assert engine.transfers.abort("b") and engine.num_held == 2 and not engine.sent
    for _ in range(2):
        engine.transfers.take_copied(ImportDone(0), now=0.0)
    engine.answer(LeaseClosed("second", True))
    assert engine.num_held == 0 and not engine.transfers.ready
    assert not engine.transfers.has_timers


def test_a_pull_waits_for_room_unless_it_exceeds_host_memory() -> None:
    engine = Alone(num_host_blocks=3)
    for name, length in (("a", 10), ("b", 10), ("c", 5)):
        engine.pull(name, lease=name, length=length)
        engine.answer(LeaseOpened(name, ["p"], list(range((length - 1) // 4)), 7, 0))
    assert [len(copy.places) for copy in engine.copies] == [2]
    for _ in range(2):
        engine.transfers.take_copied(ImportDone(0, "failed"), now=1.0)
    engine.transfers.advance(now=1.0)
    assert [len(copy.places) for copy in engine.copies] == [2, 2, 1]
    engine = Alone(num_host_blocks=3)
    for name, length in (("a", 17), ("b", 10)):
        engine.pull(name, lease=name, length=length)
        engine.answer(LeaseOpened(name, ["p"], list(range((length - 1) // 4)), 7, 0))
        assert engine.take_sent()[:1] == [CloseLease("a")] * (name == "a")
    assert [len(copy.places) for copy in engine.copies] == [2]
    ((name, problem),) = engine.transfers.failed
    assert name == "a" and "4 KV blocks, and host memory holds 3" in problem


def test_leases_that_no_engine_reads_make_room_for_others() -> None:
    engine = Alone(num_host_blocks=4)
    for name in "abc":
        prompt_hash = engine.prefill(name, 10)
    engine.transfers.handle(b"d", OpenLease("c", "me", "model", prompt_hash, 2), now=1.0)
    engine.transfers.advance(now=1.9)
    assert list(engine.shared.leases) == ["a", "b", "c"] and not engine.take_sent()
    for _ in range(3):  # The end of one lease makes enough room.
        engine.transfers.advance(now=2.1)
    assert list(engine.shared.leases) == ["b", "c"]
    engine.scheduler.commit(engine.scheduler.next_plan())
    engine.transfers.advance(now=2.2)
    assert isinstance(engine.take_sent()[0], LeaseOpened)
    engine.prefill("d", 10)
    for _ in range(5):
        engine.transfers.advance(now=4.5)
    assert list(engine.shared.leases) == ["c", "d"]


def test_kv_blocks_of_a_lease_are_held_until_host_memory_has_room() -> None:
    engine = Alone(num_host_blocks=3)
    engine.prefill("a", 10)
    engine.prefill("b", 9)  # The prompt has two blocks, and host memory has room for one.
    shared, rank = engine.shared, engine.scheduler.rank
    assert not shared.leases["b"].is_readable and shared.holds_kv_blocks
    assert rank.num_free_blocks == rank.limits.num_blocks - 2
    engine.transfers.handle(b"d", CloseLease("a"), now=0.0)
    plan = engine.scheduler.next_plan()
    assert not plan.slots and plan.copies is not None
    engine.scheduler.commit(plan)
    assert shared.leases["b"].is_readable and not shared.holds_kv_blocks
    assert rank.num_free_blocks == rank.limits.num_blocks
    engine.prefill("c", 17)  # The prompt is larger than host memory.
    assert "c" not in shared.leases and not shared.holds_kv_blocks
