"""`negamax check URL`: send one request to each endpoint of a server."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import typer

from negamax.base.errors import check_choice
from negamax.cli.bench_options import json_option, write_json
from negamax.cli.options import setting
from negamax.cli.verify import api_key_option, find_key, model_option, url_argument

HELP = "Send one small request to each endpoint of a running server, within ten seconds."


def command(
    url: str = url_argument(),
    model: str | None = model_option(),
    api_key: str | None = api_key_option(),
    timeout: float = setting(10.0, "Limit the total time of all requests, in seconds.", min=0.1),
    require: list[str] | None = setting(
        None, "Fail if the server lacks this endpoint (a name in the output); may be repeated."
    ),
    json_file: Path | None = json_option(),
) -> None:
    """Exit with 0 if at least one endpoint answers and no endpoint fails, otherwise with 1."""
    from negamax.bench.endpoint_check import ENDPOINTS, check_endpoints, is_working
    from negamax.bench.server_probe import connect

    required = require or ()
    for name in required:
        check_choice("--require", name, ENDPOINTS)
    client = connect(url, api_key=find_key(api_key), timeout=timeout)
    asked = check_endpoints(client, model=model, timeout=timeout, required=required)
    states = asyncio.run(asked)
    for each in states:
        line = f"{each.name:13}{each.state:8}{each.milliseconds:8.0f} ms  {each.detail}"
        print(line.rstrip())
    is_met = is_working(states)
    rows = [dataclasses.asdict(each) for each in states]
    write_json(json_file, {"url": url, "is_met": is_met, "rows": rows})
    raise typer.Exit(0 if is_met else 1)
