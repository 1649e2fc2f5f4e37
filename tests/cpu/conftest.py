"""Fork the ranks and grammar processes of these tests, and share a bf16 checkpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked_children import forked_children

__all__ = ["forked_children"]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from loading_support import write_source  # loads torch, after tests/conftest.py set it up

    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(autouse=True, scope="session")
def bool_comparisons() -> None:
    """Give comparisons the type bool in Triton's interpreter, as the compiler does.

    The interpreter keeps the operands' type, and Triton 3.9 refuses a mask of that type.
    """
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        compute = interpreter.InterpreterBuilder.binary_op

        def compute_with_type(builder: Any, left: Any, right: Any, op: Any) -> Any:
            made = compute(builder, left, right, op)
            if made.data.dtype == bool:
                made.dtype = interpreter.tl.int1
            return made

        interpreter.InterpreterBuilder.binary_op = compute_with_type
