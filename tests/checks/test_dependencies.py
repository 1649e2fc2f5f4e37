"""Imports are declared, dependencies are bounded, and one tested set is installed everywhere."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
}
DEVELOPMENT = ("test", "dev")  # extras that the package itself never imports
# others are imported by their name, with "_" for "-"
IMPORTED_AS = {"pyzmq": "zmq", "opentelemetry-sdk": "opentelemetry"}


def import_name(requirement: Requirement) -> str:
    return IMPORTED_AS.get(requirement.name, requirement.name.replace("-", "_"))


def third_party_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Return top-level names of imported modules, and whether importing `path` imports them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    within_functions = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for name in {module.split(".")[0] for module in modules}:
            if name != "negamax" and name not in sys.stdlib_module_names:
                yield name, node not in within_functions


def test_every_import_is_declared() -> None:
    """Modules import only required packages at the top; functions may import extras."""
    required = {import_name(requirement) for requirement in REQUIRED}
    optional = {
        import_name(requirement)
        for name, extra in EXTRAS.items()
        if name not in DEVELOPMENT
        for requirement in extra
    }
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "negamax").rglob("*.py")
        for name, at_once in third_party_imports(path)
        if name not in (required if at_once else required | optional)
    }
    assert not undeclared, "declare in pyproject.toml, or import otherwise"


def test_every_dependency_has_an_upper_bound() -> None:
    optional = [
        requirement for name in EXTRAS if name not in DEVELOPMENT for requirement in EXTRAS[name]
    ]
    unbounded = [
        str(requirement)
        for requirement in [*REQUIRED, *optional]
        if not any(specifier.operator in ("<", "==", "~=") for specifier in requirement.specifier)
    ]
    assert unbounded == []


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        pin.name.lower().replace("_", "-"): str(pin.specifier).removeprefix("==") for pin in pins
    }


@pytest.mark.parametrize(
    "requirement", [*REQUIRED, *(r for extra in EXTRAS.values() for r in extra)], ids=str
)
def test_every_dependency_is_in_the_tested_set(requirement: Requirement) -> None:
    if requirement.name == PROJECT["name"]:
        return
    version = constraints().get(requirement.name.lower().replace("_", "-"))
    assert version is not None, (
        "run `make constraints`, or add the version that was tested to constraints.txt"
    )
    assert requirement.specifier.contains(version), version


def test_one_install_line_with_the_tested_torch_everywhere() -> None:
    torch = f"torch=={constraints()['torch']}"
    lines = {
        name: re.findall(
            r"^pip install torch.*$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in ("README.md", "docs/gpu.md")
    }
    assert lines == {
        name: [f"pip install {torch} && pip install -c constraints.txt -e ."] for name in lines
    }
    assert f"TORCH  ?= {torch}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
