"""Attention on the GPU: one launch for norm + rope + cache write, one for the decodes of a step,
one for its prefills.

Scores, softmax and sums are in fp32; FP8 keys and values are multiplied as fp16, which holds them
exactly.
"""

from __future__ import annotations

from functools import partial

import torch

from negamax.kernels.attention.spec import HeadNorm, prepare_qk_norm
from negamax.kernels.attention.triton_decode import decode
from negamax.kernels.attention.triton_decode_plan import plan_decode
from negamax.kernels.attention.triton_head_norm import head_norm_rope_write
from negamax.kernels.attention.triton_prefill import plan_prefill, prefill
from negamax.kernels.attention.triton_qk_norm import qk_norm_rope_write
from negamax.kernels.attention.triton_rope import rope_write
from negamax.kernels.op import Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.signatures import (
    DECODE,
    HEAD_NORM_ROPE_WRITE,
    PREFILL,
    QK_NORM_ROPE_WRITE,
    ROPE_WRITE,
)

_GPU = frozenset({Feature.TRITON})
_DTYPES = (torch.bfloat16, torch.float16)

KERNELS = (
    Kernel(
        QK_NORM_ROPE_WRITE,
        "triton",
        qk_norm_rope_write,
        prepare_qk_norm,
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(
        HEAD_NORM_ROPE_WRITE,
        "triton",
        head_norm_rope_write,
        HeadNorm,
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(ROPE_WRITE, "triton", rope_write, requires=_GPU, dtypes=_DTYPES),
    Kernel(
        DECODE,
        "triton",
        decode,
        plan_decode,
        requires=_GPU | {Feature.SPIN_WAIT},
        dtypes=_DTYPES,
    ),
    Kernel(
        DECODE,
        "triton_two_launches",
        decode,
        partial(plan_decode, reduce_later=True),
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(PREFILL, "triton", prefill, plan_prefill, requires=_GPU, dtypes=_DTYPES),
)
