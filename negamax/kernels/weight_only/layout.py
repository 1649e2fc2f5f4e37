"""Memory layout of 4-bit and 8-bit weights for the weight-only kernels.

A `PackedWeight` stacks matrices [..., N, K] to R rows of codes:

    qweight  uint8, read as 32-bit words. A span is 64 bytes of a row, 16 bytes for each of four
             threads. Thread j loads the codes that the tensor cores expect in thread j: columns 2j,
             2j + 1, 2j + 8 and 2j + 9 of every 16. The codes of a word come from 16 columns, or
             from 32 columns for 4-bit codes.
             4 bits: [K / 128, R, 64]. All rows of a span are adjacent, so a tile is read in long
             runs. 8 bits: [R, K], because 8-bit tensor cores read this layout too.
    scales   [K / 128, R, groups of 128 columns] in the checkpoint's dtype; with groups of more than
             128 columns [groups, R, 1]. Byte scales of 16 or 32 columns are read as 32-bit words.
             E4M3 scales become E5M3: a wider exponent, no sign, and no subnormal numbers
    zeros    zero points in the layout of scales, unsigned integers
    row_scale [R] fp32: a scale per row, or the scale of a row's scales

K is padded to a multiple of 64 bytes. Signed 4-bit codes are stored as code + 8.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.quantize.codes import Codes
from negamax.kernels.quantize.stored import decode

PackedTensors = tuple[Tensor, Tensor, Tensor, Tensor]
SPAN_BYTES = 64
SIDE_COLUMNS = 128  # number of columns of a row whose scales (or zero points) are stored together.
# `AXES`: a span of 8-bit codes, viewed as [2, 2, 2, 4, 2], is stored in this order of axes.
AXES = (3, 0, 1, 4, 2)
# For the first 4-bit code of each pair: the position of each of its bits in the word, lowest bit
# first. The bits of the second code are 16 positions higher, modulo 32. In all e2m1 pairs but the
# first, one shift or rotation and one mask move the bits to their bf16 positions (`launch.ptx`).
BITS = {
    "uint4": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "e2m1": ((14, 7, 8, 15), (4, 5, 6, 13), (0, 1, 2, 9), (26, 27, 28, 3)),
}
E5M3_BIAS = 23  # exponent bias of E5M3; the exponents of E4M3 (-9 to 8) become at most 31


@dataclass(frozen=True)
class Packing:
    """Constants of kernels that read a `PackedWeight`, passed as one `P: tl.constexpr`."""

    ELEMENT: str  # "uint4", "e2m1", "uint8", "int8", "e4m3"
    CODES: int  # number of codes per byte
    K: int  # number of columns without padding
    K_PACKED: int  # number of columns, padding included
    GROUP: int  # number of columns that share a scale; 0: there are only scales per row
    SCALE: str  # "float", "e5m3", "e8m0"
    ZEROS: bool  # whether groups have zero points; if not, code 0 (uint4: code 8) means 0
    ROW_SCALE: bool

    @property
    def IN_WORDS(self) -> bool:
        """Whether four scales are read as one word."""
        return self.SCALE != "float" and 4 * self.GROUP <= SIDE_COLUMNS


@dataclass(frozen=True)
class PackedWeight:
    """Stacked matrices. Fields that `packing` does not use refer to `qweight` and are not read."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor
    row_scale: Tensor
    packing: Packing

    @property
    def num_rows(self) -> int:
        """The number of rows R."""
        return self.qweight.shape[-2]

    @property
    def tensors(self) -> PackedTensors:
        """Return the tensors for kernels, with codes (and scales, if IN_WORDS) as int32 words."""
        scales = self.scales.view(torch.int32) if self.packing.IN_WORDS else self.scales
        return self.qweight.view(torch.int32), scales, self.zeros, self.row_scale


def packed_rows(
    tensors: PackedTensors, packing: Packing, matrix: int, num_rows: int
) -> list[Tensor]:
    """Return views of `PackedWeight.tensors` for matrix `matrix`; a matrix has `num_rows` rows."""
    qweight, scales, zeros, row_scale = tensors
    rows = slice(matrix * num_rows, (matrix + 1) * num_rows)
    found = [qweight[..., rows, :]]
    if packing.GROUP:
        found.append(scales[:, rows, :])
    if packing.ZEROS:
        found.append(zeros[:, rows, :])
    if packing.ROW_SCALE:
        found.append(row_scale[rows])
    return found


def pack(weight: StoredWeight) -> PackedWeight:
    """Pack weight [N, K] or [count, N, K] in a format that `reads_packed` accepts.

    Matrices are packed one after the other, which saves memory: each unpacked code takes a byte.
    """
    lead = weight.values.shape[:-2]
    bits = 4 if "int4" in weight.format.element else 8
    packed = None
    for index in range(lead.numel()):
        at = (index,) if lead else ()
        part = _pack(
            decode(weight.format, {name: t[at] for name, t in weight.tensors.items()}), bits=bits
        )
        if packed is None:
            packed = _room(part, lead.numel())
        rows = slice(index * part.num_rows, (index + 1) * part.num_rows)
        packed.qweight[..., rows, :] = part.qweight
        if part.packing.GROUP:
            packed.scales[:, rows, :] = part.scales
        if part.packing.ZEROS:
            packed.zeros[:, rows, :] = part.zeros
        if part.packing.ROW_SCALE:
            packed.row_scale[rows] = part.row_scale
    assert packed is not None, "the weight must have at least one matrix"
    return packed


def _room(part: PackedWeight, count: int) -> PackedWeight:
    """Allocate a `PackedWeight` for `count` matrices of the size and packing of `part`."""
    own, rows = part.packing, count * part.num_rows

    def room(each: Tensor) -> Tensor:
        return each.new_empty(*each.shape[:-2], rows, each.shape[-1])

    qweight = room(part.qweight)
    scales = room(part.scales) if own.GROUP else qweight
    zeros = room(part.zeros) if own.ZEROS else qweight
    row_scale = part.row_scale.new_empty(rows) if own.ROW_SCALE else qweight
    return PackedWeight(qweight, scales, zeros, row_scale, own)


def _pack(codes: Codes, *, bits: int) -> PackedWeight:
    """Pack one matrix [N, K]."""
    element, values, zero_point = _unsigned(codes, bits=bits)
    (N, K), scale = values.shape, codes.scale
    assert scale is not None and codes.group_of is None
    per_byte = 2 if element in BITS else 1
    span = SPAN_BYTES * per_byte
    filled = -(-K // span) * span
    qweight = F.pad(values, (0, filled - K))
    if per_byte == 2:
        qweight = _words(qweight, BITS[element])
    else:
        qweight = qweight.view(N, -1, 2, 2, 2, 4, 2).permute(0, 1, *(2 + axis for axis in AXES))
        qweight = qweight.reshape(N, -1)
    row_scale = (
        None if codes.global_scale is None else codes.global_scale.float().reshape(-1).expand(N)
    )
    group, kind, scales = 0, "float", None
    if scale.shape[-1] > 1 or zero_point is not None or codes.global_scale is not None:
        group = codes.block[1] if scale.shape[-1] > 1 else filled
        kind, scale = _held(scale)
        scales = _by_group(scale, codes, N)
        scales = F.pad(scales, (0, 0, 0, -(-filled // group) - len(scales)))
        scales = _widened(scales, group, "float32") if kind == "float" else scales
        scales = _by_row(scales, group)
    else:
        row_scale = _by_group(scale.float(), codes, N)[0]
    zeros = None if zero_point is None else _by_group(zero_point, codes, N)
    if zeros is not None and scales is not None:
        zeros = F.pad(zeros, (0, 0, 0, -(-filled // group) - len(zeros)))
        zeros = _by_row(_widened(zeros, group, "int32"), group)
    packing = Packing(
        element, per_byte, K, filled, group, kind, zeros is not None, row_scale is not None
    )
    return PackedWeight(
        qweight,
        qweight if scales is None else scales,
        qweight if zeros is None else zeros,
        qweight if row_scale is None else row_scale,
        packing,
    )


def _words(codes: Tensor, bits: tuple[tuple[int, ...], ...]) -> Tensor:
    """Pack 4-bit codes [N, K], one per byte, into words: bytes [K / 128, N, 64] uint8."""
    spans = codes.view(len(codes), -1, 2, 2, 2, 2, 4, 2)
    # axes: row, span, thread, strides of 64 and 32 columns, pair of the word, code of the pair
    pairs = spans.permute(0, 1, 6, 2, 3, 4, 5, 7).flatten(5, 6)
    # for each code as first code of a pair: its bits in the lower and in the upper half-word
    values = torch.tensor(
        [
            sum((code >> bit & 1) << place for bit, place in enumerate(places))
            for places in bits
            for code in range(16)
        ]
    )
    lower, upper = (
        half.to(codes.device, torch.int32).to(torch.int16)
        for half in (values & 0xFFFF, values >> 16)
    )
    at = pairs + torch.arange(0, len(values), 16, dtype=torch.int32, device=codes.device)[:, None]
    halves: Tensor = lower[at].sum(-2, dtype=torch.int16)
    if any(place >= 16 for places in bits for place in places):
        halves += upper[at].flip(-1).sum(-2, dtype=torch.int16)
    return halves.view(torch.uint8).flatten(2).transpose(0, 1)


def _held(scale: Tensor) -> tuple[str, Tensor]:
    """Return `Packing.SCALE` and the stored scales: floats for "float", else bits as uint8."""
    if scale.dtype is torch.float8_e8m0fnu:
        return "e8m0", scale.view(torch.uint8)
    if scale.dtype is not torch.float8_e4m3fn:
        return "float", scale
    mantissa, exponent = torch.frexp(scale.float())  # mantissa in [1 / 2, 1)
    return "e5m3", ((exponent - 1 + E5M3_BIAS) * 8 + (mantissa * 16 - 8).int()).to(torch.uint8)


def _widened(each: Tensor, group: int, widest: str) -> Tensor:
    """Widen scales or zero points, so that those of 128 columns of a row take at least 4 bytes.

    Each thread copies one row of a 128 x 128 tile, and asynchronous copies need 4 bytes per thread.
    """
    size = min(4, 4 * group // 128)
    if each.itemsize >= size:
        return each
    return each.to(getattr(torch, widest if size == 4 else "int16"))


def _by_row(each: Tensor, group: int) -> Tensor:
    """Reorder scales or zero points [groups, N] to [K / 128, N, groups of 128 columns]."""
    count = max(1, SIDE_COLUMNS // group)
    each = F.pad(each, (0, 0, 0, -len(each) % count))
    return each.view(-1, count, each.shape[1]).transpose(1, 2).contiguous()


def _unsigned(codes: Codes, *, bits: int) -> tuple[str, Tensor, Tensor | None]:
    """Return the stored element type, the codes as uint8 [N, K], and the zero points or None."""
    values, zero_point = codes.values, codes.zero_point
    if codes.is_e2m1:
        return "e2m1", values, None
    if values.dtype is torch.float8_e4m3fn:
        return "e4m3", values.view(torch.uint8), None
    if values.dtype is torch.int8:
        assert zero_point is None
        stored = values.view(torch.uint8)
        return ("uint4", stored + 8, None) if bits == 4 else ("int8", stored, None)
    assert values.dtype is torch.uint8 and codes.scale is not None, values.dtype
    if zero_point is None:
        zero_point = torch.zeros_like(codes.scale, dtype=torch.uint8)
    return f"uint{bits}", values, zero_point


def _by_group(each: Tensor, codes: Codes, N: int) -> Tensor:
    """Expand scales or zero points [ceil(N / rows), groups] to [groups, N]."""
    if each.shape[0] == 1:
        return each.t().expand(-1, N)
    rows = codes.block[0]
    each = each.t()
    return each.repeat_interleave(rows, 1)[:, :N] if rows > 1 else each
