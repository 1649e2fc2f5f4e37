import io
import json
import resource
import shlex
import subprocess
import sys
from typing import Any

import pytest

from negamax import __version__
from negamax.cli.main import main
from tests.e2e.conftest import MODEL
from tests.forked_children import finished
from tests.speed import slowness
from tests.tables import read_table

FAST = ("--num-threads", "1")


def negamax(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "negamax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_version_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert negamax("--version").stdout == f"negamax {__version__}\n"
    monkeypatch.setenv("COLUMNS", "80")

    def said(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    assert said() == said("--help") != ""
    assert "accuracy" in said("bench")  # A group without a command shows its commands.
    text = said("serve", "--help")
    for panel in ("Server", "Model", "Batching and memory", "Parallelism", "Logs"):
        assert panel in text
    assert "…" not in text  # A terminal of 80 columns truncates no flag.


def test_refusals_are_one_line_with_value_and_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the first command in a process; the others run in this process, which is faster."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for number, (line, words) in enumerate(dict(read_table("cli_commands.refusals")).items()):
        if number == 0:
            done = negamax(*shlex.split(line))
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code, (out, err) = main(shlex.split(line)), capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err, (line, err)


@pytest.mark.full
def test_generate_answers_a_prompt() -> None:
    question = ("--prompt", "What is 47 + 38?", "--temperature", "0")
    done = finished("negamax", "generate", MODEL, *question, *FAST)
    assert done.returncode == 0, done.stderr
    assert "85" in done.stdout and "think" not in done.stdout


def test_generate_prints_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--prompt Hello --raw --max-tokens 6 --temperature 0 -n 1 --ignore-eos --json"
    words = ["generate", MODEL, "--prompt", "Tom has", *shlex.split(line), *FAST]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["Tom has", "Hello"]
    for line in lines:
        assert line["finish_reason"] == "length"
        assert len(line["token_ids"]) == line["usage"]["completion_tokens"] == 6


def test_generate_refuses_bad_sampling_before_it_loads_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["generate", MODEL, "--prompt", "x", "--temperature", "9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "negamax: error: temperature is 9.0; allowed: 0.0 to 2.0"


def test_chat_answers_piped_lines_knows_its_commands_and_survives_a_refused_message() -> None:
    lines = (
        "Tom has 47 apples and buys 38 more. How many apples does he have now?\n"
        f"/reset\n{'word ' * 100_000}\n\nHello\n/exit\nnever read\n"
    )
    done = finished("negamax", "chat", MODEL, "--temperature", "0", *FAST, text=lines)
    assert done.returncode == 0, done.stderr
    first, hello = done.stdout.split("\n", 1)
    assert "85" in first and hello.strip() and "prompt is too long" in done.stderr
    assert "<think>" not in done.stdout + done.stderr
    assert "47" in done.stderr  # A piped answer has no thinking.


def test_server_process_starts_quickly_and_without_torch() -> None:
    code = (
        "import sys, negamax.cli.main, negamax.cli.serve, negamax.api.server; "
        "assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    )

    def start() -> float:
        """Return the CPU seconds of a start, which do not depend on other processes."""
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime

    assert any(start() < 2.0 * slowness() for _ in range(2))


@pytest.mark.full
def test_doctor_finds_that_embedded_models_can_be_served() -> None:
    done = negamax("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["can_serve"]
    names = {check["name"] for check in report["checks"]}
    assert {"torch", "CPU", "memory", "hub", "port"} <= names
    assert [check for check in report["checks"] if check["status"] == "fail"] == []
    assert {"nano", "nano-m3"} <= {each["model"] for each in report["models"] if each["runs"]}
