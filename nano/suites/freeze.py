"""Write the problems of `negamax bench accuracy` to `negamax/evals/problems/`.

    python -m nano.suites.freeze [--out FOLDER]

Each suite is one JSONL file in xz. A line has a conversation, the declared tools, and the expected
answer or calls.
"""

from __future__ import annotations

import argparse
import json
import lzma
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nano.suites import arithmetic, retrieval, tool_calls, vision
from negamax.evals import suites


def draw_problems(suite: str, count: int) -> list[dict[str, Any]]:
    """Draw the first `count` evaluation problems of seed 0, in the format of the file."""
    if suite == "nano-math":
        return [
            {"messages": each.messages, "answer": str(each.answer)}
            for each in arithmetic.problems(count)
        ]
    if suite == "nano-tools":
        return [
            {"messages": each.messages, "tools": each.tools, "calls": list(map(asdict, each.calls))}
            for each in tool_calls.problems(count)
        ]
    if suite == "nano-vision":
        return [
            {"messages": [vision.build_message(*each)], "answer": each[1].answer}
            for each in vision.problems(count)
        ]
    found = []
    for each in retrieval.problems(suite.removeprefix("nano-retrieval-"), count):
        if each.fact is not None:
            found.append({"messages": each.messages, "answer": each.fact.value})
        else:
            calls = list(map(asdict, each.calls))
            found.append({"messages": each.messages, "tools": each.tools, "calls": calls})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=suites.FOLDER)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for suite, count in suites.SUITES.items():
        lines = (json.dumps(each, ensure_ascii=False) for each in draw_problems(suite, count))
        packed = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
        (given.out / f"{suite}.jsonl.xz").write_bytes(packed)
        print(f"{suite}: {count} problems, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
