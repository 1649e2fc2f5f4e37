"""What editors and type checkers see of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import negamax

PACKAGE = Path(negamax.__file__).parent


def definition(file: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def test_keywords_of_llm_are_the_engines_options() -> None:
    """The same names, types and defaults in the same order."""
    options = [
        (node.target.id, ast.unparse(node.annotation), ast.unparse(node.value))
        for node in definition("options/engine.py", "EngineOptions").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    ]
    (init,) = [
        node
        for node in definition("engine/llm.py", "LLM").body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    keywords = [
        (argument.arg, ast.unparse(argument.annotation), ast.unparse(default))
        for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        if argument.annotation and default
    ]
    assert keywords == [("chat_template", "str | None", "None"), *options]
    assert init.args.kwarg is None


def test_package_lists_what_it_has_without_importing_it() -> None:
    show = "import sys, negamax; print(dir(negamax), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['LLM', 'SamplingParams', '__version__'] False"
    assert (PACKAGE / "py.typed").exists()
