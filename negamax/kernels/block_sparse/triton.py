"""Block-sparse attention on the GPU."""

from __future__ import annotations

import torch

from negamax.kernels.attention.triton_head_norm import sparse_norm_rope_write
from negamax.kernels.block_sparse.spec import SparseHeadNorm
from negamax.kernels.op import Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.signatures import BLOCK_SPARSE_NORM_ROPE_WRITE

_GPU = frozenset({Feature.TRITON})
_DTYPES = (torch.bfloat16, torch.float16)

KERNELS = (
    Kernel(
        BLOCK_SPARSE_NORM_ROPE_WRITE,
        "triton",
        sparse_norm_rope_write,
        SparseHeadNorm,
        requires=_GPU,
        dtypes=_DTYPES,
    ),
)
