"""The scripted day: agent sessions against the real server and an engine with prepared answers.

Each answer must reach the client unchanged. Each prompt must be the conversation so far. A prompt
must begin with the tokens of the previous prompt and answer, which a prefix cache stores. There are
two exceptions. M2 removes the thinking before the last user message. A new question changes the
prompt from the first answer of the previous task on. A tag that an answer spells with several
tokens returns as the tag's own token.
"""

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from negamax.text.tokenizer import Tokenizer
from tools.load.server import Server, serving
from tools.replay.clients import MODEL_NAME, WAYS, Agent, HangUp, Seen
from tools.replay.engine import Played, Tokens, num_common
from tools.replay.formats import Family, tokens_of
from tools.replay.script import TOOLS, DaySize, Exchange, ScriptWriter, Session

MAX_PROBLEMS = 10
TURN_SECONDS = 300


@dataclass
class _Tally:
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    call_ids: set[str] = field(default_factory=set)
    other_ids: set[str] = field(default_factory=set)
    longest_prompt: int = 0  # tokens
    held: dict[str, float] = field(default_factory=dict)  # resources that are held at the end


class _Record:
    """The requests that the engine recorded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0
        self._played: dict[str, list[Played]] = {}

    def take(self, salt: str) -> tuple[Played, Tokens]:
        """Return the answered request and its prompt."""
        self._read_on()
        played = [entry for entry in self._played[salt] if entry.is_whole][-1]
        return played, self.prompt(played)

    def is_repeated(self, salt: str, prompt: Tokens) -> bool:
        """Return whether every earlier request for that answer had the same prompt."""
        return all(np.array_equal(self.prompt(entry), prompt) for entry in self._played[salt])

    def prompt(self, played: Played) -> Tokens:
        return np.fromfile(self._folder / f"{played.number}.u32", np.uint32)

    def drop(self, salt: str) -> None:
        """Delete the prompts of an answer."""
        for entry in self._played.get(salt, ()):
            (self._folder / f"{entry.number}.u32").unlink(missing_ok=True)

    def broken_off(self) -> list[Played]:
        """Return the requests that ended early."""
        self._read_on()
        played = (entry for entries in self._played.values() for entry in entries)
        return [entry for entry in played if not entry.is_whole]

    def _read_on(self) -> None:
        file = self._folder / "requests.jsonl"
        if not file.exists():
            return
        with file.open("rb") as record:
            record.seek(self._read)
            text = record.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            played = Played(**json.loads(line))
            self._played.setdefault(played.salt, []).append(played)


class _Conversation:
    """The expected prompts of a session."""

    def __init__(self, family: Family, tokenizer: Tokenizer, session: Session) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._session = session
        self._head: str | None = None  # system prompt and tools
        self._said: list[tuple[Exchange, str]] = []  # answers, and the text that followed each
        self._task_start = 0  # number of the first answer after the last question
        self._task_prompt: Tokens = np.array([], np.uint32)  # prompt of the task's first answer
        self._known: Tokens = self._task_prompt  # the last prompt and its answer
        self._last_prompt_len = 0

    def check(self, prompt: Tokens) -> list[str]:
        """List the problems of a prompt."""
        if self._head is None:
            return self._check_first(prompt)
        shared = num_common(self._known, prompt)
        wanted = self._text()
        if wanted is None or shared < len(self._known):
            text, expected = self._decode(prompt), self._whole_text()
        else:
            text, expected = self._decode(prompt[shared:]), wanted
        if text != expected:
            return [f"the prompt is not the conversation: {difference(text, expected)}"]
        needed = self._needed_prefix()
        if shared < needed:
            lost = self._decode(prompt[max(0, shared - 4) : shared + 12])
            return [f"the prompt repeats {shared} tokens of the last one, not {needed}: {lost!r}"]
        return []

    def add(self, exchange: Exchange, *, prompt: Tokens, answer: list[int]) -> None:
        if self._task_start == len(self._said):
            self._task_prompt = prompt
        self._last_prompt_len = len(prompt)
        self._known = np.concatenate([prompt, np.array(answer, np.uint32)])
        self._said.append((exchange, self._family.follow_up(exchange)))
        if exchange.question:
            self._task_start = len(self._said)

    def _check_first(self, prompt: Tokens) -> list[str]:
        text = self._decode(prompt)
        end = self._family.question(self._session.opening) + self._family.prompt_end()
        self._head = text.removesuffix(end)
        tools = [json.dumps(tool["function"], ensure_ascii=False) for tool in TOOLS]
        parts = [part for part in (self._session.system, *tools) if part not in self._head]
        problems = [f"the first prompt lacks {part[:200]!r}" for part in parts]
        if not text.endswith(end):
            problems.append(f"the first prompt ends with {text[-len(end) :]!r}, not with {end!r}")
        if "billing" in self._head:
            problems.append("the billing header is in the prompt")
        return problems

    def _text(self) -> str | None:
        """Return the expected text after the last prompt and answer, or None if these change."""
        exchange, follow_up = self._said[-1]
        drops_thinking = exchange.question and not self._family.keeps_thinking
        if drops_thinking or not self._family.comes_back(exchange):
            return None
        return f"\n{follow_up}{self._family.prompt_end()}"

    def _whole_text(self) -> str:
        family = self._family
        parts = [self._head or "", family.question(self._session.opening)]
        for number, (exchange, follow_up) in enumerate(self._said):
            has_thinking = family.keeps_thinking or number >= self._task_start
            parts += [family.turn(exchange, has_thinking=has_thinking), follow_up]
        return "".join([*parts, family.prompt_end()])

    def _needed_prefix(self) -> int:
        """Return how many tokens of the last prompt and its answer must be repeated."""
        exchange, _ = self._said[-1]
        # The line breaks of the opening may join others.
        opening = len(self._tokenizer.encode(f"\n{self._family.opening}"))
        if exchange.question and not self._family.keeps_thinking:
            return len(self._task_prompt) - opening
        if not self._family.comes_back(exchange):
            return self._last_prompt_len - opening
        return self._last_prompt_len if exchange.in_letters else len(self._known)

    def _decode(self, tokens: Tokens) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


@dataclass(frozen=True)
class _Role:
    """A prepared session. Lists have one entry per turn."""

    session: Session
    family: Family
    way: str  # of WAYS
    answers: list[list[int]]  # tokens, including the end of the turn
    reasoning: list[int]  # tokens

    @classmethod
    def prepare(cls, session: Session, family: Family, way: str, tokenizer: Tokenizer) -> "_Role":
        """Encode `session` as a model of `family` writes it."""
        assert tokenizer.eos_token_id is not None
        tags = {tokenizer.token_id(tag) for tag in family.tags}
        answers: list[list[int]] = []
        reasoning: list[int] = []
        for exchange in session.exchanges:
            tokens = tokens_of(family.answer(exchange), tokenizer, in_letters=exchange.in_letters)
            answers.append([*tokens, tokenizer.eos_token_id])
            parts = family.thinking(exchange.thinking)
            tokens = tokens_of(parts, tokenizer, in_letters=exchange.in_letters)
            places = [place for place, token in enumerate(tokens) if token in tags]
            # Quoted tags count as reasoning tokens.
            reasoning.append(places[-1] + 1 - sum(part.is_structure for part in parts))
        return cls(session, family, way, answers, reasoning)

    def salt(self, turn: int) -> str:
        return f"{self.session.name}/{turn}"

    def agent(self, url: str) -> Agent:
        rng = random.Random(self.session.name)
        return WAYS[self.way](url, self.session, thinking_mode=self.family.thinking_mode, rng=rng)


@dataclass
class _Player:
    _role: _Role
    _agent: Agent
    _record: _Record
    _tally: _Tally

    async def play(self, conversation: _Conversation) -> None:
        """Play all turns until the first problem."""
        for turn, exchange in enumerate(self._role.session.exchanges):
            salt = self._role.salt(turn)
            try:
                if exchange.hang_up is not None:
                    await self._hang_up(salt, exchange)
                seen = await asyncio.wait_for(self._agent.ask(salt), TURN_SECONDS)
            except Exception as error:
                self._report(salt, [f"{type(error).__name__}: {error}"])
                return
            played, prompt = self._record.take(salt)
            problems = [*seen.problems, *self._check_answer(exchange, seen)]
            reasoning = self._role.reasoning[turn]
            problems += self._check_counts(seen, played, prompt, reasoning=reasoning)
            problems += conversation.check(prompt)
            if not self._record.is_repeated(salt, prompt):
                problems.append("the prompt of the repeated request differs")
            self._count(exchange, seen)
            self._record.drop(salt)
            if problems:
                self._report(salt, problems)
                return
            conversation.add(exchange, prompt=prompt, answer=self._role.answers[turn])
            self._agent.follow(exchange, seen)

    async def _hang_up(self, salt: str, exchange: Exchange) -> None:
        size = len(exchange.thinking) + len(exchange.text)
        size += sum(len(json.dumps(call.arguments)) for call in exchange.calls)
        try:
            await self._agent.ask(salt, hang_up_after=int(size * (exchange.hang_up or 0)))
        except HangUp:
            self._tally.counts["hung up"] += 1

    def _check_answer(self, exchange: Exchange, seen: Seen) -> list[str]:
        problems = []
        names = (", ".join(call.name for call in each.calls) for each in (seen, exchange))
        texts = {
            "thinking": (seen.thinking, exchange.thinking),
            "text": (seen.text, exchange.text),
            "calls": tuple(names),
        }
        for number, (found, call) in enumerate(zip(seen.calls, exchange.calls, strict=False)):
            # Compare as text, because the order matters, and 1 differs from 1.0 and true.
            pair = json.dumps(json.loads(found.arguments)), json.dumps(call.arguments)
            texts[f"arguments of call {number}, {call.name}"] = pair
        problems += [
            f"{name}: {difference(*pair)}" for name, pair in texts.items() if len({*pair}) > 1
        ]
        ends = self._agent.ends_with_calls if exchange.calls else self._agent.ends_with_text
        if seen.ends != ends:
            problems.append(f"the answer ends with {seen.ends!r} instead of {ends!r}")
        call_ids = [call.id for call in seen.calls]
        for ids, known in ((call_ids, self._tally.call_ids), (seen.ids, self._tally.other_ids)):
            if len(set(ids)) < len(ids) or known & set(ids) or not all(ids):
                problems.append(f"ids {ids} are not all new")
            known.update(ids)
        return problems

    def _check_counts(
        self, seen: Seen, played: Played, prompt: Tokens, *, reasoning: int
    ) -> list[str]:
        counts = {
            "prompt": (seen.prompt_tokens, len(prompt)),
            "output": (seen.output_tokens, played.num_output_tokens),
            "cached": (seen.cached_tokens, played.num_cached_tokens),
        }
        if seen.reasoning_tokens is not None:  # One API does not report reasoning tokens.
            counts["reasoning"] = seen.reasoning_tokens, reasoning
        return [
            f"{name} tokens: {reported} instead of {expected}"
            for name, (reported, expected) in counts.items()
            if reported != expected
        ]

    def _count(self, exchange: Exchange, seen: Seen) -> None:
        self._tally.longest_prompt = max(self._tally.longest_prompt, seen.prompt_tokens)
        self._tally.counts.update(
            {
                "turns": 1,
                "calls": len(exchange.calls),
                "result bytes": sum(len(result.encode()) for result in exchange.results),
                "argument bytes": sum(len(call.arguments.encode()) for call in seen.calls),
                "prompt tokens": seen.prompt_tokens,
                "cached tokens": seen.cached_tokens,
                "output tokens": seen.output_tokens,
            }
        )

    def _report(self, salt: str, problems: list[str]) -> None:
        self._tally.problems += [f"{salt} ({self._role.way}): {problem}" for problem in problems]


def difference(found: str, written: str) -> str:
    """Show where two texts begin to differ."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(found, written, strict=False))
    at = sum(1 for _ in same)
    one, other = (text[max(0, at - 30) : at + 60] for text in (found, written))
    return f"character {at} of {len(found)}: …{one!r}, not (of {len(written)}) …{other!r}"


async def _play_day(
    server: Server, roles: list[_Role], *, tokenizer: Tokenizer, record: _Record
) -> _Tally:
    tally = _Tally()
    agents = [role.agent(f"http://{server.host}:{server.port}") for role in roles]
    plays = (
        _Player(role, agent, record, tally).play(
            _Conversation(role.family, tokenizer, role.session)
        )
        for role, agent in zip(roles, agents, strict=True)
    )
    await asyncio.gather(*plays)
    for agent in agents:
        await agent.close()
    tally.held = await server.leftovers()
    return tally


def scripted_day(
    *, families: Sequence[Family], folder: Path, size: DaySize, seed: int, step_ms: float
) -> dict[str, Any]:
    """Run the scenario with the model in `folder`, without weights. Sessions alternate modes."""
    started = time.monotonic()
    tokenizer = Tokenizer.from_folder(folder, is_trusted=True)
    first = families[0]
    writer = ScriptWriter(
        seed=seed, size=size, quotations=first.quotations, has_null=first.has_null
    )
    ways, roles = list(WAYS), []
    for number in range(size.sessions):
        family = families[(number + number // len(ways)) % len(families)]
        way = ways[number % len(ways)]
        roles.append(_Role.prepare(writer.session(number), family, way, tokenizer))
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        script = {
            role.salt(turn): (role.answers[turn], exchange.pace)
            for role in roles
            for turn, exchange in enumerate(role.session.exchanges)
        }
        (Path(name) / "script").write_bytes(msgspec.msgpack.encode(script))
        environment = {"REPLAY_SCRIPT": f"{name}/script", "REPLAY_RECORD": name}
        environment["STUB_STEP_MS"] = str(step_ms)
        options = ["--model", str(folder), "--served-model-name", MODEL_NAME]
        options += ["--parser", first.parser, "--engine-module", "tools.replay.engine"]
        record = _Record(Path(name))
        with serving(*options, module="tests.stub_server", environment=environment) as server:
            tally = asyncio.run(_play_day(server, roles, tokenizer=tokenizer, record=record))
            tally.problems += server.log_problems()
        num_broken_off = len(record.broken_off())
    counts = tally.counts
    if counts["turns"] != len(script):
        tally.problems.append(f"{counts['turns']} turns were played; {len(script)} were written")
    if tally.held:
        tally.problems.append(f"held at the end: {tally.held}")
    names = ("turns", "calls", "result bytes", "argument bytes", "prompt tokens", "output tokens")
    return {
        "sessions": f"{len(roles)} at once, in {min(len(roles), len(WAYS))} ways",
        **{name: counts[name] for name in names},
        "longest prompt, tokens": tally.longest_prompt,
        "of prompts cached": f"{counts['cached tokens'] / max(1, counts['prompt tokens']):.1%}",
        "hung up and asked again": counts["hung up"],
        "broken off in the engine": num_broken_off,
        "seconds": time.monotonic() - started,
        "problems": tally.problems[:MAX_PROBLEMS],
    }
