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


@triton.jit
def unpack_bytes(
    q, factor, added, ELEMENT: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Codes of packed weights as bf16, on NVIDIA GPUs: the bytes q, of "uint4" and "e2m1" their low
    nibbles or the HIGH ones, plus `added` (uint4: and 128; uint8: less 128; others: not at all),
    times `factor` where SCALED. The portable form stands in `weight_only/triton.py`.
    """
    return tl.inline_asm_elementwise(
        unpacking(ELEMENT, HIGH, SCALED, ZEROS), "=r,=r,r,r,r,r,r", [q, factor, added], tl.bfloat16,
        is_pure=True, pack=4,
    )  # fmt: skip


# From four bytes in q: two of them, in the lower or the upper bytes of the halves of a register
_LOWER = ("prmt.b32 a, q, 0, 0x4140;", "prmt.b32 a, q, 0, 0x4342;")
_UPPER = ("prmt.b32 a, q, 0, 0x1404;", "prmt.b32 a, q, 0, 0x3424;")


@triton.constexpr_function
def unpacking(ELEMENT: str, HIGH: bool, SCALED: bool, ZEROS: bool) -> str:
    """Four bytes -> two pairs of bf16: PTX with the operands out, out, q, factor, factor, added,
    added. Bits of e2m1 and e4m3 come where bf16 has its own: times 2^-126 and 2^-120. Which
    elements share a register is for the compiler to choose: each result comes of its own byte.
    """
    lines = ["xor.b32 q, $2, 0x80808080;" if ELEMENT == "int8" else "mov.b32 q, $2;"]
    for pair in range(2):
        if ELEMENT == "uint4":
            lines.append(_LOWER[pair])
            lines += ["shr.u32 a, a, 4;"] if HIGH else []
            lines.append("lop3.b32 c, a, 0x000F000F, 0x43004300, 0xEA;")  # (a & b) | c
        elif ELEMENT in ("uint8", "int8"):
            for number, register in ((2 * pair, "a"), (2 * pair + 1, "b")):
                lines.append(f"prmt.b32 {register}, q, 0x4B000000, 0x765{number};")
                lines.append(f"mov.b32 f, {register}; sub.f32 f, f, 0f4B000080;")
                lines.append(f"mov.b32 {register}, f;")
            lines.append("prmt.b32 c, a, b, 0x7632;")
        else:
            shift, mask = (6, "0x01C001C0") if ELEMENT == "e2m1" else (4, "0x07F007F0")
            lines.append(_UPPER[pair])
            lines += ["shl.b32 a, a, 4;"] if ELEMENT == "e2m1" and not HIGH else []
            lines.append(f"shr.u32 c, a, {shift}; and.b32 c, c, {mask};")
            lines.append("lop3.b32 c, a, 0x80008000, c, 0xEA;")
        if ELEMENT == "uint4" or ZEROS:
            lines.append(f"mov.b32 b, 0x3F803F80; fma.rn.bf16x2 c, c, b, ${5 + pair};")
        if SCALED:
            lines.append(f"mov.b32 b, 0x80008000; fma.rn.bf16x2 c, c, ${3 + pair}, b;")
        lines.append(f"mov.b32 ${pair}, c;")
    return "{ .reg .b32 q, a, b, c; .reg .f32 f; " + " ".join(lines) + " }"
