import io
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from negamax import __version__
from negamax.base.supervision import Supervised
from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from tests.e2e.conftest import MODEL, eventually
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
    assert main(["generate", MODEL, "--prompt", "Tom has", *shlex.split(line), *FAST]) == 0
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


LONG = "b" * 300
HELLO = "--prompt Hello --max-tokens 2"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (code, out) == (2, ""), line
    return line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"generate nano --seed {10**30}", "000; allowed: -9223372036854775808 to 92"),
        ("generate nano --num-threads 10000", "--num-threads is 10000; allowed: 1 to 1024"),
        (
            f"generate nano --num-threads 1 {HELLO} --max-num-seqs {10**6}",
            "lower --max-num-seqs or --max-model-len",
        ),
        (f"serve nano --chat-template {LONG}", "300 characters; the system allows 255 bytes"),
        (f"generate {LONG} {HELLO}", "neither an existing folder"),
        (f"generate nano {HELLO} --script {LONG}", "the system allows 255 bytes"),
    ],
)
def test_refuses_large_values(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *line.split())


def test_context_length_beyond_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(EMBEDDED["nano"], tmp_path / "nano")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    line = refused(capsys, "generate", str(folder), *FAST, *HELLO.split())
    assert "64 sequences of up to 2147483647 tokens need" in line
    assert "lower --max-num-seqs or --max-model-len" in line


def test_too_few_files_may_be_open() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))

    done = negamax("serve", MODEL, "--port", "0", preexec_fn=few)
    words = "this process can open 20 files; at least 128 are needed (raise the limit (ulimit -n))"
    assert (done.returncode, done.stderr) == (2, f"negamax: error: {words}\n")


def test_children_do_not_inherit_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEGAMAX_API_KEY", "OPENAI_API_KEY", "NEGAMAX_OTHER"):
        monkeypatch.setenv(name, "secret-value")
    child = Supervised("code")
    try:
        environ = Path(f"/proc/{child.pid}/environ")  # The file is empty until the child runs.
        assert eventually(lambda: bool(environ.read_bytes()))
        inherited = environ.read_bytes().split(b"\0")
    finally:
        child.kill()
        child.reap()
    found = [word for word in inherited if b"secret-value" in word]
    assert found == [b"NEGAMAX_OTHER=secret-value"]


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
    reading, output = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "negamax", *PLAN]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(output)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    done = redirected(">/dev/full", *PLAN)
    assert (done.returncode, done.stderr) == (2, "negamax: error: No space left on device\n")
