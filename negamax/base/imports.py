"""Import many modules without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import modules that stay, without any collection: a fifth of PyTorch's import time less."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
