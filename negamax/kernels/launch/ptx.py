"""PTX and CUDA-only functions of Triton, with portable versions for AMD and the interpreter."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice, num_threads
except ImportError:  # this Triton is built for ROCm
    gdc_launch_dependents = gdc_wait = libdevice = num_threads = None

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start when all programs of this kernel have called this function."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the predecessor in the stream has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def agree(x):
    """Give the same value to all threads that loaded the same element of `x` (int32). With fewer
    elements than threads, every thread gets 1 if any value differs from 0, else 0.

    If several threads need the same element, each thread loads it, and Triton assumes that all
    loads return the same value. If another program writes the element meanwhile, the values differ:
    a reduction uses one thread's value, but the other threads use their own values.
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
    """Round fp32 values to DTYPE (bf16, fp16) and pack pairs into int32, `even` in the lower half.

    One instruction converts both values of a pair. Single conversions run on the slowest unit and
    take 8 cycles per warp; a program that normalizes a row would have 36 of them.
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
def keep_in_registers(x):
    """Return a copy of `x` (16 bits) in registers. Without this copy, Triton 3.8 stores a
    transposed tile twice in shared memory if several tl.dot use the tile.
    """
    if not INTERPRETED and is_cuda():
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def take_bytes(words, selector):
    """Reorder the bytes of words: hex digit i of `selector` is the source of byte i; 4 means 0."""
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
    """Convert an e4m3fn tile to fp16. `is_pure=False` keeps the conversion before the tile's store
    to shared memory. The tensor cores read values of adjacent keys together, and would read FP8
    values byte by byte.
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
    """Return log x; NVIDIA GPUs use an instruction that is exact to 2^-22 for results up to 1."""
    return libdevice.fast_logf(x) if not INTERPRETED and is_cuda() else tl.log(x)


@triton.jit
def unpack_words(
    q, factor, added, ELEMENT: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    IS_RAW: tl.constexpr,
):  # fmt: skip
    """Unpack the codes of packed words q to bf16 on NVIDIA GPUs. A word has 8 codes of "uint4" or
    "e2m1", or 4 codes of another type.

    The function adds 128 to uint4 codes and subtracts 128 from uint8 codes. Unless IS_RAW is set,
    it adds `added` to uint4 codes, and with ZEROS to all codes. With SCALED it multiplies the codes
    by `factor`. `added` and `factor` have one bf16 number for each half of a word's codes.
    `weight_only/triton.py` has the portable version.
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


# For each pair of e2m1 codes, PTX that shifts `q` into `a`, and a mask of the bits that bf16 needs.
# `weight_only.layout.BITS` lists the positions of these bits in a word.
_E2M1 = (
    (("mov.b32 a, q;", 0x81808180), ("shr.u32 a, q, 8;", 0x00400040)),
    (("shl.b32 a, q, 2;", 0x81C081C0),),
    (("shl.b32 a, q, 6;", 0x81C081C0),),
    (("shf.l.wrap.b32 a, q, q, 12;", 0x81C081C0),),
)


@triton.constexpr_function
def unpacking(ELEMENT: str, SCALED: bool, ZEROS: bool, IS_RAW: bool) -> str:
    """Return PTX that unpacks a word to bf16, with the operands out (8 or 4), q, factor, added.

    The bits of e2m1 and e4m3 are moved to their positions in bf16, which scales values by 2^-126
    and 2^-120. Reading one half of `factor` or `added` takes no extra instruction.
    """
    pairs = 4 if ELEMENT in ("uint4", "e2m1") else 2
    word, factor = f"${2 * pairs}", 2 * pairs + 1
    lines = [f"xor.b32 q, {word}, 0x80808080;" if ELEMENT == "uint8" else f"mov.b32 q, {word};"]
    for pair in range(pairs):
        half = pair // (pairs // 2)
        if ELEMENT == "uint4":
            lines.append(f"shr.u32 a, q, {4 * pair};")
            lines.append("lop3.b32 c, a, 0x000F000F, 0x43004300, 0xEA;")  # c = code + 128
        elif ELEMENT == "e2m1":
            lines.append("mov.b32 c, 0;")
            for moved, mask in _E2M1[pair]:
                lines += [moved, f"lop3.b32 c, a, {mask:#010x}, c, 0xEA;"]
        elif ELEMENT == "e4m3":
            lines.append(
                f"shl.b32 a, q, {8 - 8 * pair}; shr.u32 c, a, 4; and.b32 c, c, 0x07F007F0;"
            )
            lines.append("lop3.b32 c, a, 0x80008000, c, 0xEA;")
        else:  # 8-bit integers: c = (128 + lower 7 bits) - (128 + bit 7)
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
