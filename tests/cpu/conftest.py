"""Fork the ranks and grammar processes of these tests, and share a bf16 checkpoint."""

from pathlib import Path

import pytest

from tests.forked_children import forked_children

__all__ = ["forked_children"]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from loading_support import write_source  # torch, only after tests/conftest.py set it up

    return write_source(tmp_path_factory.mktemp("source"))
