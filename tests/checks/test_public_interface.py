import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import negamax
from negamax.engine.llm import LLM
from negamax.options.engine import EngineOptions

PACKAGE = Path(negamax.__file__).parent


def test_keywords_of_llm_are_the_engines_options() -> None:
    """Check that `LLM` has the names, types and defaults of the options, for `help()`."""
    found = inspect.signature(LLM).parameters
    options = inspect.signature(EngineOptions).parameters
    assert set(found) - set(options) == {"chat_template"}
    assert [found[name] for name in options] == list(options.values())


@pytest.mark.full  # mypy reads the whole package, which takes a minute.
def test_type_checkers_see_the_keywords_of_llm(tmp_path: Path) -> None:
    file = tmp_path / "caller.py"
    file.write_text(
        "from negamax import LLM\nLLM('nano', max_num_seqs=4, chat_template='t')\n"
        "LLM('nano', max_num_seqs='4')\nLLM('nano', colour=1)\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}"]
    command += ["--follow-imports=silent", "--ignore-missing-imports", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    lines = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == ["3", "4"], done.stdout


def test_package_lists_what_it_has_without_importing_it() -> None:
    show = "import sys, negamax; print(dir(negamax), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['LLM', 'SamplingParams', '__version__'] False"
    assert (PACKAGE / "py.typed").exists()
