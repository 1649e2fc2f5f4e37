"""PTX, and what Triton has for CUDA only; each with its portable form, which AMD GPUs and the
interpreter run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice
except ImportError:  # Triton as built for ROCm
    gdc_launch_dependents = gdc_wait = libdevice = None

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel of the stream start, once every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Until the kernel before this one in the stream has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def pack_pair(even, odd, DTYPE: tl.constexpr):
    """fp32 values rounded to DTYPE (bf16, fp16), `even` in the lower half of an int32.

    By one instruction for the two: what ptxas makes of two single ones runs on the slowest of the
    units. In the program that norms a row that is 36 conversions of 8 cycles a warp, one after the
    other.
    """
    if not INTERPRETED and is_cuda():
        convert: tl.constexpr = (
            "cvt.rn.bf16x2.f32 $0, $1, $2;"
            if tl.bfloat16 == DTYPE
            else "cvt.rn.f16x2.f32 $0, $1, $2;"
        )
        words = tl.inline_asm_elementwise(
            convert, "=r,f,f", [odd, even], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = even.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = odd.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
        words = low | high
    return words


@triton.jit
def e4m3_to_fp16(x):
    """e4m3fn values as fp16, before the tile goes to shared memory (what has side effects stays
    where it is): the tensor cores take values of adjacent keys together, which would be gathered
    there byte by byte.
    """
    if not INTERPRETED and cuda_capability_geq(8, 9):
        x = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; "
            "cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        x = x.to(tl.float16)
    return x


@triton.jit
def fast_log(x):
    """log x; on NVIDIA GPUs the hardware's, good to 2^-22 beside a logarithm of 1 or less."""
    return libdevice.fast_logf(x) if not INTERPRETED and is_cuda() else tl.log(x)
