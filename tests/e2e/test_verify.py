import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.main import main
from tests.e2e.conftest import Server
from tests.e2e.faulty_server import STREAM, chunk, faulty_server
from tests.e2e.protocol_server import MODEL, protocol_server
from tests.ports import free_port

ENDPOINTS = [
    "models", "health", "metrics", "chat", "chat-stream", "completions", "responses", "messages",
    "count-tokens", "tokenize", "detokenize", "render", "input-tokens", "generate", "server-info",
    "version",
]  # fmt: skip
# fault -> names of the checks that find it
FAULTS = {
    "drops an argument": {"schema accuracy", "tool choice", "key order"},
    "reorders keys": {"key order"},
    "streams other text": {"stream equality"},
    "leaks thinking": {"clean content", "thinking"},
    "leaks thinking without tags": {"thinking"},
    "ignores tool_choice": {"tool choice", "key order"},
    "counts wrong": {"usage"},
    "caches nothing": {"usage"},
    "ignores disabled": {"thinking"},
    "refuses efforts": {"effort"},
    "refuses histories": {"histories"},
    "accepts everything": {"refusals"},
    "reasons only": {"not only reasoning", "thinking", "effort"},
    "mixes deltas": {"separate deltas"},
    "never calls": {"tool calls as expected"},
    "writes Cyrillic": {"language following"},
    "busy": {"requests answered"},
}


@pytest.fixture
def report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Return a function that runs a command and returns exit code, JSON by names, and output."""

    def run(command: str, url: str, *options: str) -> tuple[int, dict[str, Any], str]:
        file = tmp_path / "report.json"
        code = main([command, url, *options, "--json", str(file)])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        return code, {row["name"]: row for row in rows}, shown.out + shown.err

    return run


def test_embedded_models_follow_the_protocol(server: Server, report: Any) -> None:
    options = ("--thinking", "switchable", "--concurrency", "8", "--timeout", "300")
    code, rows, output = report("verify", f"{server.url}/v1", *options)
    assert code == 0, output
    found = {name for name, row in rows.items() if row["passed"] == row["total"] > 0}
    assert found >= set().union(*FAULTS.values()), output
    assert rows["key order"]["total"] == 3  # The report shows the prompt.


def test_a_server_without_faults_passes(report: Any) -> None:
    with protocol_server() as (url, protocol):
        code, rows, output = report("verify", url, "--thinking", "switchable", "--repeat", "2")
    assert code == 0, output
    assert all(row["passed"] == row["total"] > 0 for row in rows.values()), output
    assert rows["refusals"]["total"] == 2 * 9 and rows["key order"]["total"] == 2 * 2
    assert len(protocol.bodies) > 100


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_name(report: Any, fault: str) -> None:
    with protocol_server(fault) as (url, _):
        options = ("--thinking", "switchable", "--timeout", "1" if fault == "busy" else "60")
        code, rows, output = report("verify", url, *options)
    assert code == 1
    assert {name for name, row in rows.items() if not row["is_met"]} == FAULTS[fault], output
    assert all(f"\n{name}: " in output for name in FAULTS[fault])


def test_a_model_that_always_thinks_must_think(report: Any) -> None:
    with protocol_server("ignores disabled") as (url, _):
        assert report("verify", url, "--thinking", "forced")[0] == 0
        assert report("verify", url)[0] == 0  # The checks do not depend on the server's name.
    with protocol_server() as (url, _):
        code, rows, _ = report("verify", url, "--thinking", "forced")
    assert code == 1 and sorted(rows["thinking"]["failures"]) == [
        "disabled, stream: no reasoning",
        "disabled: no reasoning",
    ]


def case(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_a_published_suite_is_judged_by_its_own_fields(tmp_path: Path, report: Any) -> None:
    properties = {"zone": {"type": "string"}, "amount": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["zone"]}
    tools = [{"type": "function", "function": {"name": "bill", "parameters": parameters}}]
    history = [
        {"role": "_input", "content": "Be brief."},
        {"role": "assistant", "content": "Hi", "reasoning_detail": [{"text": "A greeting."}]},
        {"role": "user", "content": "Remind me"},
    ]
    lines = [
        {"messages": history, "tools": tools, "expected_tool_call": True, "stream": True},
        case("Hello", tools=tools, expected_tool_call=False),
        case("PING", check_type=["silence_output"], stream=True),
        case("Name the parameters.", tools=tools, check_type=["scenario_check"]),
        case("日本", check_type=["contains_russian_characters_unicode"], model="other"),
    ]
    suite = tmp_path / "sample.jsonl"
    suite.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with protocol_server() as (url, protocol):
        code, rows, output = report("verify", url, "--suite", str(suite), "--repeat", "3")
    assert code == 0, output
    names = ("requests answered", "tool calls as expected", "schema accuracy", "scenario")
    names += ("silence", "language following")
    assert [rows[name]["total"] for name in names] == [15, 6, 3, 3, 3, 3]
    (sent, *_) = [body for body in protocol.bodies if "Remind me" in str(body["messages"])]
    assert "expected_tool_call" not in sent and sent["model"] == MODEL
    system, assistant, _ = sent["messages"]
    assert system["role"] == "system" and assistant["reasoning_content"] == "A greeting."
    with protocol_server("cuts brackets") as (url, _):
        code, rows, output = report("verify", url, "--suite", str(suite))
    assert code == 1 and [name for name in rows if not rows[name]["is_met"]] == ["silence"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"messages": 3}', '{"messages": [3]}', "{", "\n"]
)
def test_an_unusable_suite_is_refused(tmp_path: Path, report: Any, text: str) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(text)
    code, _, output = report("verify", "http://127.0.0.1:1", "--suite", str(suite))
    assert code == 2 and "suite" in output


async def hang(writer: asyncio.StreamWriter, number: int) -> None:
    await asyncio.sleep(60)


async def answer_html(writer: asyncio.StreamWriter, number: int) -> None:
    page = b"<html>It works!</html>"
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(page)}\r\n\r\n"
    writer.write(head.encode() + page)


async def close_early(writer: asyncio.StreamWriter, number: int) -> None:
    writer.write(STREAM + chunk({"choices": []}))
    writer.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (hang, "no answer within 0.5 s"),
        (answer_html, "the answer is not a JSON object (text/html)"),
        (close_early, "connection closed before the answer ended"),
        (None, "connection refused"),
    ],
)
def test_a_broken_server_gives_one_clear_line(report: Any, fault: Any, reason: str) -> None:
    with faulty_server(fault) if fault else nullcontext() as server:
        url = f"http://127.0.0.1:{server.port if server else free_port()}"
        found = [report(name, url, "--timeout", "0.5") for name in ("verify", "check")]
    (verified, _, output), (checked, rows, _) = found
    assert (verified, checked) == (1, 1)
    assert output == f"negamax: error: {url} does not answer chat requests: {reason}\n"
    assert rows["chat"]["state"] == "failed"
    assert rows["chat"]["detail"] in (reason, "no answer in time")


@pytest.mark.parametrize("command", ["verify", "check"])
def test_invalid_options_exit_with_2(command: str, report: Any) -> None:
    for words in (("ftp://x",), ("http://",), ("http://a b",), ("http://x", "--timeout", "0")):
        code, _, output = report(command, *words)
        assert code == 2 and output.count("\n") == 1, output
    code, _, output = report(command, "http://127.0.0.1:1", "--api-key", "é")
    assert code == 2 and "--api-key" in output
    odd = {"verify": ("--thinking", "no"), "check": ("--require", "no")}[command]
    code, _, output = report(command, "http://127.0.0.1:1", *odd)
    assert code == 2 and "allowed: " in output


def test_check_asks_every_endpoint_of_a_server(server: Server, report: Any) -> None:
    started = time.monotonic()
    every = [word for name in ENDPOINTS for word in ("--require", name)]
    code, rows, output = report("check", server.url, "--timeout", "60", *every)
    assert code == 0 and [*rows] == ENDPOINTS, output
    assert {row["state"] for row in rows.values()} == {"ok"}
    assert time.monotonic() - started < 60


def test_absent_endpoints_fail_only_if_they_are_required(report: Any) -> None:
    with protocol_server() as (url, protocol):
        code, rows, _ = report("check", url, "--api-key", "secret")
        present = {name for name, row in rows.items() if row["state"] == "ok"}
        assert code == 0 and present == {"models", "health", "chat", "chat-stream"}
        assert {rows[name]["state"] for name in set(ENDPOINTS) - present} == {"absent"}
        assert protocol.bodies[0]["model"] == MODEL
        code, rows, output = report("check", url, "--require", "messages")
        assert code == 1 and rows["messages"]["state"] == "failed" and "HTTP 404" in output
        # An unknown model is not reported as a missing route.
        code, rows, output = report("check", url, "--model", "other")
        assert code == 1 and rows["chat"]["state"] == "failed" and "refused for other" in output
