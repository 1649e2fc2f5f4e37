"""Tests that need a GPU: `pytest -m gpu tests/gpu`; kernel tests need no serving packages.

`-n 10 --dist loadgroup` runs ten at a time on the same GPUs.
"""

import gc
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
# Only one at a time: each needs a third of a GPU's memory.
IS_LARGE = re.compile(r"at_full_width\[moe.experts|test_two_full_layers")
IS_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(scope="session", autouse=True)
def small_kv_caches() -> Iterator[None]:
    """Limit the KV caches of engines that share a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_PARALLEL and not KERNELS_ONLY:
            from negamax.options.engine import EngineOptions

            whole = EngineOptions.__init__

            def limited(self: EngineOptions, *args: Any, **options: Any) -> None:
                whole(self, *args, **{"kv_cache_memory": 2 << 30, **options})

            patch.setattr(EngineOptions, "__init__", limited)
        yield


@pytest.fixture(autouse=True)
def return_memory() -> Iterator[None]:
    yield
    if IS_PARALLEL:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if IS_PARALLEL and IS_LARGE.search(item.nodeid):
                item.add_marker(pytest.mark.xdist_group("large"))
        return
    skip = pytest.mark.skip(reason="PyTorch finds no GPU here")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)
