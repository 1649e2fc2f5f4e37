"""Replays a coding agent's day against a server of this machine and says whether a call broke. Exit
code 1: one did.

    python tools/replay_day.py                           both days
    python tools/replay_day.py --day scripted            prepared answers, checked word for word,
    over three APIs python tools/replay_day.py --day live                the embedded model's own
    answers, checked against the tools' schemas python tools/replay_day.py --day scripted --format
    m3 --m3-template FILE

The scripted day is the real server in front of an engine that answers from a script; the live day
is the whole engine. `--small` takes a size of seconds, which the test suite runs too. `--json FILE`
keeps the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from negamax.checkpoint.hub import resolve_model
from tools.replay.clients import WAYS
from tools.replay.formats import FAMILIES, m3_folder
from tools.replay.live import LiveSize, live_day
from tools.replay.script import DaySize
from tools.replay.scripted import scripted_day

DAYS = ("scripted", "live")


def scripted(args: argparse.Namespace) -> dict[str, Any]:
    """The report of the scripted day."""
    sessions = args.sessions or (len(WAYS) if args.small else 8)
    size = DaySize.small(sessions) if args.small else DaySize.full(sessions)
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        folder = (
            resolve_model("nano")
            if args.format == "m2"
            else m3_folder(args.m3_template, Path(name))
        )
        return scripted_day(
            families=FAMILIES[args.format],
            folder=folder,
            size=size,
            seed=args.seed,
            step_ms=args.step_ms,
        )


def live(args: argparse.Namespace) -> dict[str, Any]:
    """The report of the live day."""
    size = LiveSize.small(args.sessions or 2) if args.small else LiveSize.full(args.sessions or 8)
    return live_day(size=size, seed=args.seed)


def show(name: str, report: dict[str, Any]) -> None:
    print(f"{name}: {'FAILED' if report['problems'] else 'ok'}")
    for key, value in report.items():
        if key != "problems":
            shown = (
                f"{value:,.1f}"
                if isinstance(value, float)
                else f"{value:,}"
                if isinstance(value, int)
                else value
            )
            print(f"  {key:<28}{shown}")
    for problem in report["problems"]:
        print(f"  PROBLEM {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--day", choices=DAYS, action="append", help="may be repeated; default: both"
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--format", choices=tuple(FAMILIES), default="m2", help="of the scripted day"
    )
    parser.add_argument(
        "--m3-template",
        type=Path,
        help="chat template of the M3 family, which comes with its checkpoints",
    )
    parser.add_argument("--sessions", type=int, help="at once; default: 8")
    parser.add_argument(
        "--step-ms", type=float, default=1.0, help="time between two steps of the scripted engine"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.format == "m3" and args.m3_template is None:
        parser.error(
            "--format m3 needs --m3-template FILE: no M3 checkpoint comes with this repository"
        )
    reports: dict[str, dict[str, Any]] = {}
    for day in args.day or DAYS:
        report = reports[day] = scripted(args) if day == "scripted" else live(args)
        show(day, report)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=2) + "\n")
    return int(any(report["problems"] for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
