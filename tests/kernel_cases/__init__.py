"""Test inputs of every op, and how its kernels are called with them.

An op is listed by its family's `CASES`. The contract test, the benchmark (`tools/bench_kernels.py`)
and the ahead-of-time compilation read this table.
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

CASES: dict[str, OpCases] = {
    **norm.CASES,
    **kvcache.CASES,
    **attention.CASES,
    **block_sparse.CASES,
    **cache_shards.CASES,
    **gemm.CASES,
    **moe.CASES,
    **mlp.CASES,
    **quantize.CASES,
    **sampling.CASES,
    **drafts.CASES,
    **steps.CASES,
    **collectives.CASES,
    **dispatch.CASES,
}
