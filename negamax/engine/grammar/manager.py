"""Manage the constraints of running requests: grammars and token budgets of reasoning. One process
computes the masks of most grammars. A grammar that may be slow or crash gets its own process.
"""

import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

import msgspec
import numpy as np
import zmq

from negamax.base import env
from negamax.base.errors import ResourceError
from negamax.base.log import get_logger
from negamax.config.grammar import Grammar
from negamax.engine.grammar import wire
from negamax.engine.grammar.client import GrammarClient, GrammarHost
from negamax.engine.grammar.masks import Mask, MaskMaker, allows
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import GrammarBitmask, GrammarRow, SequenceUpdate
from negamax.text.grammar.reasoning_gate import ReasoningGate, needs_text
from negamax.text.tokenizer import Tokenizer

logger = get_logger(__name__)

COMPILE_SECONDS = 30.0
MASK_SECONDS = 5.0
DRAFT_SECONDS = 0.004
GRACE_SECONDS = 0.008  # Longest wait for masks in a step that also has rows without a grammar.
ALONE_SECONDS = 0.05  # Longest wait for masks in a step whose rows all have a grammar.
MAX_THREADS = 8
MAX_ATTEMPTS = 2  # Maximum number of attempts if the process that compiles a grammar dies.
MAX_WORKERS = 32
MAX_IDLE_WORKERS = 2
WAIT_SECONDS = 60.0  # Longest wait of a risky grammar for a worker process.
KEEP_SECONDS = 5.0  # A worker process is not reused if its grammar compiled for longer than this.
MAX_REMEMBERED = 1024  # Largest number of stored refusals of grammars that were slow or crashed.
REMEMBERED_SECONDS = 600.0
_NOTHING: Mapping[str, list[int]] = {}


@dataclass(eq=False)
class RequestGrammar:
    """The constraints of one output, and the answers of its grammar process."""

    request: GenerateRequest
    key: int  # Id of the output in messages to grammar processes.
    gate: ReasoningGate | None = None
    client: GrammarClient | None = None
    is_open: bool = False  # Whether the grammar is compiled or not needed.
    refusal: str | None = None  # Reason why the request is invalid.
    attempts: int = 0
    # Masks of the grammar: for the next token, then for the token after each draft token.
    masks: list[Mask] = field(default_factory=list)
    # Draft tokens that the next step may verify; -1 at a position without a draft token.
    drafts: list[int] = field(default_factory=list)
    num_asked: int = 0  # Number of unanswered messages about new tokens.
    asked: float = 0.0  # Monotonic second of the latest message to the grammar process.
    kept_back: frozenset[int] = frozenset()  # Tokens forbidden during reasoning.
    has_ended: bool = False
    error: str | None = None
    is_lost: bool = False  # Whether the grammar process died or no process was free in time.
    is_late: bool = False  # Whether a step ran without the output's mask.

    @property
    def problem(self) -> str | None:
        return self.refusal or self.error

    @property
    def spec(self) -> wire.GrammarSpec:
        assert self.request.sampling.grammar is not None
        return self.request.sampling.grammar, self.request.sampling.reasoning

    @property
    def is_awaited(self) -> bool:
        """Return whether the next token's mask depends on an answer that has not arrived."""
        if self.num_asked == 0 or self.problem is not None or self.has_ended:
            return False
        return not self.is_reasoning_at(self.gate) and (self.gate is None or self.gate.due is None)

    def is_reasoning_at(self, gate: ReasoningGate | None) -> bool:
        """Return whether the output is reasoning in state `gate`. Grammars skip reasoning."""
        reasoning = self.request.sampling.reasoning
        is_open = reasoning is not None and reasoning.state == "open"
        return gate is not None and gate.is_open and is_open

    def push(self, token_id: int) -> int | bytes | None:
        """Add a committed token. Return the token, or the part of it that the grammar must read."""
        return token_id if self.gate is None else self.gate.push(token_id)

    def lose(self, message: str) -> None:
        self.error, self.is_lost = message, True

    def take(self, answer: wire.NextMask) -> None:
        self.num_asked -= 1
        if answer.error is not None and answer.mask is not None:
            self.refusal = answer.error
        elif answer.error is not None:
            self.error = answer.error
        elif answer.mask is None:
            self.has_ended = True
        else:
            masks = answer.mask, *answer.after_drafts
            self.masks = [np.frombuffer(mask, dtype=np.uint8) for mask in masks]


class GrammarManager:
    """The constraints of all requests. Only the engine loop may use an instance."""

    def __init__(
        self, tokenizer_folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._folder = tokenizer_folder
        self._setup = wire.Setup(
            tokenizer_folder=str(tokenizer_folder),
            vocab_size=vocab_size,
            eos_token_ids=tuple(eos_token_ids),
            num_threads=max(1, min(MAX_THREADS, env.usable_cores() // 2)),
            compile_seconds=COMPILE_SECONDS,
            mask_seconds=MASK_SECONDS,
            draft_seconds=DRAFT_SECONDS,
        )
        self._maker = MaskMaker(vocab_size)
        self._rules: dict[str, RequestGrammar] = {}  # Constraints by request id.
        self._by_key: dict[int, RequestGrammar] = {}
        self._opening: list[RequestGrammar] = []
        self._lost: list[RequestGrammar] = []
        self._keys = count()
        self._host: GrammarHost | None = None
        self._client: GrammarClient | None = None
        self._workers: list[GrammarClient] = []
        self._risky: list[RequestGrammar] = []  # Grammars that wait for a worker.
        # `_refused`: digest of a grammar -> (end of the refusal in monotonic seconds, message)
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._tokenizer: Future[Tokenizer] | None = None

    def opening_ids(self) -> list[str]:
        return [rule.request.request_id for rule in self._opening]

    @property
    def is_waiting(self) -> bool:
        return bool(self._opening) or any(rule.is_late for rule in self._rules.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rules

    def start(self) -> GrammarClient:
        """Return the process for grammars that are not risky; start this process if necessary."""
        if self._client is None:
            self._client = self._fork()
        return self._client

    def _fork(self, spec: wire.GrammarSpec | None = None) -> GrammarClient:
        """Fork a process from the host process. If the host has ended, first start a new host."""
        if self._host is not None and self._host.is_alive:
            with contextlib.suppress(ConnectionError):
                return GrammarClient(self._host, spec=spec)
        self._end_host()
        self._host = GrammarHost(self._setup)
        return GrammarClient(self._host, spec=spec)

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.kill()
            self._host = None

    def open(self, request: GenerateRequest) -> None:
        """Prepare the constraints of `request`, which `opened` returns when they are ready."""
        rule = self._rules[request.request_id] = RequestGrammar(request, next(self._keys))
        self._by_key[rule.key] = rule
        self._opening.append(rule)
        reasoning, grammar = request.sampling.reasoning, request.sampling.grammar
        if reasoning is not None and needs_text(reasoning) and self._tokenizer is None:
            self._tokenizer = self._loader.submit(
                Tokenizer.from_folder, self._folder, is_trusted=True
            )
        if grammar is None:
            rule.is_open = True
        elif not self._is_refused(rule):
            self._send_open(rule)

    def opened(self) -> list[RequestGrammar]:
        """Return constraints that are now ready or refused. Call `take_lost` first."""
        done = [
            rule
            for rule in self._opening
            if rule.problem is not None or (rule.is_open and self._prepare_gate(rule))
        ]
        for rule in done:
            self._opening.remove(rule)
            if rule.problem is not None:
                self._discard(rule)
        return done

    def close(self, request_id: str) -> bool:
        """Drop the constraints of a request. Return whether the constraints were not ready yet."""
        rule = self._rules.get(request_id)
        if rule is None:
            return False
        was_opening = rule in self._opening
        if was_opening:
            self._opening.remove(rule)
        self._discard(rule)
        return was_opening

    def advance(
        self, updates: Sequence[SequenceUpdate], proposed: Mapping[str, list[int]] = _NOTHING
    ) -> list[str]:
        """Send tokens and drafts to processes. Return ids of requests that need no more masks."""
        if not self._rules:
            return []
        released: list[str] = []
        advances: dict[GrammarClient, list[tuple[int, list[wire.Part], list[int]]]] = {}
        for update in updates:
            rule = self._rules.get(update.request_id)
            if rule is None:
                continue
            if update.finish_reason is not None:
                self._discard(rule)
                continue
            parts = [
                part for token_id in update.token_ids if (part := rule.push(token_id)) is not None
            ]
            rule.drafts = proposed.get(update.request_id, [])
            if rule.client is not None and parts:
                drafts = list(takewhile(lambda draft: draft >= 0, rule.drafts))
                advances.setdefault(rule.client, []).append((rule.key, parts, drafts))
                rule.num_asked += 1
                rule.asked = time.monotonic()
            elif rule.client is None and rule.gate is not None and rule.gate.is_over:
                released.append(update.request_id)
                self._discard(rule)
        for client, items in advances.items():
            client.send(wire.AdvanceGrammars(items))
        return released

    def take_lost(self) -> list[RequestGrammar]:
        """Receive masks. Return constraints whose grammar process has died since the last call."""
        if self._rules:
            self._receive()
            self._end_waits()
        lost, self._lost = self._lost, []
        return [rule for rule in lost if rule.request.request_id in self._rules]

    def arrived(self) -> list[str]:
        """Return ids of postponed requests whose mask has arrived. Call `take_lost` first."""
        found = [rule for rule in self._rules.values() if rule.is_late and not rule.is_awaited]
        for rule in found:
            rule.is_late = False
        return [rule.request.request_id for rule in found]

    def bitmask(
        self, step_id: int, rows: Sequence[GrammarRow], *, may_wait: bool
    ) -> tuple[GrammarBitmask, list[RequestGrammar]]:
        """Return the bitmask for `rows` of a launched step, and the constraints of requests that
        must end. A request ends after an error or the end of its grammar. Rows whose mask is late
        are postponed. With `may_wait`, the wait for masks is longer.
        """
        ruled = [
            (row, rule) for row in rows if (rule := self._rules.get(row.request_id)) is not None
        ]
        deadline = time.monotonic() + (ALONE_SECONDS if may_wait else GRACE_SECONDS)
        while (
            any(rule.is_awaited for _, rule in ruled) and (left := deadline - time.monotonic()) > 0
        ):
            self.wait(left)
        found: list[Mask] = []
        places: dict[int, int] = {}  # Index of each mask by its id(): rows can share a mask.
        ended: list[RequestGrammar] = []
        bitmask = GrammarBitmask(step_id, [], [], [], [])
        for row, rule in ruled:
            if rule.problem is not None or rule.has_ended:
                ended.append(rule)
            elif rule.is_awaited:
                rule.is_late = True
                bitmask.postponed.append(row.row)
            else:
                masks = self._masks(rule, row)
                is_free = len(masks) > row.num_drafts and all(mask is None for mask in masks)
                for mask in [] if is_free else masks:
                    place = -1
                    if mask is not None:
                        found.append(mask)
                        place = places.setdefault(id(mask), len(places))
                        if place == len(bitmask.masks):
                            bitmask.masks.append(mask.tobytes())
                    bitmask.rows.append(row.row)
                    bitmask.places.append(place)
        return bitmask, ended

    def wait(self, seconds: float) -> None:
        clients = self._clients()
        if clients:
            poller = zmq.Poller()
            for client in clients:
                poller.register(client.socket, zmq.POLLIN)
            poller.poll(int(min(seconds, 1.0) * 1000) + 1)
        else:
            time.sleep(min(seconds, 0.001))  # Only a thread, which loads the tokenizer, has work.
        self._receive()

    def shutdown(self) -> None:
        for client in self._clients():
            client.kill()
        self._end_host()
        self._client, self._workers = None, []
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _masks(self, rule: RequestGrammar, row: GrammarRow) -> list[Mask | None]:
        """Return the available masks for a row's samples. The mask None allows all tokens."""
        gate = None if rule.gate is None else rule.gate.fork()
        # While answers are outstanding, `rule.masks` are masks of earlier positions.
        of_grammar = [] if rule.num_asked else rule.masks
        found: list[Mask | None] = []
        num_taken = 0  # Number of draft tokens that the grammar has accepted.
        sampling = rule.request.sampling
        while len(found) <= row.num_drafts:
            too_early: frozenset[int] = frozenset()  # End tokens before `min_tokens`.
            if row.num_outputs + len(found) < sampling.min_tokens:
                too_early = frozenset((*self._setup.eos_token_ids, *sampling.stop_token_ids))
            mask: Mask | None = None
            if gate is not None and gate.due is not None:
                mask = self._maker.only(gate.due)
            elif rule.client is not None and rule.is_reasoning_at(gate):
                kept_back = rule.kept_back | too_early
                mask = self._maker.all_but(kept_back) if kept_back else None
            elif rule.client is not None:
                if num_taken >= len(of_grammar):
                    break
                mask = of_grammar[num_taken]
                mask = self._maker.exclude(mask, too_early) if too_early else mask
            found.append(mask)
            if len(found) > len(rule.drafts):
                break
            draft = rule.drafts[len(found) - 1]
            if draft < 0 or (mask is not None and not allows(mask, draft)):
                # The step will reject this draft token, so the row's later samples need no masks.
                return [*found, *[None] * (row.num_drafts + 1 - len(found))]
            num_taken += gate is None or gate.push(draft) is not None
        assert found
        return found

    def _prepare_gate(self, rule: RequestGrammar) -> bool:
        """Create a `ReasoningGate` if needed. Return False while the tokenizer is loading."""
        sampling = rule.request.sampling
        reasoning = sampling.reasoning
        if reasoning is None:
            return True
        token_bytes = None
        if needs_text(reasoning):
            assert self._tokenizer is not None
            if not self._tokenizer.done():
                return False
            token_bytes = self._tokenizer.result().token_bytes
        rule.gate = ReasoningGate(
            reasoning,
            budget=sampling.thinking_token_budget,
            calls_end_it=sampling.grammar is None or sampling.grammar.kind == "tool_calls",
            token_bytes=token_bytes,
        )
        return True

    def _send_open(self, rule: RequestGrammar) -> None:
        rule.attempts += 1
        if rule.attempts > MAX_ATTEMPTS:
            rule.lose("the grammar process ended while it compiled this grammar")
            return
        rule.client, rule.asked = None, time.monotonic()
        if rule.attempts > 1:  # This grammar may have crashed its process.
            self._risky.append(rule)
            self._assign_workers()
            return
        try:
            self._send_to(self.start(), rule)
        except (OSError, zmq.ZMQError, ResourceError) as error:
            self._fail_start(rule, error)

    def _send_to(self, client: GrammarClient, rule: RequestGrammar) -> None:
        rule.client, rule.asked = client, time.monotonic()
        client.send(wire.OpenGrammar(rule.key, *rule.spec))

    def _fail_start(self, rule: RequestGrammar, error: Exception) -> None:
        logger.warning("the grammar process cannot be started: %s", error)
        rule.error = f"the grammar process cannot be started: {error}"

    def _assign_workers(self) -> None:
        """Assign workers to risky grammars. The tenant with the fewest workers is first. Reserve
        the last free worker for a tenant without a worker.
        """
        while self._risky:
            used = {(r.client, r.request.tenant) for r in self._rules.values() if r.client}
            held = Counter(tenant for client, tenant in used if client is not self._client)
            rule = min(self._risky, key=lambda one: held[one.request.tenant])
            worker = None
            for known in self._workers:
                same = (one for one in self._risky if one.spec == known.spec)
                if (found := next(same, None)) is not None:
                    rule, worker = found, known
            limit = min(MAX_WORKERS, 2 * env.usable_cores()) - (held[rule.request.tenant] > 0)
            while worker is None and len(self._workers) >= limit:
                if not (idle := self._idle_workers()):
                    return
                self._end(idle[0])
            self._risky.remove(rule)
            if self._is_refused(rule):
                continue
            try:
                if worker is None:
                    worker = self._fork(rule.spec)
                    self._workers.append(worker)
                self._send_to(worker, rule)
            except (OSError, zmq.ZMQError, ResourceError) as error:
                self._fail_start(rule, error)

    def _end_waits(self) -> None:
        """Fail requests that wait too long for a worker. Long outputs can occupy all workers."""
        since = time.monotonic() - WAIT_SECONDS
        for rule in [rule for rule in self._risky if rule.asked < since]:
            self._risky.remove(rule)
            rule.lose(
                "this grammar may be slow to compile, and all processes for slow grammars were in "
                f"use for {WAIT_SECONDS:g} s; retry later, or make the grammar simpler"
            )

    def _receive(self) -> None:
        for client in self._clients():
            if client not in self._clients():
                continue  # Handling an earlier message has removed this process.
            for message in client.receive():
                self._handle(message, client)
            if client not in self._clients():
                continue
            if not client.is_alive:
                self._lose(client, "ended")
            elif (asked := self._unanswered(client)) is not None and client.is_silent(asked):
                self._lose(client, "sent no heartbeat")

    def _handle(self, message: wire.FromGrammars, client: GrammarClient) -> None:
        match message:
            case wire.GrammarOpened():
                rule = self._by_key.get(message.key)
                if rule is not None and rule.client is client:
                    is_slow = time.monotonic() - rule.asked > KEEP_SECONDS
                    client.is_spent |= client.spec is not None and is_slow
                    self._set_open(rule, np.frombuffer(message.mask, dtype=np.uint8))
            case wire.GrammarIsRisky():
                for rule in self._followed_by(client):
                    if rule.key in message.keys:
                        rule.client, rule.asked = None, time.monotonic()
                        self._risky.append(rule)
                self._assign_workers()
            case wire.GrammarRefused():
                rule = self._by_key.get(message.key)
                if rule is not None and rule.client is client:
                    rule.refusal = message.message
                    client.is_spent |= message.is_timeout or client.spec is not None
                    if message.is_timeout:
                        self._remember(rule, message.message)
            case wire.NextMasks():
                for answer in message.masks:
                    rule = self._by_key.get(answer.key)
                    if rule is not None:
                        rule.take(answer)

    def _set_open(self, rule: RequestGrammar, mask: Mask) -> None:
        rule.is_open, rule.masks = True, [mask]
        kept_back = {end_id for end_id in self._setup.eos_token_ids if not allows(mask, end_id)}
        grammar, reasoning = rule.spec
        if grammar.kind != "tool_calls" and reasoning is not None:
            # Forbid the token that parsers would read as the start of a tool call.
            call_id = reasoning.call_opener.token_id
            kept_back |= set() if call_id is None else {call_id}
        rule.kept_back = frozenset(kept_back)

    def _is_refused(self, rule: RequestGrammar) -> bool:
        """Return whether an earlier refusal of the same grammar is still valid."""
        until, message = self._refused.get(_digest(rule.spec[0]), (0.0, ""))
        if time.monotonic() < until:
            rule.refusal = message
        return rule.refusal is not None

    def _remember(self, rule: RequestGrammar, message: str) -> None:
        """Refuse a grammar for `REMEMBERED_SECONDS`. Log only the first refusal."""
        digest = _digest(rule.spec[0])
        if self._refused.get(digest, (0.0,))[0] < time.monotonic():
            logger.warning("a grammar (%s) is refused for now: %s", rule.spec[0].kind, message)
        self._refused[digest] = time.monotonic() + REMEMBERED_SECONDS, message
        while len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def _lose(self, client: GrammarClient, cause: str) -> None:
        """End a dead or hung process, fail its open outputs and recompile its other grammars."""
        message = f"the grammar process {cause} while it served this request"
        logger.warning("a grammar process is replaced: %s", message)
        self._end(client)
        if not client.is_ready:  # The host process may have hung before the fork.
            self._end_host()
        for rule in self._followed_by(client):
            if client.spec is not None and client.is_ready and rule.problem is None:
                rule.refusal = (
                    "this grammar ended its process, because it nests too deeply or needs too much "
                    "memory; make the grammar simpler"
                )
                self._remember(rule, rule.refusal)
            if rule.is_open:
                if rule.refusal is None:
                    rule.lose(message)
                self._lost.append(rule)
            elif rule.problem is None:
                self._send_open(rule)
        self._assign_workers()

    def _unanswered(self, client: GrammarClient) -> float | None:
        """Return the monotonic second of the client's oldest unanswered message, or None."""
        rules = [rule for rule in self._followed_by(client) if rule.problem is None]
        asked = (rule.asked for rule in rules if rule.num_asked > 0 or not rule.is_open)
        return min(asked, default=None)

    def _followed_by(self, client: GrammarClient) -> list[RequestGrammar]:
        """Return the constraints of all outputs whose grammar `client` compiles or has compiled."""
        return [rule for rule in self._rules.values() if rule.client is client]

    def _clients(self) -> list[GrammarClient]:
        return [*filter(None, (self._client,)), *self._workers]

    def _discard(self, rule: RequestGrammar) -> None:
        del self._rules[rule.request.request_id], self._by_key[rule.key]
        if rule in self._risky:
            self._risky.remove(rule)
        client = rule.client
        if client is not None and client in self._clients():
            if client.spec is not None and rule.problem is None:  # A thread of the worker may hang.
                client.is_spent |= rule.num_asked > 0 or not rule.is_open
            client.send(wire.CloseGrammars([rule.key]))
            self._end_if_free(client)

    def _end_if_free(self, client: GrammarClient) -> None:
        """End `client` if it has no outputs and is spent. End a worker if too many are idle."""
        if self._followed_by(client):
            return
        if client.is_spent:
            self._end(client)
        elif client.spec is not None and len(idle := self._idle_workers()) > MAX_IDLE_WORKERS:
            self._end(idle[0])
        self._assign_workers()

    def _idle_workers(self) -> list[GrammarClient]:
        """Return the workers without outputs, oldest first."""
        return [worker for worker in self._workers if not self._followed_by(worker)]

    def _end(self, client: GrammarClient) -> None:
        if client is self._client:
            self._client = None
        else:
            self._workers.remove(client)
        client.kill()


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
