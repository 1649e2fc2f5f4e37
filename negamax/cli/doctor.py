"""`negamax doctor`: what is here, and what could be served with it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Annotated, Any

import typer

from negamax.base import env
from negamax.cli import doctor_checks as checks
from negamax.cli.doctor_checks import Check
from negamax.cli.doctor_models import Gpu, Machine, ModelVerdict, verdicts
from negamax.cli.lines import print_line
from negamax.options.server import ServerOptions

HELP = "Look at this machine: versions, GPUs, caches, ports, and which models it can serve."

_PROBE_SECONDS = 120.0
_MARKS = {"ok": "ok", "info": "-", "warn": "WARN", "fail": "FAIL"}


def command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Ask the Hugging Face hub whether it can be reached.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to look at.")
    ] = ServerOptions.port,
) -> None:
    """Exit code 0: something can be served here; 1: nothing can."""
    child = subprocess.Popen(
        [sys.executable, "-m", "negamax.cli.doctor_probe"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    beside = [*checks.caches(), checks.port(port)]
    if network:
        beside.append(checks.network())
    probe = _found_by(child)
    found = [*checks.software(probe), *checks.hardware(probe), *beside, *checks.variables()]
    is_broken = any(check.status == "fail" for check in found)
    models = [] if is_broken else verdicts(_machine(probe))
    works = any(verdict.runs for verdict in models)
    if as_json:
        answer = {
            "can_serve": works,
            "checks": [dataclasses.asdict(check) for check in found],
            "models": [dataclasses.asdict(verdict) for verdict in models],
        }
        print(json.dumps(answer, indent=2))
    else:
        _print(found, models)
    raise typer.Exit(0 if works else 1)


def _found_by(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What the probe has printed, or why it did not."""
    try:
        output, errors = child.communicate(timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"error": f"importing it and asking the driver takes over {_PROBE_SECONDS:g} s"}
    lines = output.strip().splitlines()
    if child.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = (errors.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the import ended with exit code {child.returncode}: {last}"}


def _machine(probe: dict[str, Any]) -> Machine:
    gpus = [] if probe["hip"] else probe["gpus"]
    return Machine(
        gpus=tuple(
            Gpu(gpu["name"], gpu["total_bytes"], gpu["free_bytes"], tuple(gpu["capability"]))
            for gpu in gpus
        ),
        memory_bytes=env.available_memory(),
        cpu_bfloat16=probe["cpu_bfloat16"],
        disk_bytes=checks.free_disk(checks.hub_folder()),
    )


def _print(found: list[Check], models: list[ModelVerdict]) -> None:
    section = ""
    for check in found:
        if check.section != section:
            section = check.section
            print(f"\n{section}" if check is not found[0] else section)
        print_line(f"  {_MARKS[check.status]:4}  {check.name:18} {check.detail}", indent=27)
        if check.remedy:
            print(f"  {'':4}  {'':18} -> {check.remedy}")
    print("\nWhat can be served here")
    width = max((len(verdict.model) for verdict in models), default=0)
    for verdict in models:
        mark = "yes" if verdict.runs else "no"
        print_line(f"  {mark:4}  {verdict.model:{width}} {verdict.detail}", indent=width + 9)
        if verdict.runs:
            print(f"  {'':4}  {'':{width}} -> {verdict.command}")
    if not models:
        print("  nothing: see the lines marked FAIL")
