import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_servers import TinyHub

from negamax import __version__

ROOT = Path(__file__).parents[2]
NANO = ROOT / "negamax" / "assets" / "nano"
pytestmark = pytest.mark.timeout(900)  # The limit includes downloads; installing takes a minute.
PROMPT = ("--prompt", "What is 47 + 38?", "--temperature", "0", "--max-tokens", "200")


@dataclass(frozen=True)
class Installation:
    bin: Path
    folder: Path  # current folder of commands, far from the source

    def start(
        self, *arguments: str, program: str = "negamax", **environment: str
    ) -> subprocess.Popen[str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "HF_"))}
        return subprocess.Popen(
            [self.bin / program, *arguments],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**kept, "HF_HOME": str(self.folder / "hub"), **environment},
        )  # fmt: skip

    def run(self, *arguments: str, program: str = "negamax", **environment: str) -> str:
        process = self.start(*arguments, program=program, **environment)
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, (
            f"{arguments} ended with {process.returncode}:\n{output}\n{errors}"
        )
        return output


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("wheel")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
    assert torch is not None
    wheel = folder / f"negamax-{__version__}-py3-none-any.whl"
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, ROOT / "tools" / "install.py", "--python", python]
    steps = (
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        [sys.executable, "-m", "venv", "--without-pip", folder / "venv"],
        [*install, "--torch", torch[0]],
        [*install, "--quiet", "-c", ROOT / "constraints.txt", wheel],
    )
    for command in steps:
        subprocess.run(command, check=True, timeout=600)
    yield Installation(folder / "venv" / "bin", folder)
    shutil.rmtree(folder / "venv")


@pytest.fixture(scope="module")
def hub() -> Iterator[TinyHub]:
    with TinyHub({path.name: path.read_bytes() for path in NANO.iterdir()}) as hub:
        yield hub


IMPORT_ALL = """
import importlib, pkgutil, negamax
names = [module.name for module in pkgutil.walk_packages(negamax.__path__, "negamax.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def test_every_module_finds_what_it_imports(installed: Installation) -> None:
    assert int(installed.run("-c", IMPORT_ALL, program="python")) > 200


def test_help_generate_and_doctor(installed: Installation) -> None:
    """Run the basic commands. Tests of the hub generate with the files of nano."""
    assert "serve" in installed.run("--help")
    assert "85" in installed.run("generate", "nano-m3", *PROMPT)
    assert "-> negamax serve nano\n" in installed.run("doctor")


def test_serve_and_bench_serve(installed: Installation) -> None:
    server = installed.start("serve", "nano", "--port", "0")
    try:
        assert server.stdout is not None
        ready = re.search(r"(http://\S+)/v1", server.stdout.readline())
        assert ready is not None, server.communicate()[1]
        body = {"messages": [{"role": "user", "content": PROMPT[1]}], "temperature": 0}
        request = urllib.request.Request(
            f"{ready[1]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "85" in json.load(answer)["choices"][0]["message"]["content"]
        with urllib.request.urlopen(ready[1], timeout=120) as page:
            assert "<html" in page.read().decode()
        load = ("--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "8")
        printed = installed.run("bench", "serve", "--base-url", ready[1], *load)
        assert re.search(r"Successful requests:\s+4\b", printed)
    finally:
        server.terminate()
        server.communicate(timeout=120)


def refusal(process: subprocess.Popen[str]) -> str:
    """Return the error of a refused command, which is one line after the log."""
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 2 and output == "", (process.returncode, output, errors)
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_unavailable_hub_ids_are_refused_in_a_line(installed: Installation, hub: TinyHub) -> None:
    hub.cuts, hub.cut_at = 10**6, 1000
    offline = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    unreachable = {**hub.environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    cases: list[tuple[Sequence[str], Mapping[str, str], str]] = [
        (["lab/nothing"], hub.environment, "does not exist on the hub, or is private"),
        (["lab/model", "--revision", "v9"], hub.environment, "does not exist on the hub"),
        (["lab/token"], hub.environment, "check HF_TOKEN"),
        (["lab/cut"], hub.environment, "cannot be fetched: "),
        (["lab/model"], offline, "the hub cannot be reached: OfflineModeIsEnabled"),
        (["lab/model"], unreachable, "the hub cannot be reached: ConnectError"),
    ]
    started = [
        (installed.start("generate", *model, *PROMPT, **where), words)
        for model, where, words in cases
    ]
    for process, words in started:
        line = refusal(process)
        assert line.startswith("negamax: error: model 'lab/") and words in line, line


def test_stopped_download_resumes_and_runs_offline(installed: Installation, hub: TinyHub) -> None:
    hub.cuts, hub.cut_at = 1, 11 * 2**20  # The client writes pieces of 10 MiB.
    assert "85" in installed.run("generate", "lab/cut", *PROMPT, **hub.environment)
    assert hub.cuts == 0 and hub.ranges == [f"bytes={10 * 2**20}-"]
    offline = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    assert "85" in installed.run("generate", "lab/cut", *PROMPT, **offline)
