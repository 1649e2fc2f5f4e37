"""Make test inputs of every op, and call the op's kernels.

The `CASES` of an op's family list the op. The contract test, the benchmark
(`tools/bench_kernels.py`) and the ahead-of-time compilation read this table.
"""

from tests.kernel_cases import (
    attention,
    block_sparse,
    cache_shards,
    collectives,
    dispatch,
    drafts,
    gemm,
    kvcache,
    mlp,
    moe,
    norm,
    quantize,
    sampling,
    steps,
)
from tests.kernel_cases.case import OpCases

_FAMILIES = (
    norm, kvcache, attention, block_sparse, cache_shards, gemm, moe, mlp, quantize, sampling,
    drafts, steps, collectives, dispatch,
)  # fmt: skip
CASES: dict[str, OpCases] = {op: own for family in _FAMILIES for op, own in family.CASES.items()}
