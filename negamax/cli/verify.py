"""`negamax verify URL`: MiniMax's protocol checks against an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import typer

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.cli.bench_options import json_option
from negamax.cli.options import setting

_THINKING = ("auto", "switchable", "forced", "any")
HELP = (
    "Check a running server against MiniMax's demands on deployments: tool calls, schemas, "
    "thinking, key order, streams, usage."
)


def api_key_option() -> Any:
    return setting(None, "Send this key. Default: NEGAMAX_API_KEY, else OPENAI_API_KEY.")


def url_argument() -> Any:
    help = "The server's address, such as http://127.0.0.1:8000."
    return typer.Argument(..., metavar="URL", help=help, show_default=False)


def model_option() -> Any:
    return setting(None, "Name the model. Default: the first of /v1/models.")


def find_key(option: str | None) -> str | None:
    """Return the key to send: the first one, as NEGAMAX_API_KEY may hold those of a server."""
    return (option or env.get("OPENAI_API_KEY") or "").partition(",")[0].strip() or None


def write_report(file: Path | None, document: dict[str, Any]) -> None:
    """Write the JSON of --json, if it is given."""
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def command(
    url: str = url_argument(),
    model: str | None = model_option(),
    api_key: str | None = api_key_option(),
    concurrency: int = setting(4, "Limit the concurrent requests.", min=1, max=1000),
    timeout: float = setting(120.0, "Count a request as failed after this many seconds.", min=0.1),
    repeat: int = setting(1, "Repeat all checks; MiniMax's own runs do it 10 times.", min=1),
    thinking: str = setting(
        "auto",
        "Say how the model thinks: switchable (M3), forced (M3.1), any (both pass). "
        "Default: by the model's name.",
        choices=_THINKING,
    ),
    suite: Path | None = setting(
        None, "Take the cases of rates from this JSONL file, such as MiniMax's sample.jsonl."
    ),
    json_file: Path | None = json_option(),
) -> None:
    """Exit with 0 if all thresholds are met, else with 1."""
    from negamax.bench.server_probe import connect
    from negamax.bench.verify import is_met, render, verify

    if thinking not in _THINKING:
        raise ConfigError(f"--thinking is {thinking[:60]!r}; allowed: {', '.join(_THINKING)}")
    client = connect(url, api_key=find_key(api_key), timeout=timeout)
    rows = asyncio.run(
        verify(
            client,
            model=model,
            thinking=thinking,
            suite=suite,
            concurrency=concurrency,
            timeout=timeout,
            repeat=repeat,
        )
    )
    print(render(rows))
    documents = [row.as_dict() for row in rows]
    write_report(json_file, {"url": url, "is_met": is_met(rows), "rows": documents})
    raise typer.Exit(0 if is_met(rows) else 1)
