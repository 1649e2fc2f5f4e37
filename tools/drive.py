"""Load a server of this machine, or replay a coding agent's day against it, and report problems.

    python tools/drive.py                        # all scenarios at full size
    python tools/drive.py soak overload          # some of them
    python tools/drive.py scripted --format m3 --m3-template FILE
    python tools/drive.py --small --json FILE    # the sizes of the test suite

The exit code is 1 if a scenario found a problem. `--small` does not judge figures that depend on
the load of the machine.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from negamax.checkpoint.hub import resolve_model
from tools.load.aborts import aborts
from tools.load.frontend import frontend
from tools.load.fuzz import fuzz
from tools.load.overload import overload
from tools.load.soak import KV_BLOCKS, soak
from tools.replay.clients import WAYS
from tools.replay.formats import FAMILIES, m3_folder
from tools.replay.live import LiveSize, live_day
from tools.replay.script import DaySize
from tools.replay.scripted import scripted_day

Report = dict[str, Any]  # The list "problems" is empty if the scenario succeeded.


def run_soak(args: argparse.Namespace) -> Report:
    """Send mixed requests from 64 clients for 10 minutes. 5 % of the requests are aborted."""
    seconds = args.seconds or (4 if args.small else 600)
    # The heap grows in steps of 2 MiB, which is too much for half of a short run.
    max_slope = None if seconds < 300 else 1.0
    sizes = {"clients": args.clients or 64, "seconds": seconds, "abort_share": 0.05}
    given = {"model": args.model, "host_gib": args.kv_offloading_size}
    return asyncio.run(soak(**sizes, max_slope=max_slope, **_common(args), **given))


def run_overload(args: argparse.Namespace) -> Report:
    """Send 10 times as many requests as the server can answer."""
    seconds, max_ratio = args.seconds or (1.5 if args.small else 30), None if args.small else 2.0
    return asyncio.run(overload(factor=10, seconds=seconds, max_ratio=max_ratio, **_common(args)))


def run_aborts(args: argparse.Namespace) -> Report:
    """Abort 10,000 requests at random moments."""
    count, clients = args.count or (300 if args.small else 10_000), args.clients or 32
    return asyncio.run(aborts(count=count, clients=clients, **_common(args)))


def run_fuzz(args: argparse.Namespace) -> Report:
    """Send 100,000 bodies, most of which are invalid."""
    count, clients = args.count or (1000 if args.small else 100_000), args.clients or 8
    return asyncio.run(fuzz(count=count, clients=clients, **_common(args)))


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return {"seed": args.seed, "num_servers": args.api_server_count}


def run_frontend(args: argparse.Namespace) -> Report:
    """Measure CPU time per token and latency of a server whose engine has no model."""
    return frontend(
        tokens=args.count or (100 if args.small else 400),
        step_ms=args.step_ms or (10.0 if args.small else 25.0),
        num_servers=args.api_server_count,
        max_us=None if args.small else 60.0,
        max_p99_ms=None if args.small else 2.0,
    )


def run_scripted(args: argparse.Namespace) -> Report:
    """Replay agents over three APIs with prepared answers, and check each word."""
    sessions = args.sessions or (len(WAYS) if args.small else 8)
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        is_m2 = args.format == "m2"
        return scripted_day(
            families=FAMILIES[args.format],
            folder=resolve_model("nano") if is_m2 else m3_folder(args.m3_template, Path(name)),
            size=DaySize.small(sessions) if args.small else DaySize.full(sessions),
            seed=args.seed,
            step_ms=1.0 if args.step_ms is None else args.step_ms,
        )


def run_live(args: argparse.Namespace) -> Report:
    """Replay agents against the built-in model, and check its calls against the tools' schemas."""
    size = LiveSize.small(args.sessions or 2) if args.small else LiveSize.full(args.sessions or 8)
    return live_day(size=size, seed=args.seed)


SCENARIOS: dict[str, Callable[[argparse.Namespace], Report]] = {
    run.__name__.removeprefix("run_"): run
    for run in (run_soak, run_overload, run_aborts, run_fuzz, run_frontend, run_scripted, run_live)
}


def show(report: Report, indent: int = 2) -> None:
    for key, value in report.items():
        if isinstance(value, dict):
            print(f"{' ' * indent}{key}:")
            show(value, indent + 2)
        else:
            shown = f"{value:,.3f}" if isinstance(value, float) else value
            print(f"{' ' * indent}{key}: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; default: all")
    add("--small", action="store_true", help="run for seconds instead of minutes")
    add("--model", choices=KV_BLOCKS, default="nano", help="of the soak")
    add("--kv-offloading-size", type=float, help="GiB of main memory for KV, of the soak")
    add("--seconds", type=float)
    add("--clients", type=int)
    add("--sessions", type=int, help="concurrent agents; default: 8")
    add("--count", type=int, help="aborts, bodies, or tokens per stream")
    add("--step-ms", type=float, help="time between two steps of an engine without a model")
    add("--api-server-count", type=int, default=1, help="server processes in front of the engine")
    add("--format", choices=tuple(FAMILIES), default="m2", help="of the scripted day")
    add("--m3-template", type=Path, help="chat template for --format m3")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the reports to this file")
    args = parser.parse_args()
    if unknown := [name for name in args.scenarios if name not in SCENARIOS]:
        parser.error(f"unknown scenarios {unknown}; allowed: {', '.join(SCENARIOS)}")
    if args.format == "m3" and args.m3_template is None:
        parser.error("--format m3 needs --m3-template FILE")
    reports: dict[str, Report] = {}
    for name in args.scenarios or SCENARIOS:
        report = reports[name] = SCENARIOS[name](args)
        print(f"{name}: {'FAILED' if report['problems'] else 'ok'}", flush=True)
        show({key: value for key, value in report.items() if key != "problems"})
        for problem in report["problems"]:
            print(f"  PROBLEM {problem}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(any(report["problems"] for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
