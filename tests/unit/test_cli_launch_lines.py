import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.main import main

CASES = tomllib.loads(Path(__file__).with_name("launch_lines.toml").read_text(encoding="utf-8"))


def explain(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["serve", *shlex.split(line), "--explain"])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("case", CASES["understood"], ids=lambda case: case["name"])
def test_launch_line_is_understood(
    case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(case["line"], capsys)
    assert code == 0, err
    values = {row.split()[0]: row.split()[1] for row in out.splitlines()}
    assert {key: values[key] for key in case["expected"]} == case["expected"]
    assert all(note.startswith("note: ") for note in err.splitlines())


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["name"])
def test_launch_line_is_refused_with_a_remedy(
    case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(case["line"], capsys)
    assert (code, out) == (2, "")
    refusal = err.splitlines()[-1]
    assert refusal.startswith("negamax: error: ")
    assert all(word in refusal for word in case["words"])


@pytest.mark.parametrize(
    "line",
    [
        "MiniMaxAI/MiniMax-M2 --trust-remote-code --tensor-parallel-size 4 --tool-call-parser "
        "minimax_m2 --reasoning-parser minimax_m2_append_think --enable-auto-tool-choice",
        "--model-path MiniMaxAI/MiniMax-M2 --tp-size 4 --tool-call-parser minimax-m2 "
        "--reasoning-parser minimax-append-think --trust-remote-code --host 0.0.0.0 --port 8000 "
        "--api-key secret",
    ],
)
def test_remedies_of_the_refusals_start(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(line, capsys)
    assert code == 0 and "secret" not in out
