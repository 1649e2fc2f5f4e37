import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.main import main
from tests.e2e.conftest import MODEL, Server, eventually
from tests.e2e.scripted_server import Script, call, scripted
from tests.e2e.terminal import Terminal, in_terminal
from tests.ports import free_port

QUESTION = "What is 47 + 38?"
MARKDOWN = (
    "# Title\n\nSome **bold** words, `x < y` and <b>tags</b>.\n\n"
    "```python\nfor i in range(3):\n\n    print(i)\n```\n\n- one\n\n- "
    "two\n\n[link](https://a.example)\n"
)


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[str, Script]]:
    with scripted() as running:
        yield running


@pytest.fixture
def script(stage: tuple[str, Script]) -> Script:
    stage[1].__dict__.update(Script().__dict__)
    return stage[1]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "NEGAMAX_API_KEY": ""}


@pytest.fixture
def chatting(stage: tuple[str, Script], home: dict[str, str]) -> Any:
    """Return a context manager that runs a chat in a terminal with the scripted server."""

    @contextmanager
    def chat(*options: str, path: str = "", **size: int) -> Iterator[Terminal]:
        url = f"{stage[0]}{path}"
        with in_terminal("chat", "--url", url, *options, env=home, **size) as terminal:
            terminal.wait_for("Chatting")
            yield terminal

    return chat


def ask(terminal: Terminal, text: str, *, count: int) -> str:
    terminal.wait_for_prompt()
    return terminal.say(text, "s to the first token", count=count)


def test_conversation_in_a_terminal(server: Server, home: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    options = ("chat", "--url", server.url, "--temperature", "0")
    with in_terminal(*options, env=home) as terminal:
        terminal.wait_for(f"Chatting with {MODEL}")
        shown = ask(terminal, QUESTION, count=1)
        assert "85" in shown and "<think>" not in shown
        assert "\x1b[2m" in terminal.raw  # The thinking is dimmed.
        assert "tokens/s" in shown and "tokens in" in shown
        terminal.say("/nonsense now", "unknown command /nonsense; /help lists the")
        terminal.say("/help", "/system TEXT")
        terminal.say(f"/save {kept}", "(2 messages)")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    saved = json.loads(kept.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]
    assert "85" in saved["messages"][1]["content"] and saved["model"] == MODEL
    history = Path(home["XDG_STATE_HOME"]) / "negamax" / "chat_history"
    assert QUESTION in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_saved_conversation_continues(chatting: Any, script: Script, tmp_path: Path) -> None:
    script.steps = [{"content": "Four."}]
    kept = tmp_path / "kept.json"
    with chatting("--system", "Be brief.") as terminal:
        ask(terminal, "Two and two?", count=1)
        terminal.say(f"/save {kept}", "(2 messages)")
        terminal.wait_for_prompt()
        terminal.type("\x04")  # Ctrl-D
        assert terminal.end() == 0
    with chatting() as terminal:
        terminal.wait_for("Chatting with scripted")
        terminal.say(f"/load {tmp_path}/nowhere", "cannot be loaded")
        terminal.say(f"/load {__file__}", "is not a conversation")
        terminal.say(f"/load {kept}", f"loaded {kept}")
        ask(terminal, "And three?", count=1)
        roles = [message["role"] for message in script.bodies[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        terminal.say("/clear", "is cleared")
        terminal.say("/system Shout.", "system message: Shout.")
        terminal.wait_for_prompt()
        terminal.type("\x1b[A\x1b[A\x1b[A")  # Go back three lines.
        terminal.wait_for("And three?", count=2)
        terminal.say("", "s to the first token", count=2)
        assert script.bodies[-1]["messages"] == [
            {"role": "system", "content": "Shout."},
            {"role": "user", "content": "And three?"},
        ]


def test_markdown_is_rendered_as_it_comes(chatting: Any, script: Script) -> None:
    pieces = [MARKDOWN[start : start + 3] for start in range(0, len(MARKDOWN), 3)]
    script.steps = [step for piece in pieces for step in ({"content": piece}, 0.005)]
    with chatting(rows=12, columns=60) as terminal:
        shown = ask(terminal, "Show", count=1)
    final = [line.strip() for line in shown.splitlines()]
    assert "Some bold words, x < y and <b>tags</b>." in shown
    assert "**" not in shown and "```" not in shown and "\x1b[1m" in terminal.raw
    assert any("print(i)" in line for line in final)
    assert any("https://a.example" in line for line in final)
    assert "\x1b[2J" not in terminal.raw and "\x1b]8" not in terminal.raw


@pytest.mark.parametrize("options", [(), pytest.param(("--plain",), marks=pytest.mark.full)])
def test_control_codes_of_the_model_do_not_reach_the_terminal(
    chatting: Any, script: Script, options: tuple[str, ...]
) -> None:
    script.steps = [{"reasoning_content": "\x1b]0;owned\x07"}, {"content": "a\x1b[2Jb\x9b31mc"}]
    with chatting(*options) as terminal:
        ask(terminal, "x", count=1)
        assert "\x1b]0" not in terminal.raw and "\x1b[2J" not in terminal.raw
        assert "\x9b" not in terminal.raw and "a[2Jb31mc" in terminal.text


def test_ctrl_c_stops_the_answer_alone(chatting: Any, script: Script) -> None:
    script.steps = [{"content": "The beginning "}, 600.0, {"content": "never"}]
    with chatting("--plain") as terminal:
        terminal.say("Tell me", "The beginning")
        terminal.interrupt("(stopped)")
        terminal.wait_for_prompt()
        terminal.interrupt("Ctrl-D ends the chat")  # At the prompt, Ctrl-C does not end the chat.
        script.steps = [{"content": "All of it."}]
        ask(terminal, "Again", count=1)
        contents = [message["content"] for message in script.bodies[-1]["messages"]]
        assert contents == ["Tell me", "The beginning ", "Again"]
        script.steps = [600.0]
        terminal.type("Nothing comes\n")
        assert eventually(lambda: len(script.bodies) == 3)
        terminal.interrupt("your message was removed")
        script.steps = [{"content": "Fine."}]
        ask(terminal, "Last", count=2)
        assert "Nothing comes" not in json.dumps(script.bodies[-1])


def test_tools_are_called_and_results_typed(chatting: Any, script: Script, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "weather"}}]))
    script.finish_reason = "tool_calls"
    script.steps = call("weather", '{"city":', ' "Oslo"}')
    script.steps += call("weather", '{"city": "Rome"}', index=1)
    with chatting("--tools", str(tools)) as terminal:
        terminal.say("Weather?", "result of weather> ")
        assert '[call] weather({"city": "Oslo"})' in terminal.text
        script.steps, script.finish_reason = [{"content": "Cold."}], "stop"
        # A tool's result may look like a command.
        terminal.say("/etc is what it says", "result of weather> ", count=2)
        ask(terminal, "warm", count=2)
    results = [m["content"] for m in script.bodies[-1]["messages"] if m["role"] == "tool"]
    assert results == ["/etc is what it says", "warm"]


def test_truncated_call_is_shown_not_kept(chatting: Any, script: Script) -> None:
    script.finish_reason = "length"
    script.steps = call("write", '{"text": "abc')
    with chatting() as terminal:
        ask(terminal, "Write", count=1)
        assert '[call cut off] write({"text": "abc' in terminal.text
        script.steps = [{"content": "Well."}]
        ask(terminal, "Again", count=2)
    assert all("tool_calls" not in message for message in script.bodies[-1]["messages"])


def test_errors_of_the_server_do_not_end_it(chatting: Any, script: Script) -> None:
    script.refusal = (400, {"message": "the prompt is too long", "code": "x"}, {})
    with chatting() as terminal:
        terminal.say("First", "the prompt is too long (status 400)")
        script.refusal = None
        script.steps = [{"content": "Half "}, {"error": {"message": "the engine died"}}]
        terminal.say("Second", "the engine died")
        script.steps = [{"content": "Whole."}]
        ask(terminal, "Third", count=1)
    assert [message["content"] for message in script.bodies[-1]["messages"]] == ["Third"]


def test_key_is_sent_and_required(
    chatting: Any, script: Script, stage: tuple[str, Script], capsys: pytest.CaptureFixture[str]
) -> None:
    script.key, script.steps = "secret", [{"content": "Open."}]
    assert main(["chat", "--url", stage[0]]) == 2
    assert "pass --api-key, or set NEGAMAX_API_KEY" in capsys.readouterr().err
    with chatting("--api-key", "secret", path="/v1/") as terminal:
        assert "Open." in ask(terminal, "Hello", count=1)


def test_lines_of_a_pipe_are_answered_by_a_server(server: Server) -> None:
    command = [sys.executable, "-m", "negamax", "chat", MODEL, "--url", server.url]
    lines = f"{QUESTION}\n/nonsense\n/clear\n{QUESTION}\n"
    done = subprocess.run(
        [*command, "--temperature", "0"], input=lines, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("85") == 2 and "\x1b" not in done.stdout
    assert "token" not in done.stdout and "is cleared" not in done.stdout
    assert "47" in done.stderr and "unknown command /nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL is missing (pass a folder, a hub id, 'nano' or 'nano-m3', or the --url of a "),
        (("--url", "ftp://a"), "--url is 'ftp://a', which is not an HTTP address"),
        (("--url", "localhost:{port}"), "where no server answers"),
        ((MODEL, "--temperature", "9"), "temperature is 9.0; allowed: 0.0 to 2.0"),
    ],
)
def test_refusals_come_before_anything_is_loaded(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert main(["chat", *(text.format(port=port) for text in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.full
def test_embedded_engine_in_a_terminal(home: dict[str, str]) -> None:
    options = ("chat", MODEL, "--temperature", "0", "--num-threads", "1")
    with in_terminal(*options, env=home) as terminal:
        terminal.wait_for(f"loading {MODEL}")
        terminal.wait_for_prompt()
        terminal.interrupt("Ctrl-D ends the chat")  # Ctrl-C does not end the engine.
        assert "85" in ask(terminal, QUESTION, count=1)
        assert "cached" in ask(terminal, QUESTION, count=2)
        terminal.type("/exit\n")
        assert terminal.end() == 0
