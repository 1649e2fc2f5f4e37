"""Imports are declared, dependencies are bounded, and one tested set is installed everywhere."""

import ast
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.checks.sources import ROOT, SOURCES, nodes, room

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


def imported_packages(body: list[ast.AST]) -> set[str]:
    """Return the third-party packages that these statements import."""
    modules = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    modules += [
        node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    return {name.split(".")[0] for name in modules} - {"negamax", *sys.stdlib_module_names}


def test_every_import_is_declared() -> None:
    """Modules import only required packages at the top; functions may import extras."""
    required = {import_name(requirement) for requirement in REQUIRED}
    optional = {
        import_name(requirement)
        for name, extra in EXTRAS.items()
        if name not in DEVELOPMENT
        for requirement in extra
    }
    undeclared = set()
    for path in SOURCES:
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        found = [node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom)]
        late = {
            id(node)
            for function in nodes(path)
            if isinstance(function, functions)
            for node in ast.walk(function)
        }
        at_once = imported_packages([node for node in found if id(node) not in late])
        undeclared |= {f"{room(path)}: {name}" for name in at_once - required}
        undeclared |= {
            f"{room(path)}: {name}" for name in imported_packages(found) - required - optional
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
