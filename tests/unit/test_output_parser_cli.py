import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parser_support as proof
import pytest

from negamax.cli.main import main
from tests.tables import read_table

CASES = proof.read_cases(proof.CASE_FILES)[::25]
Run = Callable[..., tuple[int, str, str]]
NAMES = {format.name: name for name, format in proof.FORMATS.items()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    def parse(text: str | bytes, *arguments: str) -> tuple[int, str, str]:
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code = main(["parse", *arguments])
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return parse


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_cases_parse_equally_whole_and_streamed(case: proof.Case, run: Run, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(case.tools), encoding="utf-8")
    mode = "enabled" if case.in_reasoning else "adaptive"
    options = ["--format", NAMES[case.format.name], "--tools", str(tools), "--thinking-mode", mode]
    code, whole, _ = run(case.text, *options)
    assert code == 0
    answer: dict[str, Any] = json.loads(whole)
    calls = [(call["name"], call["arguments"]) for call in answer["tool_calls"]]
    expected = case.expected
    wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    assert list(answer) == ["reasoning", "content", "tool_calls"]
    assert proof.comparable(answer["reasoning"], answer["content"], calls) == proof.comparable(
        expected["reasoning"], expected["content"], wanted
    )
    for size in ("1", "100000"):
        assert run(case.text, *options, "--stream", size)[:2] == (0, whole)


def test_m2_begins_inside_thinking_and_m3_by_its_mode(run: Run) -> None:
    for text, line, reasoning, content in (
        ("a</think>b\n", "m2", "a", "b\n"),
        ("a", "m3 --thinking-mode enabled", "a", None),
        ("a", "m3 --thinking-mode disabled", None, "a"),
        ("", "m3", None, None),
    ):
        found = json.loads(run(text, "--format", *line.split())[1])
        assert found == {"reasoning": reasoning, "content": content, "tool_calls": []}


def test_lone_surrogates_are_escaped_and_other_bytes_refused(run: Run, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    schema = {"properties": {"x": {"type": "array"}}}
    tools.write_text(json.dumps([{"name": "f", "parameters": schema}]), encoding="utf-8")
    call = '<invoke name="f"><parameter name="x">["\\ud800"]</parameter></invoke>'
    text = f"</think><minimax:tool_call>{call}"
    code, out, _ = run(text, "--format", "m2", "--tools", str(tools))
    assert code == 0
    assert json.loads(out)["tool_calls"] == [{"name": "f", "arguments": {"x": ["\ud800"]}}]
    code, _, err = run(b"ab\xff", "--format", "m2")
    assert (code, err) == (2, "negamax: error: standard input is not UTF-8: byte 2 is 0xff\n")


@pytest.mark.parametrize(("line", "says"), read_table("output_parser_cli.bad_input"))
def test_bad_input_is_refused_in_one_line(
    line: str, says: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("text.json", "tools"), ("object.json", "{}"), ("list.json", "[1]")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    code, out, err = run("x", *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_refuses_bad_tools_of_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tmp_path / "tools.json"
    for text, says in (("[" * 100_000, "is not JSON"), ("[1]", "a list of other values")):
        tools.write_text(text, encoding="utf-8")
        assert main(["chat", "--url", "http://127.0.0.1:9", "--tools", str(tools)]) == 2
        assert says in capsys.readouterr().err
