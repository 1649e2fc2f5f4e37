"""The requests of `negamax bench serve`: seeded prompts of given lengths, and requests from files.

A workload is a list of sessions. A session yields request bodies and receives their answers.
"""

# ruff: noqa: SIM905 (syllables read better as text)

import json
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError
from negamax.bench.serve_client import ResponseRecord
from negamax.bench.serve_options import CHAT, COMPLETIONS, BenchOptions

COMMON_IDS = range(300, 4000)  # Token ids that are ordinary text in most vocabularies.
MIN_TOKENS = 4  # Shorter questions and answers in ShareGPT files are skipped.
_SYLLABLES = (
    "ba be bo ca ce co da de do fa fe fi ga go ha he hi ja jo ka ke ki la le li lo ma me mi mo "
    "na ne ni no pa pe pi po ra re "
    "ri ro sa se si so ta te ti to va ve vi wa we za zo"
).split()


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session. `body` contains neither the model nor sampling parameters."""

    body: dict[str, Any]
    prompt_tokens: int | None = None
    pause: float = 0.0  # seconds to wait before the request is sent


@dataclass(frozen=True)
class TurnResponse:
    """The answer to a turn. `message` is None unless the session reads the answers."""

    record: ResponseRecord
    message: dict[str, Any] | None


Turns = Generator[SessionTurn, TurnResponse, None]


@dataclass(frozen=True)
class Session:
    """A sequence of requests, called turns. Each call of `start` yields the same turns."""

    num_turns: int
    start: Callable[[], Turns]
    wants_responses: bool = False  # whether `start` reads the server's answers


@dataclass(frozen=True)
class BenchWorkload:
    """Timed sessions, warm-up sessions, and notes for the report."""

    sessions: tuple[Session, ...]
    warmups: tuple[Session, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """Number of timed requests."""
        return sum(session.num_turns for session in self.sessions)


@dataclass(frozen=True)
class TextScale:
    """The server's tokens per character of generated text, measured or assumed."""

    tokens_per_char: float = 0.25
    overhead: int = 0  # tokens of an empty prompt, for example from a chat template

    def chars(self, num_tokens: float, *, whole_prompt: bool = False) -> int:
        """Convert tokens to characters. If `whole_prompt`, subtract the `overhead` tokens first."""
        num_tokens -= self.overhead if whole_prompt else 0
        return max(1, round(num_tokens / self.tokens_per_char))

    def tokens(self, num_chars: int) -> int:
        """Convert characters to tokens."""
        return max(1, round(num_chars * self.tokens_per_char))


def session_of(*turns: SessionTurn) -> Session:
    """Make a session of fixed requests."""

    def start() -> Turns:
        for turn in turns:  # noqa: UP028 (`yield from` cannot send answers to a tuple)
            yield turn

    return Session(len(turns), start)


def random_text(rng: random.Random, num_chars: int) -> str:
    """Make a text of random words with exactly `num_chars` characters."""
    words: list[str] = []
    length = 0
    while length <= num_chars:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_chars]


@dataclass(frozen=True)
class Prompts:
    """Makes prompts of given lengths: token ids, or text whose length `scale` determines."""

    options: BenchOptions
    scale: TextScale | None  # None: prompts are token ids instead of text
    vocabulary: Sequence[int] = COMMON_IDS

    def part(self, rng: random.Random, num_tokens: int, *, whole_prompt: bool = False) -> Any:
        """Make a part of a prompt. The method `turn` joins the parts."""
        if self.scale is None:
            return rng.choices(self.vocabulary, k=num_tokens)
        if not num_tokens:
            return ""
        return random_text(rng, self.scale.chars(num_tokens, whole_prompt=whole_prompt))

    def turn(self, *parts: Any, output_len: int) -> SessionTurn:
        """Make a request whose prompt is the concatenated `parts`."""
        if self.scale is None:
            ids = [token for part in parts for token in part]
            return SessionTurn({"prompt": ids, "max_tokens": output_len}, prompt_tokens=len(ids))
        prompt = as_prompt(" ".join(part for part in parts if part), self.options)
        return SessionTurn({**prompt, "max_tokens": output_len})


def as_prompt(text: str, options: BenchOptions) -> dict[str, Any]:
    """Return `text` as a user message for chat routes, or else as a prompt."""
    if options.is_chat:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text}


def random_turns(prompts: Prompts) -> Iterator[SessionTurn]:
    """Yield requests of random lengths, drawn uniformly from `options.length_range`."""
    options, rng = prompts.options, random.Random(prompts.options.seed)
    prefix = prompts.part(rng, options.random_prefix_len)

    inputs = options.length_range(options.random_input_len)
    outputs = options.length_range(options.random_output_len)
    while True:
        fresh = prompts.part(rng, rng.randint(*inputs), whole_prompt=True)
        yield prompts.turn(prefix, fresh, output_len=rng.randint(*outputs))


def prefix_repetition_turns(prompts: Prompts) -> Iterator[SessionTurn]:
    """Yield prompts with a shared prefix and a unique suffix. All prefixes are equally common."""
    options, rng = prompts.options, random.Random(prompts.options.seed)
    prefixes = [
        prompts.part(rng, options.prefix_repetition_prefix_len)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    while True:
        for prefix in rng.sample(prefixes, len(prefixes)):
            suffix = prompts.part(rng, options.prefix_repetition_suffix_len, whole_prompt=True)
            yield prompts.turn(prefix, suffix, output_len=options.prefix_repetition_output_len)


def endless_workload(turns: Iterator[SessionTurn], options: BenchOptions) -> BenchWorkload:
    """Time the first `num_prompts` of `turns`. Warm up with the next `num_warmups` of `turns`."""
    timed = tuple(map(session_of, islice(turns, options.num_prompts)))
    return BenchWorkload(timed, tuple(map(session_of, islice(turns, options.num_warmups))))


def longest_prompt(options: BenchOptions) -> int:
    """Return the largest number of tokens that a random prompt and its output have together."""
    if options.dataset_name == "prefix_repetition":
        prompt = options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len
        return prompt + options.prefix_repetition_output_len
    lengths = (options.random_input_len, options.random_output_len)
    return options.random_prefix_len + sum(options.length_range(length)[1] for length in lengths)


# Files


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """Read the first question and answer of each conversation. Raises `ConfigError`."""
    hint = "a ShareGPT file is a list of conversations"
    try:
        conversations = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path!r} is not JSON: {error}", hint=hint) from None
    if not isinstance(conversations, list):
        raise ConfigError(f"--dataset-path {path!r} does not contain a list", hint=hint)
    pairs = [pair for pair in map(_first_pair, conversations) if pair is not None]
    if not pairs:
        refusal = f"none of the {len(conversations)} conversations in {path!r}"
        turns = '[{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]'
        hint = f'each conversation is {{"conversations": {turns}}}'
        raise ConfigError(f"{refusal} has a question and an answer", hint=hint)
    return pairs


def _first_pair(conversation: Any) -> tuple[str, str] | None:
    if not isinstance(conversation, dict):
        return None
    names = ("conversations", "conversation", "messages")
    turns = next((found for name in names if (found := conversation.get(name))), None)
    texts: list[Any] = [
        turn.get("value", turn.get("content"))
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) != "system"
    ][:2]
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return texts[0], texts[1]


def sharegpt_workload(
    pairs: Sequence[tuple[str, str]],
    options: BenchOptions,
    *,
    count: Callable[[str], int],
    context_length: int | None,
) -> BenchWorkload:
    """Make shuffled requests with the recorded output lengths. `count` counts text tokens."""
    limit = min(options.sharegpt_context_len or context_length or 2**62, context_length or 2**62)
    turns = []
    for question, answer in pairs:
        prompt = count(question)
        output = options.sharegpt_output_len or count(answer)
        if (
            prompt >= MIN_TOKENS
            and output >= min(MIN_TOKENS, options.sharegpt_output_len or MIN_TOKENS)
            and prompt + output <= limit
        ):
            turns.append(SessionTurn({**as_prompt(question, options), "max_tokens": output}))
    if not turns:
        text = f"none of the {len(pairs)} conversations fits in {limit} tokens"
        raise ConfigError(text, hint="raise --sharegpt-context-len")
    random.Random(options.seed).shuffle(turns)
    notes = []
    if left_out := len(pairs) - len(turns):
        lengths = f"shorter than {MIN_TOKENS} or longer than {limit} tokens"
        notes.append(f"{left_out} conversations were skipped: {lengths}")
    return file_workload(list(map(session_of, turns)), options, notes=notes)


def read_requests(path: str, options: BenchOptions) -> list[Session]:
    """Read a file with one JSON object per line: a request body, or {body, session, delay}.

    Requests of one session are sent in order, each `delay` seconds after the previous answer.
    Raises `ConfigError` with the number of an invalid line.
    """
    sessions: dict[str, list[SessionTurn]] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number} of --dataset-path {path!r}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} is a JSON {type(entry).__name__}; an object is needed")
        body = entry.get("body", entry)
        needed = "messages" if options.is_chat else "prompt"
        if not isinstance(body, dict) or needed not in body:
            route, other = (CHAT, COMPLETIONS) if options.is_chat else (COMPLETIONS, CHAT)
            hint = f"use --endpoint {other} for requests of this file"
            raise ConfigError(f"{where} has no {needed!r}, which {route} needs", hint=hint)
        delay = entry.get("delay", 0.0) if "body" in entry else 0.0
        if not isinstance(delay, int | float) or not 0 <= delay < 1e6:
            raise ConfigError(f"{where} has delay {delay!r}; allowed: 0 or more seconds")
        is_limited = body.keys() & {"max_tokens", "max_completion_tokens"}
        limits = {} if is_limited else {"max_tokens": options.custom_output_len}
        key = str(entry["session"]) if "body" in entry and "session" in entry else f" {number}"
        sessions.setdefault(key, []).append(SessionTurn({**body, **limits}, pause=float(delay)))
    if not sessions:
        raise ConfigError(f"--dataset-path {path!r} has no requests")
    return [session_of(*turns) for turns in sessions.values()]


def file_workload(
    sessions: Sequence[Session], options: BenchOptions, *, notes: Iterable[str] = ()
) -> BenchWorkload:
    """Time the first `num_prompts` requests, repeated if needed. Warm up with the last requests."""
    timed = take_turns(cycle(sessions), options.num_prompts)
    repeated = sum(session.num_turns for session in sessions)
    notes = [*notes]
    if repeated < options.num_prompts:
        repetition = f"the file's {repeated} requests were repeated"
        notes.append(f"{repetition}: repeated prompts may be cached")
    elif repeated == options.num_prompts and options.num_warmups:
        again = "the warm-up sends some timed requests, and their prompts may be cached"
        notes.append(f"the file has no spare requests: {again}")
    last = islice(cycle(reversed(sessions)), options.num_warmups)
    return BenchWorkload(timed, tuple(shortened(each, 1) for each in last), tuple(notes))


def take_turns(sessions: Iterator[Session], num_turns: int) -> tuple[Session, ...]:
    """Return sessions with `num_turns` turns in total. The last session may be truncated."""
    taken: list[Session] = []
    while num_turns > 0:
        session = next(sessions)
        taken.append(session if session.num_turns <= num_turns else shortened(session, num_turns))
        num_turns -= taken[-1].num_turns
    return tuple(taken)


def shortened(session: Session, num_turns: int) -> Session:
    """Truncate `session` to `num_turns` turns."""

    def start() -> Turns:
        turns = session.start()
        turn = next(turns)
        for _ in range(num_turns - 1):
            try:
                turn = turns.send((yield turn))
            except StopIteration:
                return
        yield turn

    return Session(num_turns, start, wants_responses=session.wants_responses)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        refusal = f"--dataset-path is {path[:200]!r}, which cannot be read: {error}"
        raise ConfigError(refusal) from None
