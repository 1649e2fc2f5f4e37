import sys
from pathlib import Path

from tests.checks.sources import imports

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "gpu", TESTS / "cpu")  # of modules that tests import by their bare names
ALLOWED = {
    "negamax", "nano", "numpy", "pytest", "safetensors", "tokenizers", "torch", "transformers",
    "triton",
}  # fmt: skip


def find_module(name: str) -> Path | None:
    """Return the file of a module of the tests, or None."""
    if name.startswith("tests."):
        path = TESTS.parent.joinpath(*name.split(".")).with_suffix(".py")
        return path if path.is_file() else None
    paths = (folder / f"{name.split('.')[0]}.py" for folder in FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def test_gpu_tests_import_only_packages_of_the_gpu_machine() -> None:
    known = {*ALLOWED, *sys.stdlib_module_names, "tests"}
    to_read, seen = list((TESTS / "gpu").glob("*.py")), set()
    foreign: set[str] = set()
    while to_read:
        path = to_read.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports(path):
            found, package = find_module(name), name.split(".")[0]
            if found is not None:
                to_read.append(found)
            elif package not in known:
                foreign.add(f"{path.relative_to(TESTS)}: {package}")
    assert not foreign
