from typing import Any

import pytest

_SIZES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "pcp": "prefill_context_parallel_size", "dcp": "decode_context_parallel_size",
    "ep": "expert_parallel_size",
}  # fmt: skip


def parallel(**options: Any) -> dict[str, Any]:
    """Return options for parallel sizes with short names. `ep` True means all ranks."""
    return {
        "enable_expert_parallel"
        if option is True and name == "ep"
        else _SIZES.get(name, name): option
        for name, option in options.items()
    }


def full(*values: Any) -> Any:
    """Mark a parameter that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.full)
