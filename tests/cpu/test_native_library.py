"""The native row kernels are an option: without a working C compiler the same model answers through the other providers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from negamax.kernels.native import library

ASK = """
from negamax import LLM, SamplingParams
with LLM("nano", dtype="bfloat16", num_threads=1, max_model_len=512) as llm:
    print({kernel.provider for kernel in llm._loop._executor._worker._kernels.kernels.values()})
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    print(llm.chat(question, SamplingParams(temperature=0))[0].outputs[0].message.content)
"""


def ask(**environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return result.stdout


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_answer_is_the_same(compiler: str, tmp_path: Path) -> None:
    """`false` is there and fails: that must not stop the start either."""
    output = ask(CC=compiler, XDG_CACHE_HOME=str(tmp_path))
    assert "native" not in output
    assert "bucketed" in output
    assert "85" in output


def test_the_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    if library.load() is None:
        pytest.skip("no C compiler on this machine")
    assert "native" in ask(XDG_CACHE_HOME=str(tmp_path))
    (compiled,) = (tmp_path / "negamax" / "native").iterdir()
    stamp = compiled.stat().st_mtime_ns
    assert "85" in ask(XDG_CACHE_HOME=str(tmp_path))
    assert compiled.stat().st_mtime_ns == stamp
