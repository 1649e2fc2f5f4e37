"""Seeded scripts of coding-agent sessions: questions, thinking, texts, calls and results."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.replay.contents import Contents

STEPS_PER_TASK = (2, 9)  # turns with calls per task
PARALLEL_SHARE, MANY_CALLS = 0.3, (2, 5)
LONG_FILE_SHARE = 0.12
NO_THINKING_SHARE = 0.08
NOTE_SHARE = 0.15  # share of turns with calls in which the client adds an instruction
QUOTE_SHARE = 0.35  # share of texts, values and results that contain the format's own tags
LETTERS_SHARE = 0.5  # share of quoting answers that spell tags instead of writing tokens
PACES = (1, 1, 4, 16, 64)  # most tokens of one step


@dataclass(frozen=True)
class Quotations:
    """Pieces of a format that texts quote, and that no parser may treat as structure."""

    in_results: Sequence[str]  # tool results may hold anything
    in_values: Sequence[str]  # in string arguments, as tokens or spelled out
    in_prose: Sequence[str]  # in thinking and content
    in_text: Sequence[str]  # content only
    in_letters: Sequence[str]  # only in spelled form


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """An answer, followed by the results of its calls or by the next `question`."""

    thinking: str
    text: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    note: str
    question: str
    in_letters: bool  # whether quotations are spelled out
    pace: int  # most tokens per step
    # share of the answer after which the client disconnects once and asks again
    hang_up: float | None


@dataclass(frozen=True)
class Session:
    name: str
    system: str
    opening: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class DaySize:
    sessions: int
    turns: tuple[int, int]  # least and largest number of turns of a session
    file_chars: int  # characters of the longest results
    session_chars: int  # characters of all results of a session
    hang_up_share: float  # share of the turns in which the client disconnects

    @classmethod
    def full(cls, sessions: int) -> "DaySize":
        return cls(sessions, (20, 60), 100_000, session_chars=500_000, hang_up_share=0.06)

    @classmethod
    def small(cls, sessions: int) -> "DaySize":
        return cls(sessions, (5, 8), 20_000, session_chars=24_000, hang_up_share=0.2)


@dataclass(frozen=True, kw_only=True)
class ScriptWriter:
    seed: int
    size: DaySize
    quotations: Quotations
    has_null: bool  # whether the format can express null

    def session(self, number: int) -> Session:
        """Write session `number`, which depends only on the seed."""
        rng = random.Random(f"{self.seed} {number}")
        contents = Contents(rng)
        work = "Work step by step, until the task is done."
        system = f"You are the coding agent {number}. {work}\n{contents.prose(1500)}"
        exchanges: list[Exchange] = []
        num_turns = rng.randint(*self.size.turns)
        left = rng.randint(*STEPS_PER_TASK)
        budget = self.size.session_chars
        while len(exchanges) < num_turns:
            ends = left == 0 or len(exchanges) == num_turns - 1
            left = rng.randint(*STEPS_PER_TASK) if ends else left - 1
            exchange = self._exchange(rng, contents, ends=ends, budget=budget)
            budget -= sum(map(len, exchange.results))
            exchanges.append(exchange)
        return Session(f"session-{number}", system, self._question(rng, contents), tuple(exchanges))

    def _exchange(
        self, rng: random.Random, contents: Contents, *, ends: bool, budget: int
    ) -> Exchange:
        quotes = rng.random() < QUOTE_SHARE
        in_letters = quotes and rng.random() < LETTERS_SHARE
        quoted = self.quotations
        letters = quoted.in_letters if in_letters else ()
        prose = _some(rng, (*quoted.in_prose, *letters)) if quotes else []
        words = prose + _some(rng, quoted.in_text) if quotes else []
        values = _some(rng, (*quoted.in_values, *letters)) if quotes else []
        hang_up = rng.uniform(0.1, 0.8) if rng.random() < self.size.hang_up_share else None
        makers = _ValueMaker(rng, contents, values, self.has_null)
        num_calls = 0 if ends else rng.randint(*MANY_CALLS) if rng.random() < PARALLEL_SHARE else 1
        calls = tuple(makers.call() for _ in range(num_calls))
        text, thinking = "", ""
        if ends or rng.random() < 0.4:
            text = contents.prose(rng.choice((40, 200, 1500)), among=words)
        if rng.random() >= NO_THINKING_SHARE:
            thinking = contents.prose(rng.choice((30, 200, 900)), among=prose)
        budgets = [budget // (index + 1) for index in range(num_calls)]
        return Exchange(
            thinking=thinking,
            text=text + rng.choice(("", "", "\n", " \n\n")) if ends else text,
            calls=calls,
            results=tuple(self._result(rng, contents, budget=each) for each in budgets),
            note=contents.sentence() if calls and rng.random() < NOTE_SHARE else "",
            question=self._question(rng, contents) if ends else "",
            in_letters=in_letters,
            pace=rng.choice(PACES) if hang_up is None else 1,
            hang_up=hang_up,
        )

    def _result(self, rng: random.Random, contents: Contents, *, budget: int) -> str:
        among = _some(rng, self.quotations.in_results) if rng.random() < QUOTE_SHARE else []
        if budget > self.size.file_chars and rng.random() < LONG_FILE_SHARE:
            return contents.file(int(self.size.file_chars * rng.uniform(0.3, 0.98)), among=among)
        if rng.random() < 0.05:
            return ""
        size = int(10 ** rng.uniform(1.3, 3.9 if budget > 10_000 else 2.5))
        return contents.file(size, among=among)

    def _question(self, rng: random.Random, contents: Contents) -> str:
        among = _some(rng, self.quotations.in_results) if rng.random() < QUOTE_SHARE else []
        return contents.prose(rng.choice((60, 600)), among=among)


def _some(rng: random.Random, pieces: Sequence[str]) -> list[str]:
    return rng.sample(pieces, min(len(pieces), rng.randint(1, 4)))


@dataclass(frozen=True)
class _ValueMaker:
    _rng: random.Random
    _contents: Contents
    _among: Sequence[str]
    _has_null: bool

    def call(self) -> Call:
        name = self._rng.choice(tuple(_MAKERS))
        return Call(name, _MAKERS[name](self))

    def _read(self) -> dict[str, Any]:
        rng = self._rng
        arguments: dict[str, Any] = {"file_path": self._contents.path()}
        if rng.random() < 0.5:
            arguments |= {"offset": rng.randint(0, 10**6), "limit": rng.choice((1, 2000))}
        return arguments

    def _write(self) -> dict[str, Any]:
        size = int(10 ** self._rng.uniform(1, 4.2))
        path = self._contents.path()
        return {"file_path": path, "content": self._contents.file(size, among=self._among)}

    def _edit(self) -> dict[str, Any]:
        return {"file_path": self._contents.path(), **self._change()}

    def _change(self) -> dict[str, Any]:
        rng, contents = self._rng, self._contents
        old = ("", "\n", "null", "    x = 1", contents.file(150, among=self._among[:1]))
        change: dict[str, Any] = {"old_string": rng.choice(old)}
        change["new_string"] = contents.file(rng.choice((1, 300)), among=self._among)
        return change | ({"replace_all": rng.random() < 0.5} if rng.random() < 0.6 else {})

    def _multi_edit(self) -> dict[str, Any]:
        edits = [self._change() for _ in range(self._rng.randint(1, 3))]
        return {"file_path": self._contents.path(), "edits": edits}

    def _bash(self) -> dict[str, Any]:
        rng = self._rng
        command = rng.choice(_COMMANDS)
        arguments: dict[str, Any] = {"command": command, "description": self._contents.sentence()}
        if rng.random() < 0.5:
            arguments["timeout"] = rng.choice((0.5, 120000, 3.25))
        return arguments | ({"run_in_background": rng.random() < 0.5} if rng.random() < 0.5 else {})

    def _grep(self) -> dict[str, Any]:
        rng = self._rng
        patterns = r'class\s+"?\w+<T>', "</?div[^>]*>", "null", "true", "]<]", "日本"
        arguments: dict[str, Any] = {"pattern": rng.choice(patterns)}
        arguments["path"] = rng.choice((None, "/src", ".")) if self._has_null else "/src"
        flags = {"-i": rng.random() < 0.5, "-C": rng.randint(0, 9)}
        return arguments | flags | {"output_mode": rng.choice(_MODES)}

    def _todo(self) -> dict[str, Any]:
        rng, contents = self._rng, self._contents
        todos = []
        for number in range(rng.randint(0, 6)):
            todo: dict[str, Any] = {
                "content": contents.sentence(),
                "status": rng.choice(_STATES),
                "activeForm": f"“{contents.name()}” & <{contents.name()}>",
                "priority": number,
                "tags": [contents.name() for _ in range(rng.randint(0, 3))],
            }
            if self._has_null:
                todo["estimate"] = rng.choice((None, 1.5, 3))
            todos.append(todo)
        return {"todos": todos}

    def _task(self) -> dict[str, Any]:
        rng, contents = self._rng, self._contents
        limits = {"depth": rng.randint(1, 9), "ratio": rng.choice((0.25, 2))}
        limits["dry"] = rng.random() < 0.5
        options: dict[str, Any] = {"model": contents.name(), "limits": limits}
        options["paths"] = [contents.path() for _ in range(2)]
        if self._has_null:
            options |= {"parent": None, "matrix": [[1, 2], [], [None, "null"]]}
        name, prompt = contents.name(), contents.prose(300, among=self._among)
        return {"description": name, "prompt": prompt, "options": options}


_COMMANDS = (
    "cd '/test data' && rg -n \"it's\" --glob '*.{ts,py}' | head -20 2>&1",
    "cat <<'EOF' > x.html\n<p>\"a\" & 'b'</p>\nEOF\n",
    'python -c "print(\\"\\\\n\\".join(map(str, range(3))))"',
    "true",
    "007",
)
_MODES = ("content", "files_with_matches", "count")
_STATES = ("pending", "in_progress", "completed")
_MAKERS = {
    "Read": _ValueMaker._read, "Write": _ValueMaker._write, "Edit": _ValueMaker._edit,
    "MultiEdit": _ValueMaker._multi_edit, "Bash": _ValueMaker._bash, "Grep": _ValueMaker._grep,
    "TodoWrite": _ValueMaker._todo, "Task": _ValueMaker._task, "ExitPlanMode": lambda _: {},
}  # fmt: skip

_FILE = Path(__file__).with_name("agent_tools.json")
TOOLS: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
