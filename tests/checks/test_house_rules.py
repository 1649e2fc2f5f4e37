import ast
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.checks.sources import PACKAGE, ROOT, SOURCES, imports, nodes, room, tree

FILE_LINES = 600
KERNEL_FILE_LINES = 900
FUNCTION_LINES = 105  # limit of lines without the signature
ASSET_BYTES = 44_700_000
VENDOR_BYTES = 600_000  # limit for the vendored files of the chat page


@cache
def attributes(path: Path) -> frozenset[str]:
    """Return the dotted names that the code uses, such as `os.environ`, `torch.distributed`."""
    return frozenset(
        f"{node.value.id}.{node.attr}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )


@pytest.mark.parametrize(
    ("module", "door"),
    [
        ("torch.distributed", r"(parallel|transfer)/"),
        ("triton", r"kernels/(\w+/triton(_\w+)?|launch/(ptx|words|tile))\.py"),
        ("triton.language.extra", r"kernels/launch/ptx\.py"),
        ("tl.inline_asm_elementwise", r"kernels/launch/ptx\.py"),
        ("ray", r"engine/nodes/ray_driver\.py"),
        ("os.environ", r"base/env\.py"),
        ("flashinfer", r"kernels/\w+/vendor\.py"),
        ("deep_gemm", r"kernels/\w+/vendor\.py"),
    ],
)
def test_single_door(module: str, door: str) -> None:
    users = [
        room(path)
        for path in SOURCES
        if any(f"{name}.".startswith(f"{module}.") for name in (*imports(path), *attributes(path)))
    ]
    assert [user for user in users if not re.match(door, user)] == []


def test_definitions_are_formulas() -> None:
    """Check that op definitions are formulas which write only the outputs of their op."""
    specs = sorted((PACKAGE / "kernels").glob("*/op.py"))
    assert "numpy" not in {name for path in specs for name in imports(path)}
    in_place = {
        node.func.attr
        for path in specs
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
    }
    assert in_place == {"copy_", "index_copy_"}


def test_no_pickle_of_any_kind_and_no_code_from_data() -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    users = [
        room(path) for path in SOURCES if forbidden & {name.split(".")[0] for name in imports(path)}
    ]
    assert users == []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert called not in ("eval", "exec", "compile", "__import__"), room(path)
                names = [keyword.arg for keyword in node.keywords]
                assert "trust_remote_code" not in names, room(path)


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (KERNEL_FILE_LINES if room(path).startswith("kernels/") else FILE_LINES):
            too_long.append(f"{room(path)}: {lines} lines")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                if length > FUNCTION_LINES:
                    too_long.append(f"{room(path)}: {node.name} has {length} lines")
    assert too_long == []


def test_every_room_and_module_says_what_it_is_for() -> None:
    assert [room(path) for path in SOURCES if not ast.get_docstring(tree(path))] == []


def test_embedded_assets_stay_small() -> None:
    size = sum(path.stat().st_size for path in (PACKAGE / "assets").rglob("*") if path.is_file())
    assert 0 < size <= ASSET_BYTES


def test_clients_of_tests_are_patient() -> None:
    """Check that clients set a timeout: httpx's default of 5 s is too short on a busy machine."""
    asking = re.compile(r"\bhttpx\.(get|post|head|options|request|stream|(Async)?Client)\(")
    hasty = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        if asking.search(path.read_text(encoding="utf-8"))
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and asking.fullmatch(f"{ast.unparse(node.func)}(")
        and "timeout" not in [keyword.arg for keyword in node.keywords]
    ]
    assert hasty == []


VENDOR = PACKAGE / "api" / "playground" / "vendor"


def test_libraries_of_the_chat_page_comply_with_its_policy_and_are_licensed() -> None:
    modules = {path.name: path.read_text(encoding="utf-8") for path in VENDOR.glob("*.js")}
    assert modules.keys() == {"highlight.js", "markdown.js", "temml.js"}
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < VENDOR_BYTES
    assert not [name for name, text in modules.items() if re.search(r"new Function\(|eval\(", text)]
    licenses = (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")
    package = ROOT / "tools" / "vendor_playground" / "package.json"
    for name, version in json.loads(package.read_text(encoding="utf-8"))["dependencies"].items():
        assert f"\n{name} {version} (" in licenses, name


# Callbacks (`on_`), conversions (`to_`, `as_`) and alternative constructors may use these words.
FIRST_WORDS = {
    "a", "an", "the", "of", "at", "by", "in", "for", "from", "with", "without", "beside", "behind",
    "between", "among", "under", "over", "above", "below", "after", "before", "since", "until",
    "during", "within", "through", "across", "per", "into", "onto", "about", "against", "near",
}  # fmt: skip


def has_free_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a property or may be an alternative constructor."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    return any(word in decorators for word in ("property", "classmethod", "staticmethod"))


def test_public_functions_do_not_start_with_a_preposition() -> None:
    found = [
        f"{room(path)}:{node.lineno}: {node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.split("_")[0] in FIRST_WORDS
        and not has_free_name(node)
    ]
    assert found == []


def test_names_of_test_files_are_unique() -> None:
    """Check for unique names, since pytest imports modules outside packages into one name space."""
    names = [
        path.name
        for folder in (ROOT / "tests", ROOT / "nano")
        for path in folder.rglob("*.py")
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists()
    ]
    assert sorted(names) == sorted(set(names))


def test_names_of_classes_are_unique() -> None:
    found = (node for path in SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef))
    count = Counter(node.name for node in found)
    assert [name for name, number in count.items() if number > 1] == []


TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "gpu", TESTS / "cpu")  # Tests import these modules by their bare names.
ALLOWED = {
    "negamax", "nano", "numpy", "pytest", "safetensors", "tokenizers", "torch", "transformers",
    "triton",
}  # fmt: skip


def find_module(name: str) -> Path | None:
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
