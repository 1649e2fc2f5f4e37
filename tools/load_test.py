"""Loads a server of this machine and says whether it held. Exit code 1: it did not.

    python tools/load_test.py --scenario soak          64 clients for 10 minutes, 5 % of the
    requests broken off python tools/load_test.py --scenario overload      10 times the requests
    that fit python tools/load_test.py --scenario aborts        10,000 clients that hang up python
    tools/load_test.py --scenario fuzz          100,000 bodies, most of them wrong python
    tools/load_test.py --scenario frontend      CPU per token and latency of the server alone,
    without a model

`--small` takes a size of seconds, which the test suite runs too; its figures are not judged where
they depend on how busy the machine is. `--json FILE` keeps the report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.load.aborts import aborts
from tools.load.frontend import frontend
from tools.load.fuzz import fuzz
from tools.load.overload import overload
from tools.load.soak import KV_BLOCKS, soak

SCENARIOS = ("soak", "overload", "aborts", "fuzz", "frontend")


def run(scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report of one scenario, at the size that `args` ask for."""
    small: bool = args.small
    common = {"seed": args.seed, "num_servers": args.api_server_count}
    if scenario == "soak":
        seconds = args.seconds or (4 if small else 600)
        # one step of the heap is 2 MiB: too much for the half of a short run
        limit = None if seconds < 300 else 1.0
        return asyncio.run(
            soak(
                clients=args.clients or 64,
                seconds=seconds,
                abort_share=0.05,
                max_slope=limit,
                model=args.model,
                **common,
            )
        )
    if scenario == "overload":
        seconds = args.seconds or (1.5 if small else 30)
        return asyncio.run(
            overload(factor=10, seconds=seconds, max_ratio=None if small else 2.0, **common)
        )
    if scenario == "aborts":
        return asyncio.run(
            aborts(
                count=args.count or (300 if small else 10_000), clients=args.clients or 32, **common
            )
        )
    if scenario == "fuzz":
        return asyncio.run(
            fuzz(
                count=args.count or (1000 if small else 100_000),
                clients=args.clients or 8,
                **common,
            )
        )
    max_us, max_p99 = (None, None) if small else (60.0, 2.0)
    return frontend(
        tokens=args.count or (100 if small else 400),
        step_ms=args.step_ms or (10.0 if small else 25.0),
        num_servers=args.api_server_count,
        max_us=max_us,
        max_p99_ms=max_p99,
    )


def show(value: Any, indent: int = 2) -> None:
    for key, entry in value.items():
        if isinstance(entry, dict):
            print(f"{' ' * indent}{key}:")
            show(entry, indent + 2)
        else:
            shown = f"{entry:.3f}" if isinstance(entry, float) else entry
            print(f"{' ' * indent}{key}: {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenario", choices=SCENARIOS, action="append", help="may be repeated; default: all"
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", choices=KV_BLOCKS, default="nano", help="of the soak")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--count", type=int, help="aborts, bodies, or tokens per stream")
    parser.add_argument(
        "--step-ms", type=float, help="time between two steps of the stub (frontend); default: 25"
    )
    parser.add_argument(
        "--api-server-count", type=int, default=1, help="server processes in front of the engine"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    reports: dict[str, dict[str, Any]] = {}
    for scenario in args.scenario or SCENARIOS:
        report = reports[scenario] = run(scenario, args)
        print(f"{scenario}: {'FAILED' if report['problems'] else 'ok'}", flush=True)
        show({key: value for key, value in report.items() if key != "problems"})
        for problem in report["problems"]:
            print(f"  PROBLEM {problem}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(any(report["problems"] for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
