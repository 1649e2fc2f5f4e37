"""Tests that need a GPU: `pytest -m gpu tests/gpu`. Those of kernels need only torch, triton, numpy
and pytest.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS_ONLY = find_spec("msgspec") is None  # the engine cannot be imported then
ENGINE_TESTS = ["test_lost_ranks.py", *(f"test_gpu_{name}.py" for name in (
    "data_parallel", "determinism", "engine", "every_format", "formats", "model", "pipeline",
    "replicas"))]  # fmt: skip
collect_ignore = ENGINE_TESTS if KERNELS_ONLY else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="PyTorch finds no GPU here")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)
