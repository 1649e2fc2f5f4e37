"""`negamax chat`: chat with a local model or a server, in a terminal or through pipes."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from negamax.base import env, log
from negamax.base.errors import ConfigError
from negamax.cli.io import check_sampling, loading, read_tools
from negamax.cli.options import add_options, setting
from negamax.config.embedded import QUOTED_NAMES
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams

HELP = (
    "Chat in the terminal with MODEL, or with a running server (--url). Each line of piped "
    "standard input is one message."
)

CHAT = "Chat"
KEY_VARIABLE = "NEGAMAX_API_KEY"


@add_options(defaults={"max_num_seqs": 4, "log_level": "warning"}, needs_model=False)
def command(
    *,
    engine: EngineOptions,
    url: str | None = setting(
        None,
        "Chat with the OpenAI-compatible server at this address. With --url, MODEL is a model of "
        "the server (default: its first model), and engine options have no effect.",
        panel=CHAT,
    ),
    api_key: str | None = setting(None, f"Send this key to the server. {KEY_VARIABLE} is safer."),
    system: str | None = setting(None, "Set the system message."),
    tools: str | None = setting(
        None, "Declare the tools in this JSON file; you type the results of calls."
    ),
    max_tokens: int | None = setting(None, "Limit the tokens of an answer."),
    temperature: float | None = setting(None, "Set the temperature (default: set by the model)."),
    hide_thinking: bool = setting(False, "Do not show the thinking.", "--hide-thinking"),
    plain: bool = setting(False, "Show Markdown as plain text.", "--plain"),
) -> None:
    """Chat with the model until /exit, Ctrl-D or the end of the input."""
    from negamax.cli.chat_session import ChatSession, talk
    from negamax.cli.chat_view import ChatView

    log.setup(engine.log_level, engine.log_format)
    if url is None and not engine.model:
        hint = f"pass a folder, a hub id, {QUOTED_NAMES}, or the --url of a server"
        raise ConfigError("MODEL is missing", hint=hint)
    declared = None if tools is None else read_tools(Path(tools))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    check_sampling(sampling, engine)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    view = ChatView(show_thinking=not hide_thinking, is_plain=plain)

    def converse(backend: Any) -> None:
        talk(ChatSession(backend, system=system, tools=declared, sampling=sampling), view)

    if url is not None:
        from negamax.cli.chat_server import ServerBackend

        key, model = api_key or env.get(KEY_VARIABLE), engine.model or None
        converse(ServerBackend.connect(url, api_key=key, model=model))
        return
    from negamax.cli.chat_engine import EngineBackend

    with asyncio.Runner() as runner:
        with loading(engine.model):
            backend = EngineBackend.start(engine, runner)
        try:
            converse(backend)
        finally:
            backend.shutdown()
