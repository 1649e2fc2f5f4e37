import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.checks.sources import ROOT, SOURCES, imports, room, top_imports
from tools.install import uv_variables

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
LISTED = PROJECT["optional-dependencies"].items()
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in LISTED}
# The package itself never imports the other extras.
OPTIONAL = [r for name, extra in EXTRAS.items() if name not in ("test", "dev") for r in extra]
OWN = {"negamax", "compression", *sys.stdlib_module_names}  # `compression`: from Python 3.14 on
# Other packages are imported by their name, with "_" for "-".
IMPORTED_AS = {
    "backports.zstd": "backports",
    "pyzmq": "zmq",
    "pillow": "PIL",
    "opentelemetry-sdk": "opentelemetry",
}


def import_name(requirement: Requirement) -> str:
    return IMPORTED_AS.get(requirement.name, requirement.name.replace("-", "_"))


def test_every_import_is_declared() -> None:
    """Check that modules import only required packages at the top. Functions may import extras."""
    required = {import_name(requirement) for requirement in REQUIRED}
    optional = {import_name(requirement) for requirement in OPTIONAL}
    undeclared = set()
    for path in SOURCES:
        at_top = {name.split(".")[0] for name in top_imports(path)} - OWN
        anywhere = {name.split(".")[0] for name in imports(path)} - OWN
        missing = (at_top - required) | (anywhere - required - optional)
        undeclared |= {f"{room(path)}: {name}" for name in missing}
    assert not undeclared, "declare the package in pyproject.toml, or use another one"


def test_every_dependency_has_an_upper_bound() -> None:
    for requirement in (*REQUIRED, *OPTIONAL):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {"<", "==", "~="}, requirement


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


@pytest.mark.parametrize(
    "requirement", [*REQUIRED, *(r for extra in EXTRAS.values() for r in extra)], ids=str
)
def test_every_dependency_is_in_the_tested_set(requirement: Requirement) -> None:
    if requirement.name == PROJECT["name"]:
        return
    version = constraints().get(requirement.name.lower().replace("_", "-"))
    assert version is not None, "run `make constraints`, or add the tested version"
    assert requirement.specifier.contains(version), version


def test_one_install_line_with_the_tested_torch_everywhere() -> None:
    torch = f"torch=={constraints()['torch']}"
    line = f"pip install {torch} && pip install -c constraints.txt -e ."
    for name in ("README.md", "docs/gpu.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(r"^pip install torch.*$", text, re.MULTILINE) == [line]
    assert f"TORCH  ?= {torch}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_gate_compiles_with_the_oldest_and_the_newest_triton() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pins = re.findall(r"^(?:OLDEST|NEWEST)_TRITON \?= 3\.(\d+)\.", makefile, re.MULTILINE)
    oldest, newest = map(int, pins)
    allowed = next(found.specifier for found in REQUIRED if found.name == "triton")
    assert allowed == SpecifierSet(f">=3.{oldest},<3.{newest + 1}")


def test_uv_gets_pips_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nconstraint = /limits.txt\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("UV_CONSTRAINT", raising=False)
    assert uv_variables()["UV_CONSTRAINT"].endswith("/limits.txt")
