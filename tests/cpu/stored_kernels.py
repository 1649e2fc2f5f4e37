"""CPU kernels that dequantize any stored format in `prepare`, to test the layouts of GPUs."""

from dataclasses import replace

import torch
from torch import Tensor

from negamax.formats.floats import is_plain, plain
from negamax.formats.platform import CPU
from negamax.formats.readable import reads_packed
from negamax.formats.tensor_format import StoredWeight, TensorFormat
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize.codes import Codes
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.kernels.registry import KernelTable, resolve
from negamax.kernels.weight_only import layout
from negamax.kernels.weight_only.layout import PackedWeight, pack


def unpacked(packed: PackedWeight) -> Tensor:
    own, rows = packed.packing, packed.num_rows
    qweight = packed.qweight.transpose(0, 1) if own.CODES == 2 else packed.qweight
    words = qweight.reshape(rows, -1, 4, 4, 4)  # spans, threads, their words, bytes
    words = (words.long() << torch.arange(0, 32, 8)).sum(-1)
    columns = torch.arange(64 * own.CODES)  # columns of a span
    thread, right = columns % 8 // 2, columns % 2
    if own.CODES == 2:
        word, pair = columns // 32, columns // 8 % 4
        places = torch.tensor([tuple(each) for each in layout.BITS[own.ELEMENT]])[pair]
    else:
        word, pair = columns // 16, columns // 8 % 2
        places = 8 * pair[:, None] + torch.arange(8)
    words = words | words << 32  # rotate
    held = (words[:, :, thread, word] >> 16 * right).int()  # [rows, spans, columns]
    codes = sum((held >> place & 1) << bit for bit, place in enumerate(places.int().unbind(-1)))
    codes = codes.to(torch.uint8).flatten(1)
    assert codes.shape[1] == own.K_PACKED
    scale, zero = torch.ones(1, 1), None
    if own.GROUP:
        scale = _groups(packed.scales, packed)
        if own.SCALE == "e8m0":
            scale = scale.view(torch.float8_e8m0fnu)
        elif own.SCALE == "e5m3":
            scale = (1 + (scale & 7) / 8) * 2.0 ** (scale.float().div(8).floor() - 23)
    if own.ELEMENT == "e4m3":
        codes = codes.view(torch.float8_e4m3fn)
    elif own.ELEMENT == "int8":
        codes = codes.view(torch.int8)
    elif own.ELEMENT != "e2m1" and own.ZEROS:
        zero = _groups(packed.zeros, packed)
    elif own.ELEMENT != "e2m1":
        codes = codes.float() - 8
    numbers = Codes(
        codes, scale, (1, own.GROUP or 1), zero_point=zero, is_e2m1=own.ELEMENT == "e2m1"
    ).dequantize()
    if own.ROW_SCALE:
        numbers = numbers * packed.row_scale[:, None]
    return numbers[:, : own.K]


def _groups(each: Tensor, packed: PackedWeight) -> Tensor:
    groups = each.transpose(0, 1).reshape(packed.num_rows, -1)
    return groups[:, : -(-packed.packing.K_PACKED // packed.packing.GROUP)]


def dequantized(weight: StoredWeight) -> Tensor:
    """Dequantize to [..., rows, columns] fp32, through the weight-only layout if it can be read."""
    lead = weight.values.shape[:-2]
    if reads_packed(weight.format):
        whole = unpacked(pack(weight))
        return whole.view(*lead, -1, whole.shape[1])
    if not lead:
        return dequantize(weight.format, weight.tensors)
    parts = [{name: t[i] for name, t in weight.tensors.items()} for i in range(lead[0])]
    return torch.stack([dequantize(weight.format, part) for part in parts])


def keeping_stored(table: KernelTable) -> KernelTable:
    def stored(kernel: AnyKernel) -> AnyKernel:
        def prepare(*weights: StoredWeight, **numbers: object) -> object:
            return kernel.prepare(*(plain(dequantized(weight)) for weight in weights), **numbers)

        return replace(kernel, prepare=prepare, reads=lambda form: not is_plain(form))

    changed = {op: (*table.candidates[op], stored(table[op])) for op in (LINEAR, EXPERTS)}
    return replace(table, candidates={**table.candidates, **changed})


def random_stored(stored: TensorFormat, shape: tuple[int, int], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if stored.rounding is not None:
        return dict(encode(stored, torch.randn(shape, generator=generator)))
    tensors = {}
    for tensor in stored.tensors:
        if not tensor.is_kept:
            continue
        dtype, size = getattr(torch, tensor.dtypes[0]), tensor.shape(shape)
        if dtype.is_floating_point:
            noise = torch.randn(size, generator=generator)
            noise = noise if tensor is stored.values else 1 + 0.5 * noise.tanh()
            tensors[tensor.name] = noise.to(dtype)
        else:
            bits = torch.iinfo(dtype)
            tensors[tensor.name] = torch.randint(
                bits.min, bits.max + 1, size, dtype=dtype, generator=generator
            )
    return tensors


KEEPING = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
