"""Conversion plans. A plan states how to compute the target's tensors from each weight.

A weight that is already stored in the target's format is copied unchanged.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from negamax.checkpoint.reader import DTYPES, CheckpointReader, TensorEntry
from negamax.convert.source import Source, Weight
from negamax.convert.targets import Target
from negamax.convert.writer import Planned
from negamax.formats.floats import E4M3, E4M3_FNUZ, PLAIN
from negamax.formats.tensor_format import Axis, TensorFormat
from negamax.kernels.quantize.stored import encode
from negamax.quantization.scheme import Scheme


@dataclass(frozen=True)
class Piece:
    """A group of target tensors, which `make` computes together from the result of `read`."""

    slot: str | None  # Slot of the weight; None: every rank stores the whole tensor.
    shape: tuple[int, ...]  # Shape of the weight matrix or vector.
    format: TensorFormat
    tensors: tuple[Planned, ...]  # The tensors that store the weight.
    read: Callable[[CheckpointReader], Any]  # Reads from the checkpoint what `make` converts.
    make: Callable[[Any], Mapping[str, Tensor]]  # Builds `tensors` by name, in any thread.
    source_bytes: int


def pieces(source: Source, layer: int | None, target: Target | None) -> Iterator[Piece]:
    """Yield the pieces of a layer. If `target` is None, every weight is copied unchanged."""
    scheme = None if target is None else target.scheme()
    together: dict[tuple[str, tuple[int, ...]], list[Weight]] = defaultdict(list)
    for weight in source.read_layer(layer):
        stored = weight.format if target is None else _format(weight, scheme)
        is_same = target is None or (stored == weight.format and weight.is_as_described)
        if is_same and (stored is not PLAIN or target is None):
            yield _copy(weight)
        elif stored is PLAIN:
            yield _plain(weight, to_bf16=target is not None and target.description is None)
        elif any(tensor.level == 2 for tensor in stored.tensors):
            together[weight.module.rpartition(".")[0], weight.spec.shape].append(weight)
        else:
            yield _quantized(weight, stored)
    for those in together.values():
        yield from _quantized_together(those, _format(those[0], scheme))
    for entry in source.carried.get(layer, ()):
        yield _carried(entry)


def _format(weight: Weight, scheme: Scheme | None) -> TensorFormat:
    return PLAIN if scheme is None or not weight.is_linear else scheme.format_of(weight.module)


def _carried(entry: TensorEntry) -> Piece:
    planned = Planned(entry.name, DTYPES[entry.dtype], entry.shape)
    read, num_bytes = lambda reader: {entry.name: reader.read(entry)}, entry.num_bytes
    return Piece(None, entry.shape, PLAIN, (planned,), read, lambda read: read, num_bytes)


def _make_piece(
    weight: Weight,
    stored: TensorFormat,
    planned: Iterable[Planned],
    make: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Piece:
    """Make the piece of one weight. `make` returns the format's tensors by name."""

    def name(read: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {f"{weight.module}.{name}": tensor for name, tensor in make(read).items()}

    shape, num_bytes = weight.spec.shape, weight.move.num_bytes
    return Piece(weight.name, shape, stored, tuple(planned), weight.read, name, num_bytes)


def _copy(weight: Weight) -> Piece:
    if weight.format is PLAIN:
        return _plain(weight, to_bf16=False)
    planned = (
        Planned(f"{weight.module}.{one.name}", DTYPES[found.entry.dtype], one.shape(weight.shape))
        for one, found in weight.move.tensors
    )
    return _make_piece(weight, weight.format, planned, lambda read: read)


def _plain(weight: Weight, *, to_bf16: bool) -> Piece:
    """Make the piece of a weight that the target stores unquantized.

    A quantized weight becomes bf16. An unquantized weight keeps its dtype. With `to_bf16`, an
    unquantized weight becomes bf16 unless the model needs fp32.
    """
    entry = weight.move.entries[0]
    narrowed = weight.format is not PLAIN or (to_bf16 and weight.spec.dtype is None)
    dtype = torch.bfloat16 if narrowed else DTYPES[entry.dtype]

    def make(read: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        plain = read[PLAIN.values.name] if weight.format is PLAIN else weight.dequantize(read)
        return {weight.name: plain.to(dtype)}

    planned = Planned(weight.name, dtype, weight.spec.shape)
    return replace(_make_piece(weight, PLAIN, [planned], make), make=make)


def _quantized(weight: Weight, stored: TensorFormat) -> Piece:
    is_e4m3 = is_other_e4m3(weight.format, stored) or weight.format == stored

    def make(read: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return _other_e4m3(read, stored) if is_e4m3 else encode(stored, weight.dequantize(read))

    planned = (
        Planned(f"{weight.module}.{tensor.name}", dtype, tensor.shape(weight.shape))
        for tensor, dtype in zip(stored.tensors, _dtypes(stored), strict=True)
    )
    return _make_piece(weight, stored, planned, make)


def is_other_e4m3(one: TensorFormat, other: TensorFormat) -> bool:
    """Return whether the formats differ only in the encoding of E4M3 (OCP or MI300's FNUZ)."""
    forms = {each.values.dtypes[0] for each in (one, other)}
    dims, others = ([(t.name, t.dims) for t in each.tensors if t.is_kept] for each in (one, other))
    return forms == {E4M3, E4M3_FNUZ} and dims == others


def _other_e4m3(read: Mapping[str, Tensor], stored: TensorFormat) -> Mapping[str, Tensor]:
    """Convert E4M3 numbers to the E4M3 encoding of `stored`. The numbers must not be NaN.

    The value of a byte in FNUZ is half of its value in OCP. The byte 0x80 is NaN in FNUZ and -0 in
    OCP. The byte 0x7F is 240 in FNUZ and NaN in OCP.
    """
    values, scale = (read[tensor.name] for tensor in stored.tensors[:2])
    bits, dtype = values.view(torch.uint8), getattr(torch, stored.values.dtypes[0])
    made: tuple[Tensor, Tensor]
    # config.json may declare FNUZ although the file declares E4M3FN, so both dtypes are checked
    if dtype is torch.float8_e4m3fnuz and values.dtype is dtype:
        made = values, scale
    elif dtype is torch.float8_e4m3fnuz:
        made = bits.masked_fill(bits == 0x80, 0).view(dtype), scale * 2
    elif (bits & 0x7F == 0x7F).any():  # bits 0x7F would be NaN; `.to` may round values below 2^-7
        made = values.view(torch.float8_e4m3fnuz).float().to(dtype), scale
    else:
        made = bits.view(dtype), scale / 2
    return {tensor.name: part for tensor, part in zip(stored.tensors, made, strict=True)}


def read_together(
    weights: Sequence[Weight], reader: CheckpointReader
) -> list[Mapping[str, Tensor]]:
    return [weight.read(reader) for weight in weights]


def _quantized_together(weights: list[Weight], stored: TensorFormat) -> Iterator[Piece]:
    """Yield the pieces of an expert's gate and up matrices, which share one global scale.

    Engines multiply gate and up as one matrix. For up, vLLM uses the global scale of gate.
    """
    for weight in weights:
        make = partial(_with_common_scale, weights, weight, stored)
        yield replace(_quantized(weight, stored), read=partial(read_together, weights), make=make)


def _with_common_scale(
    weights: list[Weight], weight: Weight, stored: TensorFormat, read: list[Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Quantize `weight` with an extra row that has the largest value of all `weights`."""
    plain = [one.dequantize(tensors) for one, tensors in zip(weights, read, strict=True)]
    rows, columns = weight.shape
    below = torch.zeros(1, columns)
    below[0, 0] = max(one.abs().max() for one in plain)
    made = encode(stored, torch.cat((plain[weights.index(weight)], below)))
    region = range(rows), range(columns)
    return {
        f"{weight.module}.{tensor.name}": made[tensor.name][
            tuple(slice(part.start, part.stop) for part in tensor.part(region))
        ]
        for tensor in stored.tensors
    }


@cache
def _dtypes(stored: TensorFormat) -> tuple[torch.dtype, ...]:
    made = encode(stored, torch.zeros(stored.unit(Axis.ROWS), stored.unit(Axis.COLUMNS)))
    return tuple(made[tensor.name].dtype for tensor in stored.tensors)
