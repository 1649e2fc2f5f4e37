"""Tests that need a GPU: `pytest -m gpu tests/gpu`; kernel tests need no serving packages."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS_ONLY = find_spec("msgspec") is None  # the engine cannot be imported without it
WITHOUT_ENGINE = {
    "test_collectives.py", "test_compilation.py", "test_dispatch.py", "test_kernels.py",
}  # fmt: skip
collect_ignore = [
    each.name for each in HERE.glob("test_*.py") if KERNELS_ONLY and each.name not in WITHOUT_ENGINE
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="PyTorch finds no GPU here")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)
