"""Table of stored formats: how a tool writes and describes each, and which matrix it represents.

The writers store one number and one bit field at a time, as the documentation of the layouts says.
The writers use no packers or dtypes of the product. `EXPORTS` are files of tools that load
transformers 5.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import quantization_descriptions as described

Tensors = dict[str, Tensor]
Stored = tuple[Tensors, Tensor]  # tensors by suffix, and the fp32 matrix that they represent

LEFT_OUT = "model.layers.1.self_attn.o_proj"  # every checkpoint stores this module unquantized
_GATES = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
_PLAIN = ["lm_head", "re:.*gate$", LEFT_OUT]
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class StoredFormat:
    """Describe a checkpoint format.

    `store` maps (module, matrix [N, K]) to `Stored`. `describe` maps (quantized modules, all
    tensors) to the description, which is in `file` or else in config.json. `with_head` also
    quantizes the head. `renames_experts` uses the names of transformers.
    """

    store: Callable[[str, Tensor], Stored]
    describe: Callable[[Sequence[str], Mapping[str, Tensor]], dict[str, Any]] = lambda *_: {}
    file: str = ""
    with_head: bool = False
    renames_experts: bool = False


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], stored: StoredFormat
) -> Tensors:
    """Write a checkpoint. Return the tensors that the files represent."""
    written, plain, modules = {}, dict(tensors), []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_head = module == "lm_head" and stored.with_head
        if not (is_matrix(name) or is_head) or module == LEFT_OUT:
            written[name] = tensor
            continue
        parts, plain[name] = stored.store(module, tensor.float())
        written |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        modules.append(module)
    description = stored.describe(modules, written)
    in_config = description and not stored.file
    whole = {**config, "quantization_config": description} if in_config else config
    (folder / "config.json").write_text(json.dumps(whole))
    if stored.file:
        (folder / stored.file).write_text(json.dumps(description))
    if stored.renames_experts:
        pattern = re.compile(r"(?<=\d\.)w[123](?=\.)")
        written = {pattern.sub(lambda m: _PROJECTIONS[m[0]], n): t for n, t in written.items()}
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


def sample(formats: Iterable[str], first: int, step: int) -> list[Any]:
    """Return test parameters; the gate runs every `step`-th format, `make test-full` all others."""
    return [
        pytest.param(name, id=name, marks=() if number % step == first else pytest.mark.full)
        for number, name in enumerate(formats)
    ]


def in_full(dtype: torch.dtype) -> StoredFormat:
    def store(module: str, matrix: Tensor) -> Stored:
        return {"weight": matrix.to(dtype)}, matrix.to(dtype).float()

    return StoredFormat(store)


def _of(
    store: Callable[[Tensor], Stored], description: dict[str, Any], **more: Any
) -> StoredFormat:
    return StoredFormat(lambda _, matrix: store(matrix), lambda *_: description, **more)


# --- integers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded:
    """Hold unsigned codes [N, K] and zeros [N, G]; matrix = (codes - zeros) * the group's scale."""

    codes: Tensor
    zeros: Tensor
    scale: Tensor  # [N, G]
    group_of: Tensor  # [K]
    matrix: Tensor


def rounded(
    matrix: Tensor,
    bits: int,
    size: int,
    *,
    symmetric: bool,
    dtype: torch.dtype,
    order: Tensor | None = None,
) -> Rounded:
    """Round to the nearest of 2^bits numbers, in groups of `size` columns (-1: all columns).

    `order` lists the columns in the order in which they fill the groups.
    """
    height, width = matrix.shape
    size = width if size == -1 else size
    group_of = torch.zeros(width, dtype=torch.int64)
    group_of[torch.arange(width) if order is None else order] = torch.arange(width) // size
    most, count = 2**bits - 1, -(-width // size)
    lower, upper = torch.zeros(2, height, count)
    for group in range(count):
        lower[:, group] = matrix[:, group_of == group].amin(1).clamp(max=0)
        upper[:, group] = matrix[:, group_of == group].amax(1).clamp(min=0)
    largest = torch.maximum(-lower, upper) / (2 ** (bits - 1) - 1)
    scale = (largest if symmetric else (upper - lower) / most).to(dtype)
    steps = scale.float()
    zeros = torch.full((height, count), 2 ** (bits - 1))
    if not symmetric:  # Some formats cannot store a zero point of 0.
        zeros = (-lower / steps).round().clamp(1, most).long()
    codes = (matrix / steps[:, group_of]).round() + zeros[:, group_of]
    codes = codes.clamp(0, most).long()
    numbers = (codes - zeros[:, group_of]) * steps[:, group_of]
    return Rounded(codes, zeros, scale, group_of.int(), numbers)


def words_of_rows(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers [A, B] into words [A bits / 32, B]; adjacent rows share a word."""
    per_word = 32 // bits
    padding = (0, 0, 0, -len(numbers) % per_word)
    filled = torch.nn.functional.pad(numbers.long(), padding).unflatten(0, (-1, per_word))
    words = (filled << bits * torch.arange(per_word)[:, None]).sum(1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def words_of_columns(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers [A, B] into words [A, B bits / 32]; adjacent columns share a word."""
    return words_of_rows(numbers.T, bits).T.contiguous()


def shuffled(width: int) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(width))


AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each 4-bit field of a word


def awq_words(numbers: Tensor) -> Tensor:
    """Pack numbers [A, N] into words [A, N / 8] in AWQ's column order."""
    return words_of_columns(numbers.unflatten(1, (-1, 8))[:, :, AWQ_COLUMNS].flatten(1), 4)


def store_awq(matrix: Tensor, size: int) -> Stored:
    made = rounded(matrix, 4, size, symmetric=False, dtype=torch.float16)
    qweight, qzeros = awq_words(made.codes.T), awq_words(made.zeros.T)
    return {"qweight": qweight, "qzeros": qzeros, "scales": made.scale.T}, made.matrix


def awq(size: int) -> StoredFormat:
    description = described.awq(["gate", "lm_head", LEFT_OUT], size)
    return _of(lambda matrix: store_awq(matrix, size), description)


def store_gptq(
    matrix: Tensor, *, bits: int, size: int, symmetric: bool, desc_act: bool, version: int
) -> Stored:
    order = shuffled(matrix.shape[1]) if desc_act else None
    made = rounded(matrix, bits, size, symmetric=symmetric, dtype=torch.float16, order=order)
    parts = {
        "qweight": words_of_rows(made.codes.T, bits),
        "qzeros": words_of_columns(made.zeros.T - (1 if version == 1 else 0), bits),
        "scales": made.scale.T, "g_idx": made.group_of,
    }  # fmt: skip
    return parts, made.matrix


def gptq(
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = True,
    desc_act: bool = False,
    version: int = 1,
    lm_head: bool = False,
) -> StoredFormat:
    description = described.gptq(
        bits=bits, group_size=size, sym=symmetric, desc_act=desc_act, lm_head=lm_head,
        checkpoint_format="gptq" if version == 1 else "gptq_v2",
        dynamic={r"-:.*layers\.1\.self_attn\.o_proj": {}},
    )  # fmt: skip

    def store(matrix: Tensor) -> Stored:
        return store_gptq(
            matrix, bits=bits, size=size, symmetric=symmetric, desc_act=desc_act, version=version
        )

    return _of(store, description, with_head=lm_head)


def packed(
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = True,
    actorder: str | None = None,
    description: dict[str, Any] | None = None,
    **more: Any,
) -> StoredFormat:
    """Return the format pack-quantized, which stores number + 2^(bits - 1)."""
    weights = {
        "num_bits": bits, "symmetric": symmetric, "actorder": actorder,
        "strategy": "channel" if size == -1 else "group",
        "group_size": None if size == -1 else size,
    }  # fmt: skip
    usual = described.compressed("pack-quantized", described.group(weights), ignore=_PLAIN)

    def store(matrix: Tensor) -> Stored:
        order = shuffled(matrix.shape[1]) if actorder else None
        made = rounded(matrix, bits, size, symmetric=symmetric, dtype=torch.bfloat16, order=order)
        parts = {
            "weight_packed": words_of_columns(made.codes, bits), "weight_scale": made.scale,
            "weight_shape": torch.tensor(matrix.shape),
        }  # fmt: skip
        if not symmetric:
            parts["weight_zero_point"] = words_of_rows(made.zeros, bits)
        if actorder:
            parts["weight_g_idx"] = made.group_of
        return parts, made.matrix

    return _of(store, description or usual, **more)


def store_int8(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Stored:
    scale = (matrix.abs().amax(1, keepdim=True) / 127).to(dtype)
    codes = (matrix / scale.float()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()


def store_int8_rows(matrix: Tensor) -> Stored:
    parts, plain = store_int8(matrix)
    return {**parts, "weight_scale": parts["weight_scale"][:, 0]}, plain


def store_int8_whole(matrix: Tensor) -> Stored:
    scale = matrix.abs().max() / 127
    values = (matrix / scale).round().to(torch.int8)
    zero = torch.tensor(0, dtype=torch.int8)
    parts = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    return parts, values.float() * scale


def store_int4(matrix: Tensor) -> Stored:
    made = rounded(matrix, 4, 32, symmetric=True, dtype=torch.bfloat16)
    values = (made.codes - made.zeros[:, made.group_of]).to(torch.int8)
    return {"weight": values, "weight_scale": made.scale}, made.matrix


def int_quantized() -> StoredFormat:
    int8 = described.group(described.INT8_ROWS, inputs=described.TOKENS)
    description = described.compressed("int-quantized", int8, ignore=_PLAIN)
    return _of(lambda matrix: store_int8(matrix, torch.bfloat16), description)


def auto_round(packing: str, *, symmetric: bool, bits: int = 4) -> StoredFormat:
    """Return AutoRound's format. The experts' w2 has 8 bits (AWQ packing: other groups)."""
    other = {"group_size": 16} if "awq" in packing else {"bits": 8}
    left_out = {"bits": 16, "data_type": "fp"}
    description = described.auto_round(
        packing, bits=bits, group_size=32, sym=symmetric,
        extra_config={LEFT_OUT: left_out, r".*experts\.\d+\.w2": other, "lm_head": {"bits": 16}},
    )  # fmt: skip

    def store(module: str, matrix: Tensor) -> Stored:
        changed = other if module.endswith("w2") else {}
        size = changed.get("group_size", 32)
        if "awq" in packing:
            return store_awq(matrix, size)
        parts, plain = store_gptq(
            matrix, bits=changed.get("bits", bits), size=size, symmetric=symmetric,
            desc_act=False, version=1 if "auto_gptq" in packing else 2,
        )  # fmt: skip
        del parts["g_idx"]
        return parts, plain

    return StoredFormat(store, lambda *_: description)


def quark_int8(*, is_static: bool) -> StoredFormat:
    weight = described.QUARK_INT8_ROWS
    inputs = {**weight, "qscheme": "per_token", "ch_axis": None, "is_dynamic": True}
    if is_static:
        inputs |= {"qscheme": "per_tensor", "is_dynamic": False}

    def store(matrix: Tensor) -> Stored:
        parts, plain = store_int8_rows(matrix)
        parts["weight_zero_point"] = torch.zeros(matrix.shape[0], dtype=torch.int8)
        if is_static:
            parts["input_scale"] = torch.tensor(0.0371)
        return parts, plain

    return _of(store, described.quark(weight, inputs, exclude=["lm_head", LEFT_OUT]))


def _modelslim(kind: str, store: Callable[[str, Tensor], Stored]) -> StoredFormat:
    def describe(modules: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        types = {name: kind if name.rpartition(".")[0] in modules else "FLOAT" for name in tensors}
        return described.modelslim(types, kind)

    return StoredFormat(store, describe, "quant_model_description.json")


def modelslim(
    kind: str, *, deq_scale: torch.dtype = torch.float32, weight_scale: bool = True
) -> StoredFormat:
    """Return a format of int8 rows.

    Static formats add scales for activations: (round(x / input_scale + input_offset) W +
    quant_bias) * deq_scale. A deq_scale in int64 holds the bits of an fp32 number.
    """

    def store(module: str, matrix: Tensor) -> Stored:
        parts, plain = store_int8(matrix)
        parts["weight_offset"] = torch.zeros_like(parts["weight_scale"])
        if kind not in ("W8A8", "W8A8_MIX"):
            return parts, plain
        input_scale, offset = torch.tensor([0.0371]), -7
        codes, together = parts["weight"].long(), input_scale * parts["weight_scale"][:, 0]
        is_bits = deq_scale is torch.int64
        parts["deq_scale"] = together.view(torch.int32).long() if is_bits else together
        parts["quant_bias"] = (-offset * codes.sum(1)).int()
        parts |= {"input_scale": input_scale, "input_offset": torch.tensor([float(offset)])}
        if not weight_scale:
            del parts["weight_scale"], parts["weight_offset"]
            plain = codes * (together / input_scale)[:, None]
        return parts, plain

    return _modelslim(kind, store)


def modelslim_int4() -> StoredFormat:
    """Return W4A8_DYNAMIC: rows of two's complement int4, even rows in the low half of a byte."""

    def store(module: str, matrix: Tensor) -> Stored:
        made = rounded(matrix, 4, -1, symmetric=True, dtype=torch.float32)
        numbers = (made.codes - made.zeros) & 15
        columns = 16 if module.endswith(("o_proj", "w2")) else 1
        pairs = (numbers[0::2] | numbers[1::2] << 4).to(torch.uint8)
        return {
            "weight": pairs.view(torch.int8), "weight_scale": made.scale,
            "weight_offset": torch.zeros_like(made.scale),
            "scale_bias": torch.zeros(matrix.shape[0], columns),
        }, made.matrix  # fmt: skip

    return _modelslim("W4A8_DYNAMIC", store)


# --- numbers of FP8 and FP4 -----------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """Decode an OCP E4M3 byte: sign, 4 exponent bits (bias 7), 3 mantissa bits."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_fnuz(byte: int) -> float:
    """Decode MI300's E4M3 with bias 8, whose only NaN has the bits of negative zero."""
    if byte == 0x80:
        return math.nan
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-10
    return sign * (8 + mantissa) * 2.0 ** (exponent - 11)


def e2m1(code: int) -> float:
    """Decode 4 bits: sign, 2 exponent bits, 1 mantissa bit."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


@functools.cache
def numbers_of(table: Callable[[int], float], count: int) -> Tensor:
    return torch.tensor([table(code) for code in range(count)], dtype=torch.float64)


def nearest(numbers: Tensor, table: Callable[[int], float], count: int) -> Tensor:
    """Return the uint8 code whose decoded value is nearest, for each of `numbers`."""
    values = numbers_of(table, count)
    order = values.nan_to_num(torch.inf).argsort(stable=True)
    values = values[order][: int((~values.isnan()).sum())]
    at = torch.bucketize(numbers.double().contiguous(), (values[1:] + values[:-1]) / 2)
    return order[at].to(torch.uint8)


def _numbers(codes: Tensor, table: Callable[[int], float]) -> Tensor:
    return numbers_of(table, 256 if table is not e2m1 else 16).float()[codes.long()]


def _groups(weight: Tensor, columns: int) -> Tensor:
    return weight.abs().unflatten(1, (-1, columns)).amax(2).double()


def _nibbles(codes: Tensor) -> Tensor:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


# --- layouts of FP8 and FP4 -----------------------------------------------------------------------

FloatLayout = Callable[[Tensor], Stored]


def _nvfp4(values: str, whole: str, *, divides: bool, activation: str | None) -> FloatLayout:
    def write(weight: Tensor) -> Stored:
        total = (weight.abs().max().double() / (6 * 448)).float()
        scale = nearest(_groups(weight, 16) / 6 / total, e4m3, 127)
        step = _numbers(scale, e4m3).repeat_interleave(16, 1)
        codes = nearest(weight / (step * total).clamp_min(1e-30), e2m1, 16)
        tensors = {
            values: _nibbles(codes), "weight_scale": scale.view(torch.float8_e4m3fn),
            whole: (1 / total).reshape(1) if divides else total,
        }  # fmt: skip
        if activation:
            tensors[activation] = torch.tensor([37.5] if divides else 0.0123)
        total = 1 / tensors[whole].reshape(()) if divides else total
        return tensors, _numbers(codes, e2m1) * step * total

    return write


def _mx(values: str, bits: int, scale: str = "weight_scale") -> FloatLayout:
    """Return the MX layout: 32 columns share a power of two, stored as its exponent + 127."""
    table, largest = (e2m1, 6) if bits == 4 else (e4m3, 448)

    def write(weight: Tensor) -> Stored:
        exponent = torch.log2(_groups(weight, 32) / largest).ceil()
        step = (2**exponent).repeat_interleave(32, 1)
        codes = nearest(weight / step, table, 2**bits)
        stored = _nibbles(codes) if bits == 4 else codes.view(torch.float8_e4m3fn)
        tensors = {values: stored, scale: (exponent + 127).to(torch.uint8)}
        return tensors, _numbers(codes, table) * step.float()

    return write


def _fp8(
    block: tuple[int, int],
    *,
    scale: str = "weight_scale",
    shape: Callable[[Tensor], Tensor] = lambda scale: scale,
    fnuz: bool = False,
    dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> FloatLayout:
    """Return the FP8 layout with one scale per `block` (rows, columns); 0 means all."""
    number, largest = (e4m3_fnuz, 240.0) if fnuz else (e4m3, 448.0)
    dtype = dtype or (torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)

    def write(weight: Tensor) -> Stored:
        n, k = weight.shape
        rows, columns = block[0] or n, block[1] or k
        padded = torch.nn.functional.pad(weight.abs(), (0, -k % columns, 0, -n % rows))
        grid = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)) / largest
        step = grid.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes = nearest(weight / step, number, 256)
        tensors = {"weight": codes.view(dtype), scale: shape(grid)}
        if activation:
            tensors[activation] = torch.tensor(0.0123)
        return tensors, _numbers(codes, number) * step

    return write


def _number(scale: Tensor) -> Tensor:
    return scale.reshape(())


def _row(scale: Tensor) -> Tensor:
    return scale.reshape(-1)


_ALL, _EACH_ROW, _BLOCK = (0, 0), (1, 0), (128, 128)
_FNUZ = _fp8(_BLOCK, scale="weight_scale_inv", fnuz=True)
_FP8_BLOCK = _fp8(_BLOCK, scale="weight_scale_inv")
_FP8_CHANNEL = _fp8(_EACH_ROW)
_FP8_ROW = _fp8(_EACH_ROW, shape=_row)
_FP8_STATIC = _fp8(_ALL, shape=_number, activation="input_scale")
_MXFP4, _MXFP4_PACKED = _mx("weight", 4), _mx("weight_packed", 4)
_MXFP8 = _mx("weight", 8)
_NVFP4 = _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale")
_NVFP4_PACKED = _nvfp4(
    "weight_packed", "weight_global_scale", divides=True, activation="input_global_scale"
)


def _compressed(layout: FloatLayout, stored: str, weights: Any, inputs: Any = None) -> StoredFormat:
    group = described.group(weights, inputs=inputs)
    return _of(layout, described.compressed(stored, group, ignore=_PLAIN))


def _modelopt(layout: FloatLayout, algorithm: str) -> StoredFormat:
    ignore = ["lm_head", "model.embed_tokens", "*.block_sparse_moe.gate", f"{LEFT_OUT}*"]
    return _of(layout, described.modelopt(algorithm, ignore))


def _quark(layout: FloatLayout, weight: Any, inputs: Any = None, **more: Any) -> StoredFormat:
    exclude = ["*lm_head", "*.gate", LEFT_OUT]
    return _of(layout, described.quark(weight, inputs, exclude=exclude), **more)


def _store_mixed(experts: FloatLayout, others: FloatLayout) -> Callable[[str, Tensor], Stored]:
    return lambda module, matrix: (experts if ".experts." in module else others)(matrix)


def _describe_mixed(modules: Sequence[str], _: object) -> dict[str, Any]:
    """Describe M3's NVFP4 with its wrapper's names: attention in MXFP8, experts in NVFP4."""
    algorithms = {
        f"language_model.{each}": "NVFP4" if ".experts." in each else "MXFP8" for each in modules
    }
    return described.modelopt_mixed(algorithms, ["lm_head", "vision_tower"])


_FP8 = {**described.FP8, "modules_to_not_convert": ["gate", LEFT_OUT, "lm_head"]}
_FP8_MATRIX = {**_FP8, "weight_block_size": None}
_FNUZ_CONFIG = {**_FP8, "fmt": "float8_e4m3fnuz"}
_STATIC = {**described.FP8_TOKENS, "strategy": "tensor", "dynamic": False}
FLOATS: dict[str, StoredFormat] = {
    "compressed-mxfp4": _compressed(_MXFP4_PACKED, "mxfp4-pack-quantized", described.mx(4)),
    "compressed-mxfp8": _compressed(_MXFP8, "mxfp8-quantized", described.mx(8)),
    "compressed-nvfp4": _compressed(
        _NVFP4_PACKED, "nvfp4-pack-quantized", described.NVFP4, described.NVFP4_INPUTS
    ),
    "compressed-fp8-block": _compressed(_fp8(_BLOCK), "float-quantized", described.E4M3_BLOCKS),
    "compressed-fp8-channel": _compressed(
        _FP8_CHANNEL, "float-quantized", described.E4M3_ROWS, described.FP8_TOKENS
    ),
    "compressed-fp8-static": _compressed(
        _fp8(_ALL, shape=_row, activation="input_scale"), "float-quantized",
        {**described.E4M3_ROWS, "strategy": "tensor"}, _STATIC,
    ),
    "fp8-block": _of(_FP8_BLOCK, _FP8),
    "fp8-fnuz": _of(_FNUZ, _FNUZ_CONFIG),
    "fp8-fnuz-bits": _of(
        _fp8(_BLOCK, scale="weight_scale_inv", fnuz=True, dtype=torch.float8_e4m3fn), _FNUZ_CONFIG
    ),
    "fp8-fnuz-dtype": _of(_FNUZ, _FP8),  # only the file headers show that values are FNUZ
    "fp8-tensor": _of(_fp8(_ALL, shape=_number), _FP8_MATRIX),
    "fp8-static": _of(_FP8_STATIC, {**_FP8_MATRIX, "activation_scheme": "static"}),
    "modelopt-fp8": _modelopt(_FP8_STATIC, "FP8"),
    "modelopt-fp8-block": _modelopt(
        _fp8(_BLOCK, shape=lambda scale: scale[:, None, :, None]), "fp8_pb_wo"
    ),
    "modelopt-fp8-channel": _modelopt(_FP8_ROW, "FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt-mxfp8": _modelopt(_MXFP8, "MXFP8"),
    "modelopt-mixed": StoredFormat(_store_mixed(_NVFP4, _MXFP8), _describe_mixed),
    "modelopt-nvfp4": _of(
        _NVFP4, described.modelopt_file(["lm_head", "model.embed_tokens", "*gate", LEFT_OUT]),
        file="hf_quant_config.json",
    ),
    "modelopt-w4a16": _modelopt(
        _nvfp4("weight", "weight_scale_2", divides=False, activation=None), "W4A16_NVFP4"
    ),
    "mxfp8": _of(_mx("weight", 8, "weight_scale_inv"), {
        "quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
        "ignored_layers": ["lm_head", "gate", LEFT_OUT],
    }),
    "minimax-m3.1": StoredFormat(
        _store_mixed(_NVFP4_PACKED, _mx("weight", 8, "weight_scale_inv")),
        lambda *_: {**described.M31, "ignored_layers": ["lm_head", "gate", LEFT_OUT]},
    ),
    "quark-fp8-channel": _quark(
        _FP8_ROW, described.QUARK_E4M3_ROWS, described.dynamic(described.QUARK_E4M3_ROWS)
    ),
    "quark-mxfp4": _quark(_MXFP4, described.QUARK_MXFP4, described.dynamic(described.QUARK_MXFP4)),
    "quark-nvfp4": _quark(
        _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale_2"),
        described.QUARK_NVFP4, [described.dynamic(described.QUARK_MXFP4), described.QUARK_E4M3],
    ),
}  # fmt: skip
FORMATS: dict[str, StoredFormat] = {
    **FLOATS,
    "awq": awq(32),
    "awq-channel": awq(-1),
    "gptq-sym": gptq(),
    "gptq-asym": gptq(symmetric=False),
    "gptq-channel": gptq(size=-1),
    "gptq-8-bits": gptq(bits=8, size=16, symmetric=False),
    "gptq-v2": gptq(symmetric=False, version=2),
    "gptq-head": gptq(lm_head=True),
    "gptq-act-order": gptq(symmetric=False, desc_act=True),
    "packed-int4": packed(),
    "packed-int4-asym": packed(symmetric=False),
    "packed-int4-channel": packed(size=-1, symmetric=False),
    "packed-int4-act-order": packed(actorder="group"),
    "packed-int8": packed(bits=8, size=16),
    "int8": int_quantized(),
    "quark-int8": quark_int8(is_static=False),
    "quark-int8-static": quark_int8(is_static=True),
    "modelslim-dynamic": modelslim("W8A8_DYNAMIC"),
    "modelslim-static": modelslim("W8A8", weight_scale=False),
    "modelslim-static-fp16": modelslim("W8A8", deq_scale=torch.int64, weight_scale=False),
    "modelslim-static-scale": modelslim("W8A8"),
    "modelslim-mix": modelslim("W8A8_MIX", deq_scale=torch.int64),
    "modelslim-int4": modelslim_int4(),
    "auto-round-gptq": auto_round("auto_round:auto_gptq", symmetric=True),
    "auto-round-awq": auto_round("auto_round:auto_awq", symmetric=False),
    "auto-round": auto_round("auto_round", symmetric=False),
    "auto-round-2-bits": auto_round("auto_round:auto_gptq", symmetric=False, bits=2),
}

# --- exports --------------------------------------------------------------------------------------

EXPORT_PLAIN = [*_GATES, "lm_head", LEFT_OUT]


def _bf16_scales(layout: FloatLayout, **activations: float) -> Callable[[Tensor], Stored]:
    """Store the fp32 scales of weights in bf16, and add scales of activations."""

    def store(matrix: Tensor) -> Stored:
        parts, plain = layout(matrix)
        for part, tensor in parts.items():
            if part.startswith("weight_scale") and tensor.dtype is torch.float32:
                parts[part] = tensor.bfloat16()
                growth = parts[part].float() / tensor
                growth = growth.reshape(-1, 1) if growth.dim() < 2 else growth
                for dim, size in enumerate(matrix.shape):
                    if growth.shape[dim] not in (1, size):
                        growth = growth.repeat_interleave(128, dim).narrow(dim, 0, size)
                plain = plain * growth
        return {**parts, **{key: torch.tensor(n) for key, n in activations.items()}}, plain

    return store


def auto_round_floats(data_type: str, bits: int, size: Any, **more: Any) -> dict[str, Any]:
    plain = [r".*model\.layers\.0\.mlp\.gate.*", LEFT_OUT]
    return described.auto_round_floats(data_type, bits, size, plain=plain, **more)


def export_of_modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    ignore = ["lm_head", "model.embed_tokens", *_GATES, f"{LEFT_OUT}*"]
    return described.modelopt(algorithm, ignore, **more)


def export_of_quark(weight: Any, **more: Any) -> dict[str, Any]:
    return described.quark(weight, described.QUARK_E4M3, exclude=EXPORT_PLAIN, **more)


_MIXED = described.compressed(
    "mixed-precision",
    described.group(
        described.NVFP4, targets=["re:.*experts.*(gate|up|down)_proj$"],
        inputs=described.NVFP4_INPUTS, stored="nvfp4-pack-quantized",
    ),
    described.group(
        described.E4M3_ROWS, targets=["re:.*self_attn.(q|k|v|o)_proj$"],
        inputs=described.FP8_TOKENS, stored="float-quantized",
    ),
    ignore=EXPORT_PLAIN,
)  # fmt: skip
_W4AFP8 = described.group({"group_size": 32}, inputs=described.FP8_TOKENS, stored="int-quantized")
_SPIN = described.spin_quant(EXPORT_PLAIN)
_BLOCKS = auto_round_floats(
    "fp", 8, [128, 128], packing_format="auto_round:fp8", activation_scheme="dynamic", fmt="e4m3",
    weight_block_size=[128, 128],
)  # fmt: skip
_COMPRESSED = {"packing_format": "auto_round:llm_compressor"}
# A tool that quantizes without calibration writes this description of an FP8 cache.
_CACHED = {
    "*k_proj": described.quark_layer(
        described.QUARK_MXFP4, described.QUARK_E4M3, described.QUARK_E4M3
    )
}
_EXPORTS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "llm-compressor, W4AFP8": (
        store_int4, described.compressed("int-quantized", _W4AFP8, ignore=EXPORT_PLAIN)
    ),
    "auto-round, FP8 rows": (
        _bf16_scales(_FP8_ROW, input_scale=0.065),
        auto_round_floats(
            "fp", 8, -1, act_dynamic=False, activation_scheme="static", fmt="e4m3",
            packing_format="auto_round:fp8_static", static_kv_dtype="fp8",
        ),
    ),
    "auto-round, FP8 matrices": (
        _bf16_scales(_FP8_STATIC),
        auto_round_floats("fp", 8, 0, activation_scheme="dynamic", fmt="e4m3", act_bits=16),
    ),
    "auto-round, FP8 blocks": (_bf16_scales(_FP8_BLOCK), _BLOCKS),
    "auto-round, as fp8": (
        _bf16_scales(_FP8_BLOCK),
        {**_BLOCKS, "quant_method": "fp8", "modules_to_not_convert": [LEFT_OUT, "gate"]},
    ),
    "auto-round, MXFP4": (_MXFP4_PACKED, auto_round_floats("mx_fp", 4, 32, **_COMPRESSED)),
    "auto-round, MXFP8": (_MXFP8, auto_round_floats("mx_fp_rceil", 8, 32, **_COMPRESSED)),
    "auto-round, NVFP4": (
        _bf16_scales(_NVFP4_PACKED), auto_round_floats("nv_fp", 4, 16, **_COMPRESSED)
    ),
    "modelopt, MXFP4": (_MXFP4, export_of_modelopt("mxfp4")),
    "modelopt, W4A8": (_MXFP4, export_of_modelopt("W4A8_MXFP4_FP8")),
    "modelopt, W8A16": (store_int8_rows, export_of_modelopt("W8A16")),
    "quark, MXFP4 and FP8": (
        _bf16_scales(_MXFP4, input_scale=0.065), export_of_quark(described.QUARK_MXFP4)
    ),
    "quark, INT8": (
        store_int8_whole, export_of_quark({**described.QUARK_E4M3, "dtype": "int8"})
    ),
    "quark, from files": (
        _MXFP4,
        export_of_quark(
            described.QUARK_MXFP4, layer_quant_config=_CACHED, kv_cache_quant_config=_CACHED
        ),
    ),
}  # fmt: skip
EXPORTS: dict[str, StoredFormat] = {
    "llm-compressor, mixed": StoredFormat(
        _store_mixed(_NVFP4_PACKED, _FP8_CHANNEL), lambda *_: _MIXED, renames_experts=True
    ),
    "llm-compressor, SpinQuant": packed(description=_SPIN, renames_experts=True),
    "auto-round, compressed-tensors": packed(
        description={**_SPIN, "transform_config": None, "moe_sparsity_config": None},
        renames_experts=True,
    ),
    **{name: replace(_of(*each), renames_experts=True) for name, each in _EXPORTS.items()},
}
