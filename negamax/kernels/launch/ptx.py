"""PTX, and what Triton has for CUDA only; each with its portable form, which AMD GPUs and the
interpreter run.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

try:
    from triton.language.extra.cuda import (
        gdc_launch_dependents,
        gdc_wait,
        libdevice,
        num_threads,
    )
except ImportError:  # Triton as built for ROCm
    gdc_launch_dependents = gdc_wait = libdevice = num_threads = None

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel of the stream start, once every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before this one in the stream has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def agree(x):
    """`x` (int32) as all threads that hold it have it: if there are fewer elements than threads, 1
    everywhere if that of any thread is not 0, else 0.

    Triton lets several threads hold an element, each of which has loaded it by itself, and assumes
    that they have the same. Of memory that others write at the same time they have not; a reduction
    then tells of one of them, and another goes on with what it has.
    """
    if not INTERPRETED and is_cuda():  # noqa: SIM102  (ROCm has no `num_threads`)
        if x.numel < num_threads():
            x = tl.inline_asm_elementwise(
                "{ .reg .pred own, any; setp.ne.u32 own, $1, 0; "
                "bar.red.or.pred any, 0, own; selp.u32 $0, 1, 0, any; }",
                "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return x


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
def in_registers(x):
    """`x` of 16 bits as if it had been computed. Of a transposed tile that is loaded for several
    products Triton 3.8 keeps a copy in shared memory, beside the one in registers.
    """
    if not INTERPRETED and is_cuda():
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def take_bytes(words, selector):
    """Of each word the four bytes that the hexadecimal digits of its selector name, the lowest one
    first; 4 stands for 0.
    """
    if not INTERPRETED and is_cuda():
        taken = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, selector], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        taken = words & 0
        for i in tl.static_range(4):
            digit = (selector >> (4 * i)) & 0xF
            taken |= tl.where(digit < 4, (words >> (digit % 4 * 8)) & 0xFF, 0) << (8 * i)
    return taken


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
def unpack_words(
    q, factor, added, ELEMENT: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    IS_RAW: tl.constexpr,
):  # fmt: skip
    """Codes of packed weights as bf16, on NVIDIA GPUs: of each word of q all its codes, in their
    order (8 of "uint4" and "e2m1", else 4), plus `added` (uint4: and 128, if IS_RAW 128 alone;
    uint8: less 128; others: not at all), times `factor` where SCALED. Both are two numbers in bf16,
    for the first and for the second half of the codes. The portable form stands in
    `weight_only/triton.py`.
    """
    if ELEMENT == "uint4" or ELEMENT == "e2m1":
        return tl.inline_asm_elementwise(
            unpacking(ELEMENT, SCALED, ZEROS, IS_RAW), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [q, factor, added], (tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            unpacking(ELEMENT, SCALED, ZEROS, IS_RAW), "=h,=h,=h,=h,r,r,r",
            [q, factor, added], (tl.bfloat16,) * 4, is_pure=True, pack=1,
        )  # fmt: skip


# Bits of e2m1 of each pair of codes come from `a` to where bf16 has its own, then masks;
# `weight_only.layout.BITS` says where they lie in a word.
_E2M1 = (
    (("mov.b32 a, q;", 0x81808180), ("shr.u32 a, q, 8;", 0x00400040)),
    (("shl.b32 a, q, 2;", 0x81C081C0),),
    (("shl.b32 a, q, 6;", 0x81C081C0),),
    (("shf.l.wrap.b32 a, q, q, 12;", 0x81C081C0),),
)


@triton.constexpr_function
def unpacking(ELEMENT: str, SCALED: bool, ZEROS: bool, IS_RAW: bool) -> str:
    """A word -> its codes in bf16: PTX with the operands out (8 or 4), q, factor, added. Bits of
    e2m1 and e4m3 come where bf16 has its own: times 2^-126 and 2^-120. One half of factor or added
    for both of a product takes no instruction: its operands may be such.
    """
    pairs = 4 if ELEMENT in ("uint4", "e2m1") else 2
    word, factor = f"${2 * pairs}", 2 * pairs + 1
    lines = [f"xor.b32 q, {word}, 0x80808080;" if ELEMENT == "uint8" else f"mov.b32 q, {word};"]
    for pair in range(pairs):
        half = pair // (pairs // 2)
        if ELEMENT == "uint4":
            lines.append(f"shr.u32 a, q, {4 * pair};")
            lines.append("lop3.b32 c, a, 0x000F000F, 0x43004300, 0xEA;")  # (a & b) | c
        elif ELEMENT == "e2m1":
            lines.append("mov.b32 c, 0;")
            for moved, mask in _E2M1[pair]:
                lines += [moved, f"lop3.b32 c, a, {mask:#010x}, c, 0xEA;"]
        elif ELEMENT == "e4m3":
            lines.append(
                f"shl.b32 a, q, {8 - 8 * pair}; shr.u32 c, a, 4; and.b32 c, c, 0x07F007F0;"
            )
            lines.append("lop3.b32 c, a, 0x80008000, c, 0xEA;")
        else:  # 128 and the lower 7 bits, less 128 or 256
            lines.append(f"shr.u32 a, q, {8 * pair};")
            lines.append("lop3.b32 c, a, 0x007F007F, 0x43004300, 0xEA;")
            lines.append("lop3.b32 a, a, 0x00800080, 0x43004300, 0xEA;")
            lines.append("mov.b32 b, 0xBF80BF80; fma.rn.bf16x2 c, a, b, c;")
        if (ELEMENT == "uint4" or ZEROS) and not IS_RAW:
            lines.append(f"mov.b32 {{h0, h1}}, ${factor + 1}; mov.b32 a, {{h{half}, h{half}}};")
            lines.append("mov.b32 b, 0x3F803F80; fma.rn.bf16x2 c, c, b, a;")
        if SCALED:
            lines.append(f"mov.b32 {{h0, h1}}, ${factor}; mov.b32 a, {{h{half}, h{half}}};")
            lines.append("mov.b32 b, 0x80008000; fma.rn.bf16x2 c, c, a, b;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, c;")
    return "{ .reg .b32 q, a, b, c; .reg .b16 h0, h1; " + " ".join(lines) + " }"
