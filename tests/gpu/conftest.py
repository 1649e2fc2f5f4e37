"""Tests that need a GPU: `pytest -m gpu tests/gpu`. Kernel tests need no serving packages.

On one GPU of 140 GB and 16 cores, `-n 12 --dist worksteal` runs twelve tests at a time.
"""

import fcntl
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
KERNELS_ONLY = find_spec("msgspec") is None  # Without msgspec the engine cannot be imported.
WITHOUT_ENGINE = {
    "test_collectives.py", "test_compilation.py", "test_dispatch.py", "test_kernels.py",
}  # fmt: skip
collect_ignore = [
    each.name for each in HERE.glob("test_*.py") if KERNELS_ONLY and each.name not in WITHOUT_ENGINE
]
IS_LARGE = re.compile("test_two_full_layers")  # needs up to 48 GiB of GPU memory
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
IS_PARALLEL = bool(WORKER)
if IS_PARALLEL and (count := torch.cuda.device_count()) > 1:
    # Each worker starts with another GPU, so that tests of one GPU use all GPUs.
    first = int(WORKER.removeprefix("gw")) % count
    order = [(first + offset) % count for offset in range(count)]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, order)))


@pytest.fixture(scope="session", autouse=True)
def small_kv_caches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if IS_PARALLEL and not KERNELS_ONLY:
            from negamax.options.engine import EngineOptions

            init = EngineOptions.__init__

            def limited(self: EngineOptions, *args: Any, **options: Any) -> None:
                init(self, *args, **{"kv_cache_memory": 2 << 30, **options})

            patch.setattr(EngineOptions, "__init__", limited)
        yield


@contextmanager
def wait_for_turn() -> Iterator[None]:
    """Run one large computation at a time, and free its unused memory."""
    with Path(__file__).open() as lock:
        if IS_PARALLEL:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def large_turn() -> Callable[[], AbstractContextManager[None]]:
    return wait_for_turn


@pytest.fixture(autouse=True)
def take_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run one large test at a time, and free the unused memory after each test."""
    with wait_for_turn() if IS_LARGE.search(request.node.nodeid) else nullcontext():
        yield
    if IS_PARALLEL:
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="PyTorch finds no GPU here")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)
