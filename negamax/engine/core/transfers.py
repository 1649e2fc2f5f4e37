"""Transfer KV blocks of prompts between engines.

A lease lets another engine read KV blocks of this engine. A pull reads KV blocks of another engine
in four phases. First, the prefilling engine confirms the lease. Second, this engine allocates host
blocks for the prompt. Third, the ranks of this engine copy the prompt's blocks into host blocks.
Fourth, the prefilling engine confirms that its blocks were not reused before the copy ended, so the
copies are valid. If a phase fails, this engine computes the prompt or fails the request.

Even after an abort, host blocks of a pull stay allocated until every rank has ended its copy. This
module is deterministic: callers pass the time and messages as arguments.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from negamax.base.log import get_logger
from negamax.engine.core.transfer_wire import (
    CloseLease,
    LeaseClosed,
    LeaseOpened,
    LeaseRefused,
    Message,
    OpenLease,
    RenewLeases,
)
from negamax.options.transfer import RECOMPUTE, KvTransferConfig
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.shared_blocks import Import, Lease, SharedBlocks, hash_prompt
from negamax.scheduler.step import SequenceUpdate
from negamax.worker.lane_wire import ImportBlocks, ImportDone

logger = get_logger(__name__)

UNREAD_SECONDS = 2.0  # A lease that no engine has asked for may end after this time.
RENEWALS = 6  # Number of renewals within the time limit of a lease.
MOST_ARRIVED = 256  # Limit of complete pulls, of all requests, kept for later choices (n > 1).
PullPeer = tuple[str, int]  # Host and port of a prefilling engine.
Peer = PullPeer | bytes  # A prefilling engine, or the ZeroMQ identity (bytes) of a decoding engine.


class Phase(Enum):
    OPENING = auto()  # The prefilling engine has not confirmed the lease yet.
    ALLOCATING = auto()  # Host memory has no room for the blocks yet.
    COPYING = auto()  # Ranks copy the prompt's blocks into host blocks.
    CLOSING = auto()  # The prefilling engine has not confirmed yet that it kept the blocks.


@dataclass(eq=False)
class _Pull:
    """The transfer of one prompt's blocks from another engine."""

    peer: PullPeer
    lease_id: str
    prompt_hash: bytes
    cache_salt: str
    hashes: list[bytes]  # Hashes of the prompt's full blocks, in order.
    requests: list[GenerateRequest]  # Requests for the prompt that have not ended.
    deadline: float  # Time limit of the phase, in monotonic seconds.
    phase: Phase = Phase.OPENING
    opened: LeaseOpened | None = None
    blocks: Import | None = None
    number: int = -1  # Number of the pull's `ImportBlocks` command; -1: none yet.
    num_copying: int = 0  # Number of ranks that have not finished the copy.
    problem: str = ""  # Reason why the copy failed.


class _WaitingOpen(NamedTuple):
    peer: bytes
    message: OpenLease
    deadline: float


@dataclass
class TransferCounts:
    """Counters since the engine's start, named like the fields of `RankStats`."""

    num_remote_prefills: int = 0
    num_failed_prefills: int = 0
    num_local_prefills: int = 0
    num_pulled_blocks: int = 0
    num_expired_leases: int = 0


@dataclass
class Transfers:
    """The leases and pulls of one engine. Only the engine loop may use an instance."""

    config: KvTransferConfig
    shared: SharedBlocks
    block_size: int
    engine_id: str
    fingerprint: str
    lanes: list[str]  # Endpoints at which this engine's ranks send blocks.
    send: Callable[[Peer, Message], None]
    copy: Callable[[ImportBlocks], None]  # Sends a copy command to every rank.
    counts: TransferCounts = field(default_factory=TransferCounts)
    # The loop reads and clears `ready` and `failed`. Requests in `ready` no longer wait for KV.
    ready: list[GenerateRequest] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # (request id, error).
    _pulls: dict[tuple[PullPeer, str], _Pull] = field(default_factory=dict)
    # Latest complete pulls, for later choices of the same request.
    _arrived: dict[tuple[PullPeer, str], _Pull] = field(default_factory=dict)
    _copies: dict[int, _Pull] = field(default_factory=dict)  # Number of a running copy -> its pull.
    _num_copies: int = 0
    _held: dict[str, list[int]] = field(default_factory=dict)  # Request id -> allocated blocks.
    _prefills: dict[str, str] = field(default_factory=dict)  # Id of a prefill -> lease id.
    _waiting: dict[str, list[_WaitingOpen]] = field(default_factory=dict)  # Lease id -> requests.
    _next_renewal: float = 0.0

    @property
    def has_work(self) -> bool:
        """Return whether a step of the engine loop would advance a transfer."""
        return bool(self.ready or self.failed or self.shared.can_store)

    @property
    def has_timers(self) -> bool:
        return bool(self._pulls or self.shared.leases or self._waiting)

    def stats(self) -> dict[str, int]:
        """Return fields of `RankStats`: numbers of prefills for other engines, pulls and leases."""
        return {**vars(self.counts), "num_leases": len(self.shared.leases)}

    def request_ids(self) -> list[str]:
        """Return the ids of the requests that wait for a pull."""
        return [one.request_id for pull in self._pulls.values() for one in pull.requests]

    def begin(self, request: GenerateRequest, *, now: float) -> None:
        """Append a new request to `ready` or `failed`, at once or when its pull has ended."""
        remote, size = request.remote, self.block_size
        if request.lease_id:
            self._prefills[request.request_id] = request.lease_id
        if remote is None:
            self.counts.num_local_prefills += not request.lease_id
            self.ready.append(request)
            return
        peer, tokens = (remote.host, remote.port), request.prompt_token_ids
        num_blocks = (len(tokens) - 1) // size
        if not num_blocks or request.sampling.prompt_logprobs is not None:
            self.send(peer, CloseLease(remote.lease_id))  # This engine computes the prompt itself.
            self.ready.append(replace(request, remote=None))
            return
        prompt_hash = hash_prompt(request, block_size=size)
        key = (peer, remote.lease_id)
        pull = self._pulls.get(key) or self._arrived.get(key)
        if pull is not None:  # The request is another choice of the pull's prompt.
            if (pull.prompt_hash, pull.cache_salt) != (prompt_hash, request.cache_salt):
                self._fail([request], f"lease {remote.lease_id} is read for another prompt")
            elif key in self._pulls:
                pull.requests.append(request)
            else:
                self._complete(pull, request)
            return
        salt, images = request.cache_salt, request.images
        chain = BlockHashes(list(tokens), block_size=size, salt=salt, images=images)
        hashes = [chain[index] for index in range(num_blocks)]
        deadline = now + self.config.timeout_seconds
        self._pulls[key] = _Pull(*key, prompt_hash, salt, hashes, [request], deadline)
        fields = (remote.engine_id, self.fingerprint, prompt_hash, num_blocks)
        self.send(peer, OpenLease(remote.lease_id, *fields))

    def abort(self, request_id: str) -> bool:
        """Drop a request that waits for blocks. Return False if no such request exists."""
        for pull in list(self._pulls.values()):
            for request in pull.requests:
                if request.request_id == request_id:
                    pull.requests.remove(request)
                    if not pull.requests and pull.phase in (Phase.OPENING, Phase.ALLOCATING):
                        self.send(pull.peer, CloseLease(pull.lease_id))
                        self._finish(pull, "the request was aborted")
                    return True
        return False

    def take_updates(self, updates: Iterable[SequenceUpdate]) -> None:
        """Release the blocks and leases of requests that `updates` report as started or ended."""
        for update in updates:
            places = self._held.pop(update.request_id, None)
            if places is not None:  # The request has loaded the blocks, or has ended.
                self.shared.release(places)
            if update.finish_reason is None or update.request_id not in self._prefills:
                continue
            lease_id = self._prefills.pop(update.request_id)
            if lease_id not in self.shared.leases:
                for waiting in self._waiting.pop(lease_id, ()):
                    reason = "the prefilling engine ended the request without its prompt"
                    self.send(waiting.peer, LeaseRefused(lease_id, reason))

    def handle(self, peer: Peer, message: Message, *, now: float) -> None:
        """Handle a message of another engine."""
        if isinstance(peer, bytes):
            self._serve(peer, message, now=now)
            return
        if isinstance(message, LeaseOpened | LeaseRefused | LeaseClosed):
            pull = self._pulls.get((peer, message.lease_id))
            if pull is not None:
                self._follow(pull, message, now=now)

    def take_copied(self, done: ImportDone, *, now: float) -> None:
        """Handle one rank's report that it has ended its part of a copy."""
        pull = self._copies[done.number]
        pull.problem = pull.problem or done.problem
        pull.num_copying -= 1
        if pull.num_copying:
            return
        del self._copies[done.number]
        self.send(pull.peer, CloseLease(pull.lease_id))
        if pull.problem:
            self._finish(pull, pull.problem)
        else:
            pull.phase, pull.deadline = Phase.CLOSING, now + self.config.timeout_seconds

    def lose(self, peer: PullPeer) -> None:
        """Fail the pulls from a prefilling engine whose connection is lost."""
        for pull in [pull for pull in self._pulls.values() if pull.peer == peer]:
            problem = f"the connection to the prefilling engine at {peer[0]}:{peer[1]} is lost"
            if pull.phase is Phase.COPYING:
                pull.problem = pull.problem or problem
            else:
                self._finish(pull, problem)

    def advance(self, *, now: float) -> None:
        """Answer waiting engines, begin copies, renew leases, and end expired leases and pulls."""
        for lease in list(self.shared.leases.values()):
            if lease.expires == inf:
                lease.expires = now + self.config.lease_seconds
            if lease.expires <= now:
                self.counts.num_expired_leases += 1
                logger.warning("lease %s expired before its blocks were read", lease.lease_id)
                self.shared.end(lease.lease_id)
        if self.shared.holds_kv_blocks and not self.shared.can_store:
            self._end_unread(now=now)
        for lease in self.shared.settled:
            for waiting in self._waiting.pop(lease.lease_id, ()):
                self._answer(lease, waiting.peer, waiting.message)
        self.shared.settled.clear()
        for lease_id, opens in list(self._waiting.items()):
            opens[:] = [each for each in opens if each.deadline > now]
            if not opens:
                del self._waiting[lease_id]  # The decoding engines no longer wait.
        for pull in list(self._pulls.values()):
            if pull.phase is not Phase.COPYING and pull.deadline <= now:
                self.send(pull.peer, CloseLease(pull.lease_id))
                seconds = self.config.timeout_seconds
                self._finish(pull, f"{pull.phase.name.lower()} took longer than {seconds:g} s")
        self._allocate(now=now)
        if now >= self._next_renewal:
            self._next_renewal = now + self.config.lease_seconds / RENEWALS
            of_peers: dict[PullPeer, list[str]] = {}
            for pull in self._pulls.values():
                if pull.opened is not None:
                    of_peers.setdefault(pull.peer, []).append(pull.lease_id)
            for peer, lease_ids in of_peers.items():
                self.send(peer, RenewLeases(lease_ids))

    def _end_unread(self, *, now: float) -> None:
        """End the oldest lease that no engine has asked for, to free blocks for later prompts."""
        for lease in self.shared.leases.values():
            age = now - (lease.expires - self.config.lease_seconds)
            is_asked_for = lease.is_open or lease.lease_id in self._waiting
            if age >= UNREAD_SECONDS and not is_asked_for:
                self.counts.num_expired_leases += 1
                text = "lease %s ended unread after %.1f s: main memory is full"
                logger.warning(text, lease.lease_id, age)
                self.shared.end(lease.lease_id)
                return

    def _serve(self, peer: bytes, message: Message, *, now: float) -> None:
        """Handle a message of a decoding engine."""
        if isinstance(message, CloseLease):
            self.send(peer, LeaseClosed(message.lease_id, self.shared.end(message.lease_id)))
        elif isinstance(message, RenewLeases):
            for lease_id in message.lease_ids:
                if lease_id in self.shared.leases:
                    self.shared.leases[lease_id].expires = now + self.config.lease_seconds
        elif isinstance(message, OpenLease):
            self._open(peer, message, now=now)

    def _open(self, peer: bytes, message: OpenLease, *, now: float) -> None:
        lease, problem = self.shared.leases.get(message.lease_id), ""
        if message.engine_id and message.engine_id != self.engine_id:
            problem = "the engine that computed the prompt was replaced by another engine"
        elif message.fingerprint != self.fingerprint:
            problem = "the engines differ in version, model, draft, dtype or block size"
        elif lease is None and message.engine_id:
            problem = "the lease has ended"
        if problem:
            self.send(peer, LeaseRefused(message.lease_id, problem))
        elif lease is None or not lease.is_readable:
            deadline = now + self.config.timeout_seconds
            waiting = self._waiting.setdefault(message.lease_id, [])
            waiting.append(_WaitingOpen(peer, message, deadline))
        else:
            lease.expires = now + self.config.lease_seconds
            self._answer(lease, peer, message)

    def _answer(self, lease: Lease, peer: bytes, message: OpenLease) -> None:
        fits = message.num_blocks == len(lease.places)
        if not fits or message.prompt_hash != lease.prompt_hash:
            reason = "the two engines have different prompts for this request"
            self.send(peer, LeaseRefused(lease.lease_id, reason))
            return
        lease.is_open = True
        fields = (lease.places, lease.step_id, lease.num_cached_tokens)
        self.send(peer, LeaseOpened(lease.lease_id, self.lanes, *fields))

    def _follow(
        self, pull: _Pull, message: LeaseOpened | LeaseRefused | LeaseClosed, *, now: float
    ) -> None:
        """Handle an answer of the prefilling engine."""
        if isinstance(message, LeaseRefused):
            if pull.phase is Phase.OPENING:
                self._finish(pull, message.reason)
        elif isinstance(message, LeaseOpened):
            if pull.phase is not Phase.OPENING:
                return
            if len(message.places) != len(pull.hashes):
                self._finish(pull, "the prefilling engine sent another number of blocks")
                return
            pull.opened, pull.phase = message, Phase.ALLOCATING
            pull.deadline = now + self.config.timeout_seconds
        elif pull.phase is Phase.CLOSING:
            self._finish(pull, "" if message.was_held else "the lease ended during the copy")

    def _allocate(self, *, now: float) -> None:
        """Begin the copies of waiting pulls in order, until host memory has no room for a pull."""
        for pull in [one for one in self._pulls.values() if one.phase is Phase.ALLOCATING]:
            assert pull.opened is not None
            found = self.shared.begin_import(pull.hashes)
            if found is None:
                count = len(self.shared.find_missing(pull.hashes))
                most = self.shared.num_host_blocks
                if count <= most:
                    return
                self.send(pull.peer, CloseLease(pull.lease_id))
                problem = f"the prompt has {count} KV blocks, and host memory holds {most}"
                self._finish(pull, f"{problem}; use a larger --kv-offloading-size")
                continue
            pull.blocks, missing = found
            self.counts.num_pulled_blocks += len(missing)
            if not missing:
                self.send(pull.peer, CloseLease(pull.lease_id))
                pull.phase, pull.deadline = Phase.CLOSING, now + self.config.timeout_seconds
                continue
            pull.phase, pull.number = Phase.COPYING, self._num_copies
            pull.num_copying = len(self.lanes)
            self._copies[pull.number] = pull
            self._num_copies += 1
            self.copy(
                ImportBlocks(
                    pull.number,
                    pull.blocks.places,
                    self.shared.last_step,
                    pull.opened.lanes,
                    [pull.opened.places[index] for index in missing],
                    pull.opened.step_id,
                )
            )

    def _finish(self, pull: _Pull, problem: str) -> None:
        """End a pull whose copies have ended. The pull's requests become ready, or fail."""
        del self._pulls[pull.peer, pull.lease_id]
        if pull.blocks is not None:
            self.shared.end_import(pull.blocks, is_valid=not problem)
        if problem:
            self._fail(pull.requests, problem)
            return
        for request in pull.requests:
            self._complete(pull, request)
        pull.requests.clear()
        self._arrived[pull.peer, pull.lease_id] = pull
        if len(self._arrived) > MOST_ARRIVED:
            del self._arrived[next(iter(self._arrived))]

    def _complete(self, pull: _Pull, request: GenerateRequest) -> None:
        """Append a request, which will use the blocks of the complete `pull`, to `ready`."""
        assert pull.opened is not None
        self.counts.num_remote_prefills += 1
        self._held[request.request_id] = self.shared.hold(pull.hashes)
        cached = pull.opened.num_cached_tokens
        self.ready.append(replace(request, remote=None, num_remote_cached_tokens=cached))

    def _fail(self, requests: list[GenerateRequest], problem: str) -> None:
        for request in requests:
            self.counts.num_failed_prefills += 1
            recomputes = self.config.failure_policy == RECOMPUTE
            then = "this engine computes the prompt" if recomputes else "the request fails"
            name = request.request_id
            logger.warning("the prompt of %s did not arrive (%s); %s", name, problem, then)
            if recomputes:
                self.ready.append(replace(request, remote=None))
            else:
                self.failed.append((name, problem))
