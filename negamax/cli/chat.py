"""`negamax chat MODEL`: talk to a model in the terminal, or pipe messages in."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from negamax.base import log
from negamax.base.errors import ConfigError, InvalidRequestError
from negamax.cli.engine_options import with_engine_options
from negamax.config.options import EngineOptions
from negamax.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from negamax.engine.client import AsyncEngine
    from negamax.engine.output import RequestOutput

HELP = "Chat with MODEL in the terminal. Each line of piped standard input is one message."

CHAT = "Chat"
_CONTROL_CODES = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_COMMANDS = "/reset forgets the conversation, /exit ends, Ctrl-C stops an answer"


@with_engine_options(defaults={"max_num_seqs": 4, "log_level": "warning"})
def command(
    *,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option("--system", help="System message.", rich_help_panel=CHAT)] = None,
    tools: Annotated[
        str | None, typer.Option("--tools", help="JSON file with tools; you type their results.", rich_help_panel=CHAT)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Per answer.", rich_help_panel=CHAT)] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Default: the model's.", rich_help_panel=CHAT)
    ] = None,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Show answers only.", rich_help_panel=CHAT)] = False,
) -> None:
    """Chat until /exit, Ctrl-D or the end of the input."""
    from negamax.engine.supervisor import EngineSupervisor

    log.setup(engine.log_level, engine.log_format)
    declared = None if tools is None else _read_tools(tools)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with asyncio.Runner() as runner:
        supervisor = runner.run(EngineSupervisor.start(engine))
        session = _Session(
            supervisor.engine,
            system=system,
            tools=declared,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
            show_thinking=not hide_thinking,
        )
        try:
            _talk(session, runner)
        finally:
            runner.run(supervisor.shutdown())


def _read_tools(path: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools is {path!r}, which cannot be read: {error}", hint="give a JSON list of tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"--tools is {path!r}, which holds no list of tools", hint="give a JSON list of tools")
    return tools


def _talk(session: _Session, runner: asyncio.Runner) -> None:
    """Read a line, answer it, until there are no more."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Chatting with {session.model}: {_COMMANDS}.")
    while True:
        asked_for = session.awaited_call
        try:
            line = input((f"result of {asked_for}> " if asked_for else "> ") if interactive else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            session.reset()
            continue
        if not line.strip() and not asked_for:
            continue
        session.add(line)
        if session.awaited_call is None:
            try:
                runner.run(session.answer())
            except KeyboardInterrupt:
                session.take_back()
                print("\n(stopped; your message was taken back)", file=sys.stderr)
            except InvalidRequestError as error:
                session.take_back()
                print(f"{error}", file=sys.stderr)


class _Session:
    """One conversation. Single writer: the command."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        system: str | None,
        tools: list[dict[str, Any]] | None,
        sampling: SamplingParams,
        show_thinking: bool,
    ) -> None:
        from rich.console import Console

        from negamax.api.conversation import PromptBuilder, Voice
        from negamax.text.formats import output_style

        self.model = engine.info.served_model_name
        self._engine = engine
        self._voice = Voice.of(output_style(engine.info.architecture), engine.tokenizer)
        self._prompts = PromptBuilder(
            engine.tokenizer, engine.chat_template, voice=self._voice, max_model_len=engine.info.max_model_len
        )
        self._system: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._tools = tools
        self._sampling = sampling
        self._console = Console(highlight=False, markup=False)
        # thinking is for people: where standard output is a pipe, it goes to standard error
        self._thinking = self._console if self._console.is_terminal else Console(stderr=True, highlight=False, markup=False)
        self._show_thinking = show_thinking
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._system)
        self._open_calls: list[dict[str, Any]] = []

    @property
    def awaited_call(self) -> str | None:
        """The name of the tool whose result the next line is, or None."""
        return self._open_calls[0]["function"]["name"] if self._open_calls else None

    def add(self, line: str) -> None:
        """Take a line: the result of the call that waits, or the user's next message."""
        if self._open_calls:
            call = self._open_calls.pop(0)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": line})
        else:
            self._messages.append({"role": "user", "content": line})

    def take_back(self) -> None:
        """Drop everything from the last user message on: it was not answered."""
        self._open_calls = []
        while self._messages and self._messages.pop()["role"] != "user":
            pass
        if not self._messages:
            self._messages = list(self._system)

    async def answer(self) -> None:
        """Generate the next assistant message and print it as it comes."""
        from negamax.api.conversation import ChoiceReader, Conversation, ReadingRules

        prompt = await self._prompts.chat(Conversation(messages=self._messages, tools=self._tools), num_bytes=0)
        reader = ChoiceReader(self._voice, prompt=prompt, rules=ReadingRules(tools=self._tools, may_call=bool(self._tools)))
        printer = _Printer(self._console, self._thinking if self._show_thinking else None)
        generation = self._engine.generate(prompt.token_ids, self._sampling, request_id=f"chat-{secrets.token_hex(8)}")

        def show(output: RequestOutput) -> None:
            for event in reader.push(output):
                printer.show(event)

        await generation.run(show)
        message = printer.finish()
        self._messages.append(message)
        self._open_calls = list(message.get("tool_calls", ()))


class _Printer:
    """Prints the events of one answer and collects them into a message. Single writer: `_Session.answer`."""

    def __init__(self, console: Any, thinking: Any | None) -> None:
        self._console = console
        self._thinking = thinking
        self._reasoning = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def show(self, event: Any) -> None:
        """Print one event: thinking dimmed, content plain, calls on lines of their own."""
        from negamax.text.output_parser import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart

        match event:
            case ReasoningDelta(text):
                self._reasoning += text
                if self._thinking is not None:
                    self._write(self._thinking, text, style="dim")
            case ContentDelta(text):
                if not self._content:
                    self._break_after_thinking()
                self._content += text
                self._write(self._console, text)
            case ToolCallStart(_, name):
                self._break_after_thinking()
                function = {"name": name, "arguments": ""}
                self._calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            case ToolArgumentsDelta(index, text):
                self._calls[index]["function"]["arguments"] += text
            case ToolCallEnd(index):
                function = self._calls[index]["function"]
                self._write(self._console, f"\n[call] {function['name']}({function['arguments']})", style="cyan")

    def finish(self) -> dict[str, Any]:
        """End the answer's last line; the message as it stands in the history."""
        if self._thinking is not None and self._reasoning and not self._content and not self._calls:
            self._break_after_thinking()
        self._write(self._console, "\n")
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _break_after_thinking(self) -> None:
        if self._thinking is not None and self._reasoning and not self._calls:
            self._write(self._thinking, "\n\n" if self._thinking is self._console else "\n")

    def _write(self, console: Any, text: str, style: str | None = None) -> None:
        if console.is_terminal:
            text = text.translate(_CONTROL_CODES)  # what a model writes must not steer the terminal
        console.print(text, end="", style=style, soft_wrap=True)
        console.file.flush()
