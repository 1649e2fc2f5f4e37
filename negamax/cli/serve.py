"""`negamax serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from negamax.base import log
from negamax.base.errors import ConfigError
from negamax.cli.engine_options import with_engine_options
from negamax.config.options import EngineOptions, ServerOptions

if TYPE_CHECKING:
    from negamax.engine.client import AsyncEngine

HELP = "Serve MODEL over an OpenAI-compatible HTTP API."

SERVER, COMPATIBLE = "Server", "Accepted for compatibility"
TOOL_PARSERS = ("auto", "minimax_m2", "minimax-m2")
REASONING_PARSERS = ("auto", "minimax_m2", "minimax-m2", "minimax", "minimax_m2_append_think", "minimax-append-think")


@with_engine_options()
def command(
    *,
    engine: EngineOptions,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.", rich_help_panel=SERVER)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="Name in the API; may be repeated.", rich_help_panel=SERVER)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key that requests must carry.", rich_help_panel=SERVER)
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", help="File that replaces the checkpoint's template.", rich_help_panel=SERVER),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Never needed.", rich_help_panel=COMPATIBLE)
    ] = False,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Always on.", rich_help_panel=COMPATIBLE)
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option("--tool-call-parser", help="Chosen by the model.", rich_help_panel=COMPATIBLE)
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option("--reasoning-parser", help="Chosen by the model.", rich_help_panel=COMPATIBLE)
    ] = None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    started = time.monotonic()
    log.setup(engine.log_level)
    if chat_template is not None and not Path(chat_template).is_file():
        raise ConfigError(f"--chat-template is {chat_template!r}, which is not a file", hint="give a Jinja template file")
    notes = {
        "--trust-remote-code": trust_remote_code and "never needed: no code of a checkpoint is run",
        "--enable-auto-tool-choice": enable_auto_tool_choice and "always on",
        "--tool-call-parser": _parser_note("--tool-call-parser", tool_call_parser, TOOL_PARSERS),
        "--reasoning-parser": _parser_note("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    }
    for flag, note in notes.items():
        if note:
            print(f"note: {flag} has no effect: {note}", file=sys.stderr)
    server = ServerOptions(
        host=host,
        port=port,
        served_model_name=tuple(served_model_name or ()),
        api_key=api_key,
        chat_template=chat_template,
        log_level=engine.log_level,
    )
    _serve(engine, server, started=started)


def _parser_note(flag: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if value not in known:
        raise ConfigError(f"{flag} is {value!r}; allowed: {', '.join(known)}", hint="or leave it out: the model decides")
    return "the model decides; reasoning is always split from content"


def _serve(engine_options: EngineOptions, server_options: ServerOptions, *, started: float) -> None:
    from negamax.api import server  # the HTTP stack: not needed for --help

    listener = server.open_listener(server_options.host, server_options.port)

    def announce(url: str, engine: AsyncEngine) -> None:
        name = (server_options.served_model_name or (engine.info.served_model_name,))[0]
        seconds = time.monotonic() - started
        print(f"Negamax is ready: {url}/v1 serves {name!r} ({engine.info.max_model_len} tokens, {seconds:.1f} s)", flush=True)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.serve(engine_options, server_options, listener=listener, announce=announce))
    finally:
        listener.close()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop  # type: ignore[no-any-return]
