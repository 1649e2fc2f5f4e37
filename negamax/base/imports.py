"""Disable the garbage collector while large libraries are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Disable the garbage collector during imports, which makes PyTorch's import a fifth faster."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
