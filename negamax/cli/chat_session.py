"""A conversation in the terminal: messages, commands, and the loop that reads and answers."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from negamax.base import env
from negamax.base.errors import ConfigError, EngineDeadError, NegamaxError
from negamax.scheduler.request import SamplingParams
from negamax.text.parser.events import ParserEvent

if TYPE_CHECKING:
    from negamax.cli.chat_view import ChatView

HISTORY_LINES = 1000
_HELP = """\
/help          show this list
/system TEXT   set the system message, or show it without TEXT
/save FILE     write the conversation to a JSON file
/load FILE     continue a saved conversation
/clear         clear the conversation (also /reset)
/exit          end the chat (also Ctrl-D)
Ctrl-C stops an answer. Put a space before a message that begins with a slash."""


class TokenCounts(NamedTuple):
    """Token counts of one answer."""

    prompt: int
    cached: int  # number of prompt tokens found in the prefix cache
    output: int


class ChatInput(NamedTuple):
    """The messages, tools and sampling parameters that produce the next message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams


Show = Callable[[Sequence[ParserEvent]], None]


class Backend(Protocol):
    """The engine or the server that answers."""

    model: str

    def answer(self, prompt: ChatInput, show: Show) -> TokenCounts:
        """Generate the next message and pass its events to `show`. Raises `NegamaxError`."""
        ...


@dataclass
class _Clock:
    """Times of an answer in monotonic seconds: its request, its first piece and its last piece."""

    begin: float
    first: float | None = None
    last: float = 0.0

    def tick(self) -> None:
        """Record that a piece of the answer has arrived."""
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last

    def figures(self, counts: TokenCounts) -> str:
        """Format the answer's times and token counts."""
        if self.first is None:
            return ""
        parts = [f"{self.first - self.begin:.2f} s to the first token"]
        if counts.output > 1 and self.last > self.first:
            rate = (counts.output - 1) / (self.last - self.first)
            parts.append(f"{rate:.1f} tokens/s")
        if counts.prompt:
            cached = f" ({counts.cached} cached)" if counts.cached else ""
            parts.append(f"{counts.prompt} tokens in{cached}, {counts.output} out")
        return f"[{', '.join(parts)}]"


@dataclass
class ChatSession:
    """One conversation, which only `talk` changes."""

    backend: Backend
    system: str | None
    tools: list[dict[str, Any]] | None
    sampling: SamplingParams
    _messages: list[dict[str, Any]] = field(default_factory=list, init=False)
    _open_calls: list[dict[str, Any]] = field(default_factory=list, init=False)

    @property
    def awaited_call(self) -> str | None:
        """Name of the tool whose result the user types next, or None."""
        return self._open_calls[0]["function"]["name"] if self._open_calls else None

    def clear(self) -> None:
        """Drop all messages except the system message."""
        self._messages, self._open_calls = [], []

    def add(self, line: str) -> None:
        """Add a line that the user has typed: the result of an open tool call, or a new message."""
        if self._open_calls:
            call = self._open_calls.pop(0)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": line})
        else:
            self._messages.append({"role": "user", "content": line})

    def answer(self, view: ChatView) -> None:
        """Generate the next message, and show the message as it arrives.

        Remove the user's message if the backend refuses it, or if its answer has no content.
        """
        shown, clock = view.answer(), _Clock(time.monotonic())

        def show(events: Sequence[ParserEvent]) -> None:
            clock.tick()
            shown.show(events)

        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            prompt = ChatInput([*system, *self._messages], self.tools, self.sampling)
            counts = self.backend.answer(prompt, show)
        except KeyboardInterrupt:
            message = shown.finish()
            message.pop("tool_calls", None)
            if message["content"]:
                self._messages.append(message)
                view.problem("(stopped)")
            else:
                self._take_back()
                view.problem("(stopped; your message was removed)")
            return
        except NegamaxError as error:
            shown.finish()
            self._take_back()
            if isinstance(error, EngineDeadError):
                raise
            view.problem(str(error))
            return
        except BaseException:
            shown.finish()  # show the cursor again
            raise
        self._messages.append(message := shown.finish())
        self._open_calls = list(message.get("tool_calls", ()))
        view.figures(clock.figures(counts))

    def run_command(self, line: str, view: ChatView) -> bool:
        """Run a chat command; return False if the command ends the chat."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/clear" | "/reset":
                self.clear()
                view.note("(the conversation is cleared)")
            case "/help":
                view.note(_HELP)
            case "/system":
                self.system = argument or self.system
                view.note(f"system message: {self.system or 'none'}")
            case "/save" | "/load" if not argument:
                view.problem(f"{name} needs the name of a file")
            case "/save":
                self._save(Path(argument).expanduser(), view)
            case "/load":
                self._load(Path(argument).expanduser(), view)
            case _:
                view.problem(f"unknown command {name}; /help lists the commands")
        return True

    def is_command(self, line: str) -> bool:
        """Return whether `line` is a chat command. A tool's result may also begin with a slash."""
        name = line.partition(" ")[0].strip()
        if self.awaited_call is not None:
            return name in ("/exit", "/clear", "/reset")
        return name.startswith("/")

    def _take_back(self) -> None:
        """Remove the last user message and everything after it."""
        self._open_calls = []
        while self._messages and self._messages.pop()["role"] != "user":
            pass

    def _save(self, path: Path, view: ChatView) -> None:
        kept = {"model": self.backend.model, "system": self.system, "messages": self._messages}
        try:
            path.write_bytes(json.dumps(kept, ensure_ascii=False, indent=1).encode())
        except (OSError, ValueError) as error:
            view.problem(f"the conversation cannot be saved: {error}")
        else:
            view.note(f"saved to {path} ({len(self._messages)} messages)")

    def _load(self, path: Path, view: ChatView) -> None:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            messages, system = kept["messages"], kept["system"]
            roles_are_texts = all(isinstance(message["role"], str) for message in messages)
            if not roles_are_texts or not isinstance(system, str | None):
                raise TypeError
        except OSError as error:
            view.problem(f"the conversation cannot be loaded: {error}")
        except (ValueError, LookupError, TypeError):
            view.problem(f"{path} is not a conversation that /save has written")
        else:
            self._messages, self.system, self._open_calls = list(messages), system, []
            view.note(f"loaded {path} ({len(messages)} messages)")


def talk(session: ChatSession, view: ChatView) -> None:
    """Read lines until the input ends. Run lines that are commands, and answer all other lines."""
    interactive = view.is_interactive
    if interactive:
        hint = "/help lists the commands, Ctrl-C stops an answer."
        view.note(f"Chatting with {session.backend.model}: {hint}")
    with _line_history() if interactive else contextlib.nullcontext():
        while True:
            awaited = session.awaited_call
            prompt = f"result of {awaited}> " if awaited else "> "
            try:
                line = input(prompt if interactive else "")
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not {error.encoding.upper()}") from None
            except KeyboardInterrupt:
                if not interactive:
                    return
                view.problem("\n(/exit or Ctrl-D ends the chat)")
                continue
            if session.is_command(line):
                if not session.run_command(line, view):
                    return
            elif line.strip() or awaited:
                session.add(line.removeprefix(" ") if line.startswith(" /") else line)
                if session.awaited_call is None:
                    session.answer(view)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Keep the history of typed lines in a private file, if Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "negamax" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)
        except OSError as error:
            print(f"the history cannot be saved: {error}", file=sys.stderr)
