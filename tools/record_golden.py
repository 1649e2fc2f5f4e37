"""Record what the models' own chat templates render, and parser cases from elsewhere.

    python tools/record_golden.py renders m2 chat_template.jinja          # of a checkpoint
    python tools/record_golden.py renders m3 chat_template.jinja --check  # show differences only
    python tools/record_golden.py cases parser_cases.jsonl

The repository does not contain the models' templates. `tests/golden/minimax_*_renders.jsonl`
contains the output of these templates. Tests compare this output with nano's template and the
tests' M3 layout. A line has a conversation (`name`, `messages`, `tools`, `kwargs`) and three
fields:

- `is_normal`: true if `normalize_messages` keeps the text of the conversation
- `expected`: the output of the template, or null if the template refuses the conversation
- `opening`: the text that `add_generation_prompt` adds

To add a conversation, write a line with its inputs and run this tool.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
CASE_FIELDS = (
    "id", "format", "tier", "tools", "model_text", "thinking_mode", "expected", "note"
)  # fmt: skip


def compile_template(source: str) -> Any:
    """Compile the template as other servers do, without our code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(
        value, ensure_ascii=ensure_ascii
    )

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = fail
    return environment.from_string(source)


def render(template: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Render a line's conversation to `expected` and `opening`."""
    variables = {"messages": case["messages"], "tools": case["tools"], **case["kwargs"]}
    try:
        whole, prompt = (
            template.render(**variables, add_generation_prompt=generate)
            for generate in (False, True)
        )
    except TemplateError:
        return {"expected": None, "opening": None}
    if not prompt.startswith(whole):
        raise SystemExit(f"{case['name']}: the generation prompt changes the text before it")
    return {"expected": whole, "opening": prompt.removeprefix(whole)}


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    file.write_text("".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the expected results in tests/golden.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    renders = kinds.add_parser("renders", help="what a chat template renders")
    renders.add_argument("family", choices=("m2", "m3"))
    renders.add_argument("template", type=Path)
    renders.add_argument("--check", action="store_true", help="write nothing")
    cases = kinds.add_parser("cases", help="parser cases")
    cases.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.kind == "cases":
        found = read_lines(given.file)
        kept = [{name: case[name] for name in CASE_FIELDS if name in case} for case in found]
        write_lines(GOLDEN / "parser_cases.jsonl", kept)
        print(f"{len(kept)} cases")
        return 0
    file = GOLDEN / f"minimax_{given.family}_renders.jsonl"
    template = compile_template(given.template.read_text(encoding="utf-8"))
    recorded = read_lines(file)
    made = [{**case, **render(template, case)} for case in recorded]
    changed = [new["name"] for old, new in zip(recorded, made, strict=True) if old != new]
    print(f"{len(made)} conversations, {len(changed)} differ: {', '.join(changed) or '-'}")
    if not given.check:
        write_lines(file, made)
    return int(given.check and bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
