"""`negamax verify URL` runs MiniMax's protocol checks against an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import typer

from negamax.base import env
from negamax.base.errors import check_choice
from negamax.cli.bench_options import json_option, write_json
from negamax.cli.options import setting

_THINKING = ("auto", "switchable", "forced", "any")
HELP = (
    "Check whether a running server meets MiniMax's requirements for tool calls, schemas, "
    "thinking, key order, streams and usage."
)


def api_key_option() -> Any:
    return setting(None, "Send this API key. Default: NEGAMAX_API_KEY, or OPENAI_API_KEY.")


def url_argument() -> Any:
    help = "The server's address, such as http://127.0.0.1:8000."
    return typer.Argument(..., metavar="URL", help=help, show_default=False)


def model_option() -> Any:
    return setting(None, "Set the model's name. Default: the first model in /v1/models.")


def find_key(option: str | None) -> str | None:
    """Return the API key to send, which is the first of several keys."""
    return (option or env.get("OPENAI_API_KEY") or "").partition(",")[0].strip() or None


def command(
    url: str = url_argument(),
    model: str | None = model_option(),
    api_key: str | None = api_key_option(),
    concurrency: int = setting(4, "Limit the concurrent requests.", min=1, max=1000),
    timeout: float = setting(120.0, "Treat a request as failed after this many seconds.", min=0.1),
    repeat: int = setting(1, "Repeat all checks this many times; MiniMax repeats 10 times.", min=1),
    thinking: str = setting(
        "auto",
        "Choose whether requests must be able to disable thinking: yes (switchable, M3), no "
        "(forced, M3.1), or either (any). auto decides by the model's name.",
        choices=_THINKING,
    ),
    suite: Path | None = setting(
        None,
        "Replace the rated cases by the cases in this JSONL file, such as MiniMax's sample.jsonl.",
    ),
    json_file: Path | None = json_option(),
) -> None:
    """Exit with 0 if all thresholds are met, else with 1."""
    from negamax.bench.server_probe import connect
    from negamax.bench.verify import is_met, render, verify

    check_choice("--thinking", thinking, _THINKING)
    client = connect(url, api_key=find_key(api_key), timeout=timeout)
    limits: dict[str, Any] = {"concurrency": concurrency, "timeout": timeout, "repeat": repeat}
    verified = verify(client, model=model, thinking=thinking, suite=suite, **limits)
    rows = asyncio.run(verified)
    print(render(rows))
    documents = [row.as_dict() for row in rows]
    write_json(json_file, {"url": url, "is_met": is_met(rows), "rows": documents})
    raise typer.Exit(0 if is_met(rows) else 1)
