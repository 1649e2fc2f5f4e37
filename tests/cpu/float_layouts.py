"""Published FP8 and FP4 layouts in plain arithmetic, without the engine's packers and dtypes."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Decode MI300's E4M3: bias 8; the only NaN has the bits of negative zero."""
    if byte == 0x80:
        return math.nan
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-10
    return sign * (8 + mantissa) * 2.0 ** (exponent - 11)


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def e2m1(code: int) -> float:
    """Decode 4 bits: sign, 2 exponent bits, 1 mantissa bit."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


@functools.cache
def numbers_of(table: Callable[[int], float], count: int) -> Tensor:
    return torch.tensor([table(code) for code in range(count)], dtype=torch.float64)


def nearest(numbers: Tensor, table: Callable[[int], float], count: int) -> Tensor:
    """Return the code (uint8) whose number is nearest to each of `numbers`."""
    values = numbers_of(table, count)
    order = values.nan_to_num(torch.inf).argsort(stable=True)
    values = values[order][: int((~values.isnan()).sum())]
    at = torch.bucketize(numbers.double().contiguous(), (values[1:] + values[:-1]) / 2)
    return order[at].to(torch.uint8)


def groups(weight: Tensor, columns: int) -> Tensor:
    return weight.abs().unflatten(1, (-1, columns)).amax(2).double()


def spread(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(columns, 1)


def nibbles(codes: Tensor) -> Tensor:
    return codes[:, 0::2] + 16 * codes[:, 1::2]


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """A stored layout.

    `write` maps a matrix [N, K] to tensors by suffix and the fp32 matrix that they represent.
    `read` returns the number at (tensors, row, column).
    """

    write: Callable[[Tensor], tuple[Tensors, Tensor]]
    read: Callable[[Tensors, int, int], float]


def _bits(tensor: Tensor, *at: int) -> int:
    return int(tensor.view(torch.uint8)[at])


def _numbers(codes: Tensor, table: Callable[[int], float]) -> Tensor:
    return numbers_of(table, 256 if table is not e2m1 else 16).float()[codes.long()]


# --- FP4 ------------------------------------------------------------------------------------------


def _nvfp4(values: str, whole: str, *, divides: bool, activation: str | None) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        total = (weight.abs().max().double() / (6 * 448)).float()
        scale = nearest(groups(weight, 16) / 6 / total, e4m3, 127)
        step = spread(_numbers(scale, e4m3), 16)
        codes = nearest(weight / (step * total).clamp_min(1e-30), e2m1, 16)
        tensors = {
            values: nibbles(codes),
            "weight_scale": scale.view(torch.float8_e4m3fn),
            whole: (1 / total).reshape(1) if divides else total,
        }
        if activation:
            tensors[activation] = torch.tensor([37.5] if divides else 0.0123)
        total = 1 / tensors[whole].reshape(()) if divides else total
        return tensors, _numbers(codes, e2m1) * step * total

    def read(tensors: Tensors, n: int, k: int) -> float:
        code = _bits(tensors[values], n, k // 2) >> 4 * (k % 2) & 15
        total = float(tensors[whole])
        number = e2m1(code) * e4m3(_bits(tensors["weight_scale"], n, k // 16))
        return number / total if divides else number * total

    return Layout(write, read)


def _mxfp4(values: str) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        exponent = torch.log2(groups(weight, 32) / 6).ceil()
        step = spread(2**exponent, 32)
        codes = nearest(weight / step, e2m1, 16)
        tensors = {values: nibbles(codes), "weight_scale": (exponent + 127).to(torch.uint8)}
        return tensors, _numbers(codes, e2m1) * step.float()

    def read(tensors: Tensors, n: int, k: int) -> float:
        code = _bits(tensors[values], n, k // 2) >> 4 * (k % 2) & 15
        return e2m1(code) * e8m0(_bits(tensors["weight_scale"], n, k // 32))

    return Layout(write, read)


# --- FP8 ------------------------------------------------------------------------------------------


def _mxfp8(scale: str) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        exponent = torch.log2(groups(weight, 32) / 448).ceil()
        step = spread(2**exponent, 32)
        codes = nearest(weight / step, e4m3, 256)
        values = codes.view(torch.float8_e4m3fn)
        tensors = {"weight": values, scale: (exponent + 127).to(torch.uint8)}
        return tensors, _numbers(codes, e4m3) * step.float()

    def read(tensors: Tensors, n: int, k: int) -> float:
        return e4m3(_bits(tensors["weight"], n, k)) * e8m0(_bits(tensors[scale], n, k // 32))

    return Layout(write, read)


def _fp8(
    block: tuple[int, int],
    *,
    scale: str = "weight_scale",
    shape: Callable[[Tensor], Tensor] = lambda scale: scale,
    fnuz: bool = False,
    dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Layout:
    """FP8 with a scale per `block` (rows, columns); 0 means all."""
    number, largest = (e4m3_fnuz, 240.0) if fnuz else (e4m3, 448.0)
    dtype = dtype or (torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)

    def sizes(weight: Tensor) -> tuple[int, int]:
        return block[0] or weight.shape[0], block[1] or weight.shape[1]

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = sizes(weight)
        grid = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes, plain = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(weight.shape)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                grid[i, j] = weight[part].abs().max() / largest
                codes[part] = nearest(weight[part] / grid[i, j], number, 256)
                plain[part] = _numbers(codes[part], number) * grid[i, j]
        tensors = {"weight": codes.view(dtype), scale: shape(grid)}
        if activation:
            tensors[activation] = torch.tensor(0.0123)
        return tensors, plain

    def read(tensors: Tensors, n: int, k: int) -> float:
        rows, columns = sizes(tensors["weight"])
        grid = tensors[scale].reshape(-1, -(-tensors["weight"].shape[1] // columns))
        return number(_bits(tensors["weight"], n, k)) * float(grid[n // rows, k // columns])

    return Layout(write, read)


def _number(scale: Tensor) -> Tensor:
    return scale.reshape(())


def _row(scale: Tensor) -> Tensor:
    return scale.reshape(-1)


_ALL, _EACH_ROW, _BLOCK = (0, 0), (1, 0), (128, 128)
LAYOUTS = {
    "compressed-mxfp4": _mxfp4("weight_packed"),
    "compressed-mxfp8": _mxfp8("weight_scale"),
    "compressed-nvfp4": _nvfp4(
        "weight_packed", "weight_global_scale", divides=True, activation="input_global_scale"
    ),
    "compressed-fp8-block": _fp8(_BLOCK),
    "compressed-fp8-channel": _fp8(_EACH_ROW),
    "compressed-fp8-static": _fp8(_ALL, shape=_row, activation="input_scale"),
    "fp8-block": _fp8(_BLOCK, scale="weight_scale_inv"),
    "fp8-fnuz": _fp8(_BLOCK, scale="weight_scale_inv", fnuz=True),
    "fp8-fnuz-bits": _fp8(
        _BLOCK, scale="weight_scale_inv", fnuz=True, dtype=torch.float8_e4m3fn
    ),
    "fp8-tensor": _fp8(_ALL, shape=_number),
    "fp8-static": _fp8(_ALL, shape=_number, activation="input_scale"),
    "modelopt-fp8": _fp8(_ALL, shape=_number, activation="input_scale"),
    "modelopt-fp8-block": _fp8(_BLOCK, shape=lambda scale: scale[:, None, :, None]),
    "modelopt-fp8-channel": _fp8(_EACH_ROW, shape=_row),
    "modelopt-mxfp8": _mxfp8("weight_scale"),
    "modelopt-nvfp4": _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale"),
    "modelopt-w4a16": _nvfp4("weight", "weight_scale_2", divides=False, activation=None),
    "mxfp8": _mxfp8("weight_scale_inv"),
    "quark-fp8-channel": _fp8(_EACH_ROW, shape=_row),
    "quark-mxfp4": _mxfp4("weight"),
    "quark-nvfp4": _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale_2"),
}  # fmt: skip

# --- their descriptions ---------------------------------------------------------------------------

_IGNORED = ["lm_head", "model.embed_tokens", "*.block_sparse_moe.gate"]


def _modelopt(algorithm: str, left_out: str) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.43.0"}, "quant_method": "modelopt",
        "quant_algo": algorithm, "kv_cache_scheme": None, "ignore": [*_IGNORED, f"{left_out}*"],
    }  # fmt: skip


def modelopt_file(algorithm: str, left_out: str) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.43.0"},
        "quantization": {
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16,
            "exclude_modules": [*_IGNORED, left_out],
        },
    }  # fmt: skip


def mixed(modules: Sequence[str]) -> dict[str, Any]:
    """Describe M3's NVFP4 under its wrapper's names: attention in MXFP8, experts in NVFP4."""
    algorithms = {
        f"language_model.{module}": {"quant_algo": "NVFP4", "group_size": 16}
        if ".experts." in module
        else {"quant_algo": "MXFP8"}
        for module in modules
    }
    return {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "vision_tower"], "quantized_layers": algorithms,
    }  # fmt: skip


def _compressed(stored: str, left_out: str, weights: dict[str, Any], inputs: Any) -> dict[str, Any]:
    common = {"dynamic": False, "symmetric": True, "type": "float", "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": {**common, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$", left_out], "quantization_status": "compressed",
    }  # fmt: skip


def _quark(weight: Any, left_out: str, inputs: Any = None) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "global_quant_config": layer, "layer_quant_config": {},
        "layer_type_quant_config": {}, "exclude": ["*lm_head", "*.gate", left_out],
        "export": {"kv_cache_group": [], "pack_method": "reorder"}, "version": "0.12",
    }  # fmt: skip


def descriptions(left_out: str) -> dict[str, dict[str, Any]]:
    static = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"}
    local = {"dynamic": "local", "num_bits": 4, "type": "float", "group_size": 16}
    fp8 = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"],
        "modules_to_not_convert": ["gate", left_out],
    }  # fmt: skip
    fnuz = {**fp8, "fmt": "float8_e4m3fnuz"}
    tensor = {**fp8, "weight_block_size": None, "activation_scheme": "dynamic"}
    mx = {
        "dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "ch_axis": -1,
        "group_size": 32, "scale_format": "e8m0", "symmetric": None,
    }  # fmt: skip
    nv = [{**mx, "group_size": 16}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]
    rows = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
    return {
        "compressed-mxfp4": _compressed(
            "mxfp4-pack-quantized", left_out,
            {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            None,
        ),
        "compressed-mxfp8": _compressed(
            "mxfp8-quantized", left_out,
            {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            None,
        ),
        "compressed-nvfp4": _compressed(
            "nvfp4-pack-quantized", left_out,
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, local,
        ),
        "compressed-fp8-block": _compressed(
            "float-quantized", left_out,
            {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}, None,
        ),
        "compressed-fp8-channel": _compressed(
            "float-quantized", left_out, {"num_bits": 8, "strategy": "channel"},
            {**static, "strategy": "token", "dynamic": True},
        ),
        "compressed-fp8-static": _compressed(
            "float-quantized", left_out, {"num_bits": 8, "strategy": "tensor"}, static
        ),
        "fp8-block": fp8,
        "fp8-fnuz": fnuz,
        "fp8-fnuz-bits": fnuz,
        "fp8-tensor": tensor,
        "fp8-static": {**tensor, "activation_scheme": "static"},
        "modelopt-fp8": _modelopt("FP8", left_out),
        "modelopt-fp8-block": _modelopt("fp8_pb_wo", left_out),
        "modelopt-fp8-channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", left_out),
        "modelopt-mxfp8": _modelopt("MXFP8", left_out),
        "modelopt-w4a16": _modelopt("W4A16_NVFP4", left_out),
        "mxfp8": {
            "quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
            "ignored_layers": ["lm_head", "gate", left_out],
        },
        "quark-fp8-channel": _quark(rows, left_out, {**rows, "is_dynamic": True}),
        "quark-mxfp4": _quark(mx, left_out, {**mx, "is_dynamic": True}),
        "quark-nvfp4": _quark(nv, left_out, [{**mx, "is_dynamic": True}, nv[1]]),
    }  # fmt: skip
