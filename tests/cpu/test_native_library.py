import os
import subprocess
import sys
from pathlib import Path

import pytest

from negamax.kernels.native import library

ASK = """
from negamax import LLM, SamplingParams
with LLM("nano", dtype="bfloat16", num_threads=1, max_model_len=512) as llm:
    table = llm._loop.executor._worker.runner.kernels
    print({table[op].provider for op in table.candidates})
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    print(llm.chat(question, SamplingParams(temperature=0))[0].outputs[0].message.content)
"""


LOAD = "from negamax.kernels.native import library; print(library.load() is not None)"


def ask(code: str = ASK, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return result.stdout


def test_library_is_not_needed(tmp_path: Path) -> None:
    assert ask(LOAD, CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path)) == "False\n"


@pytest.mark.full
def test_answer_is_the_same_without_a_compiler(tmp_path: Path) -> None:
    output = ask(CC="false", XDG_CACHE_HOME=str(tmp_path))
    assert "native" not in output
    assert "bucketed" in output
    assert "85" in output


def test_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    output = ask(XDG_CACHE_HOME=str(tmp_path))
    assert "native" in output and "85" in output
    (compiled,) = (tmp_path / "negamax" / "native").iterdir()
    stamp = compiled.stat().st_mtime_ns
    assert ask(LOAD, XDG_CACHE_HOME=str(tmp_path)) == "True\n"
    assert compiled.stat().st_mtime_ns == stamp


def test_logs_the_compilers_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "disk is full" >&2; exit 3; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    monkeypatch.setattr(library.logger, "warning", lambda text, *values: said.append(text % values))
    assert library.load.__wrapped__() is None
    assert said[0].endswith(f"{compiler} ended with exit code 3: disk is full")
