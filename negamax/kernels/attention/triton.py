"""Attention on the GPU in three launches: norm, rope and cache write; decodes; prefills.

Scores, softmax and sums are fp32. FP8 keys and values are multiplied as fp16, which represents FP8
values exactly.
"""

from negamax.kernels.attention.op import (
    DECODE,
    HEAD_NORM_ROPE_WRITE,
    PREFILL,
    QK_NORM_ROPE_WRITE,
    ROPE,
    ROPE_WRITE,
    HeadNorm,
    prepare_qk_norm,
)
from negamax.kernels.attention.triton_decode import decode, decode_kernels
from negamax.kernels.attention.triton_decode_plan import plan_decode
from negamax.kernels.attention.triton_head_norm import head_norm_rope_write, rope_write
from negamax.kernels.attention.triton_prefill import plan_prefill, prefill
from negamax.kernels.attention.triton_qk_norm import qk_norm_rope_write
from negamax.kernels.attention.triton_rope import rope
from negamax.kernels.launch.triton import triton_kernel

KERNELS = (
    triton_kernel(QK_NORM_ROPE_WRITE, qk_norm_rope_write, prepare_qk_norm),
    triton_kernel(HEAD_NORM_ROPE_WRITE, head_norm_rope_write, HeadNorm),
    triton_kernel(ROPE_WRITE, rope_write),
    triton_kernel(ROPE, rope),
    *decode_kernels(DECODE, decode, plan_decode),
    triton_kernel(PREFILL, prefill, plan_prefill),
)
