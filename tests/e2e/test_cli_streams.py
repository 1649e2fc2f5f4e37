import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.test_cli_commands import FAST

PLAN = ("plan", MODEL, "--gpus", "1", "--gpu", "h200")
PARSE = ("parse", "--format", "m2")
GENERATE = ("generate", MODEL, "Hi", "--max-tokens", "2", "--raw", *FAST)
CLOSED = (
    "negamax: error: standard input or standard output is closed (redirect the stream, as with "
    "</dev/null or >/dev/null)\n"
)


def redirected(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "negamax")
    command += arguments
    return subprocess.run(command, input="Hi", capture_output=True, text=True, timeout=120)


def mostly_full(*commands: tuple[str, ...]) -> list[object]:
    first, *others = commands
    return [first, *(pytest.param(command, marks=pytest.mark.full) for command in others)]


@pytest.mark.parametrize(
    "command", mostly_full(PLAN, PARSE, ("--version",), ("serve", "--help"), ("doctor",))
)
def test_refuses_closed_output(command: tuple[str, ...]) -> None:
    done = redirected(">&-", *command)
    assert (done.returncode, done.stderr) == (2, CLOSED)


@pytest.mark.parametrize("command", mostly_full(PARSE, ("generate", MODEL), ("chat", MODEL, *FAST)))
def test_refuses_closed_input_where_it_is_read(command: tuple[str, ...]) -> None:
    done = redirected("<&-", *command)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", CLOSED)


@pytest.mark.parametrize("command", mostly_full(PARSE, PLAN, GENERATE))
def test_commands_run_where_no_message_can_be_written(command: tuple[str, ...]) -> None:
    done = redirected("2>&-", *command)
    assert done.returncode == 0
    assert done.stdout == redirected("", *command).stdout != ""


def test_outputs_that_cannot_be_written_end_a_command() -> None:
    done = redirected("2>&-", "plan", MODEL)
    assert (done.returncode, done.stdout) == (2, "")
    assert redirected("2>/dev/full", "plan", MODEL).returncode == 2
    nobody, output = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "negamax", *PLAN]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(output)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    done = redirected(">/dev/full", *PLAN)
    assert (done.returncode, done.stderr) == (2, "negamax: error: No space left on device\n")
