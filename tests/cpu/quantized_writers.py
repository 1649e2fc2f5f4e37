"""Writers of every checkpoint format, one number and one bit field at a time.

They follow the layouts' documentation and use no packer of the product. `WRITERS` is the table. A
writer stores a matrix as tensors and returns the matrix that these represent.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import float_layouts
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

Matrix = NDArray[Any]
# (stored tensors by their suffixes, the matrix that they represent)
Stored = tuple[dict[str, Tensor], Matrix]

LEFT_OUT = "model.layers.1.self_attn.o_proj"  # plain in every checkpoint


@dataclass(frozen=True)
class Writer:
    """A checkpoint format.

    `store` maps (module, fp32 matrix [N, K]) to `Stored`. `describe` maps (quantized modules, all
    tensors) to the description, in `file` or else in config.json. `with_head`: quantize the head,
    too.
    """

    store: Callable[[str, Matrix], Stored]
    describe: Callable[[Sequence[str], Mapping[str, Tensor]], dict[str, Any]]
    file: str = ""
    with_head: bool = False


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], writer: Writer
) -> dict[str, Tensor]:
    stored, plain, modules = {}, dict(tensors), []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_head = module == "lm_head" and writer.with_head
        if not (is_matrix(name) or is_head) or module == LEFT_OUT:
            stored[name] = tensor
            continue
        parts, matrix = writer.store(module, tensor.float().numpy())
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        plain[name] = torch.from_numpy(matrix.astype(np.float32))
        modules.append(module)
    description = writer.describe(modules, stored)
    whole = dict(config) if writer.file else {**config, "quantization_config": description}
    (folder / "config.json").write_text(json.dumps(whole))
    if writer.file:
        (folder / writer.file).write_text(json.dumps(description))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


def stored_as(numbers: Matrix, dtype: torch.dtype) -> tuple[Tensor, Matrix]:
    tensor = torch.from_numpy(numbers.astype(np.float32)).to(dtype)
    return tensor, tensor.float().numpy()


@dataclass(frozen=True)
class Rounded:
    """Unsigned codes [N, K] and zeros [N, G]; matrix = (codes - zeros) * the group's scale."""

    codes: Matrix
    zeros: Matrix
    scale: Tensor  # [N, G]
    group_of: Matrix  # [K]
    matrix: Matrix


def rounded(
    matrix: Matrix,
    bits: int,
    size: int,
    *,
    symmetric: bool,
    dtype: torch.dtype,
    order: Matrix | None = None,
) -> Rounded:
    """Round to the nearest of 2^bits numbers, in groups of `size` columns (-1: all).

    `order` lists the columns in the order in which they fill the groups.
    """
    height, width = matrix.shape
    size = width if size == -1 else size
    order = np.arange(width) if order is None else order
    group_of = np.zeros(width, dtype=np.int32)
    group_of[order] = np.arange(width) // size
    most, count = 2**bits - 1, -(-width // size)
    lower, upper = np.zeros((height, count)), np.zeros((height, count))
    for group in range(count):
        lower[:, group] = np.minimum(matrix[:, group_of == group].min(axis=1), 0)
        upper[:, group] = np.maximum(matrix[:, group_of == group].max(axis=1), 0)
    if symmetric:
        steps = np.maximum(-lower, upper) / (2 ** (bits - 1) - 1)
    else:
        steps = (upper - lower) / most
    scale, steps = stored_as(steps, dtype)
    zeros = np.full((height, count), 2 ** (bits - 1))
    if not symmetric:  # not all formats can store a zero point of 0
        zeros = np.clip(np.round(-lower / steps), 1, most).astype(np.int64)
    codes = np.round(matrix / steps[:, group_of]) + zeros[:, group_of]
    codes = np.clip(codes, 0, most).astype(np.int64)
    numbers = (codes - zeros[:, group_of]).astype(np.float32)
    return Rounded(codes, zeros, scale, group_of, numbers * steps[:, group_of])


# --- AWQ -----------------------------------------------------------------------------------------

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word


def awq_words(numbers: Matrix) -> Tensor:
    """numbers [A, N] -> [A, N / 8]."""
    words = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_COLUMNS]
    return words_of_columns(words.reshape(numbers.shape), 4)


def store_awq(matrix: Matrix, size: int) -> Stored:
    made = rounded(matrix, 4, size, symmetric=False, dtype=torch.float16)
    parts = {
        "qweight": awq_words(made.codes.T),
        "qzeros": awq_words(made.zeros.T),
        "scales": made.scale.T,
    }
    return parts, made.matrix


def awq(size: int) -> Writer:
    description = {
        "quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm",
        "zero_point": True, "modules_to_not_convert": ["gate", "lm_head", LEFT_OUT],
    }  # fmt: skip
    return Writer(lambda module, matrix: store_awq(matrix, size), lambda *_: description)


# --- GPTQ ----------------------------------------------------------------------------------------


def words_of_rows(numbers: Matrix, bits: int) -> Tensor:
    """Pack numbers [A, B] into [A bits / 32, B]; adjacent rows share a word."""
    per_word = 32 // bits
    filled = np.zeros((-(-len(numbers) // per_word), per_word, numbers.shape[1]), dtype=np.uint32)
    filled.reshape(-1, numbers.shape[1])[: len(numbers)] = numbers.astype(np.int64)
    factors = (2 ** (bits * np.arange(per_word))).astype(np.uint32)
    return torch.from_numpy((filled * factors[:, None]).sum(1, dtype=np.uint32).view(np.int32))


def words_of_columns(numbers: Matrix, bits: int) -> Tensor:
    """numbers [A, B] -> [A, B bits / 32]."""
    return words_of_rows(numbers.T, bits).T.contiguous()


def shuffled(width: int) -> Matrix:
    return np.random.default_rng(width).permutation(width)


def store_gptq(
    matrix: Matrix, *, bits: int, size: int, symmetric: bool, desc_act: bool, version: int
) -> Stored:
    order = shuffled(matrix.shape[1]) if desc_act else None
    made = rounded(matrix, bits, size, symmetric=symmetric, dtype=torch.float16, order=order)
    parts = {
        "qweight": words_of_rows(made.codes.T, bits),
        "qzeros": words_of_columns(made.zeros.T - (1 if version == 1 else 0), bits),
        "scales": made.scale.T,
        "g_idx": torch.from_numpy(made.group_of),
    }
    return parts, made.matrix


def gptq(
    bits: int = 4,
    size: int = 32,
    *,
    symmetric: bool = True,
    desc_act: bool = False,
    version: int = 1,
    lm_head: bool = False,
) -> Writer:
    description = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric,
        "desc_act": desc_act, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": lm_head, "dynamic": {r"-:.*layers\.1\.self_attn\.o_proj": {}},
        "damp_percent": 0.1, "static_groups": False, "true_sequential": True,
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.0.0"]},
    }  # fmt: skip

    def store(module: str, matrix: Matrix) -> Stored:
        return store_gptq(
            matrix, bits=bits, size=size, symmetric=symmetric, desc_act=desc_act, version=version
        )

    return Writer(store, lambda *_: description, with_head=lm_head)


# --- compressed-tensors --------------------------------------------------------------------------


def compressed(stored_format: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "dynamic": False, "block_structure": None, "actorder": None, "observer": "minmax",
            "observer_kwargs": {}, "group_size": None, **weights,
        },
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": stored_format, "version": "0.12.2",
        "quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {},
        "config_groups": {"group_0": group}, "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*gate$", LEFT_OUT],
    }  # fmt: skip


def packed(
    bits: int = 4, size: int = 32, *, symmetric: bool = True, actorder: str | None = None
) -> Writer:
    """pack-quantized, which stores number + 2^(bits - 1)."""
    description = compressed(
        "pack-quantized",
        {
            "num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder,
            "strategy": "channel" if size == -1 else "group",
            "group_size": None if size == -1 else size,
        },
    )  # fmt: skip

    def store(module: str, matrix: Matrix) -> Stored:
        order = shuffled(matrix.shape[1]) if actorder else None
        made = rounded(matrix, bits, size, symmetric=symmetric, dtype=torch.bfloat16, order=order)
        parts = {
            "weight_packed": words_of_columns(made.codes, bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(matrix.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words_of_rows(made.zeros, bits)
        if actorder:
            parts["weight_g_idx"] = torch.from_numpy(made.group_of)
        return parts, made.matrix

    return Writer(store, lambda *_: description)


def store_int8(matrix: Matrix, dtype: torch.dtype) -> Stored:
    scale, steps = stored_as(np.abs(matrix).max(axis=1, keepdims=True) / 127, dtype)
    codes = np.clip(np.round(matrix / steps), -127, 127)
    parts = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scale}
    return parts, codes.astype(np.float32) * steps


def int_quantized() -> Writer:
    description = compressed(
        "int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    )
    tokens = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    description["config_groups"]["group_0"]["input_activations"] = tokens
    return Writer(lambda module, matrix: store_int8(matrix, torch.bfloat16), lambda *_: description)


# --- AutoRound -----------------------------------------------------------------------------------


def auto_round(packing: str, *, symmetric: bool, bits: int = 4) -> Writer:
    """AutoRound, with 8 bits (AWQ packing: other groups) for the experts' w2."""
    other = {"group_size": 16} if "awq" in packing else {"bits": 8}
    description = {
        "quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": 32,
        "sym": symmetric, "data_type": "int", "autoround_version": "0.9.0", "iters": 0,
        "block_name_to_quantize": "model.layers",
        "extra_config": {
            LEFT_OUT: {"bits": 16, "data_type": "fp"}, r".*experts\.\d+\.w2": other,
            "lm_head": {"bits": 16},
        },
    }  # fmt: skip

    def store(module: str, matrix: Matrix) -> Stored:
        changed = other if module.endswith("w2") else {}
        size = changed.get("group_size", 32)
        if "awq" in packing:
            return store_awq(matrix, size)
        parts, stood_for = store_gptq(
            matrix, bits=changed.get("bits", bits), size=size, symmetric=symmetric,
            desc_act=False, version=1 if "auto_gptq" in packing else 2,
        )  # fmt: skip
        del parts["g_idx"]
        return parts, stood_for

    return Writer(store, lambda *_: description)


# --- Quark ---------------------------------------------------------------------------------------


def quark_int8(*, is_static: bool) -> Writer:
    def said(**more: Any) -> dict[str, Any]:
        return {
            "dtype": "int8", "symmetric": True, "round_method": "half_even", "scale_type": "float",
            "observer_cls": "PerChannelMinMaxObserver", "group_size": None, **more,
        }  # fmt: skip

    qscheme = "per_tensor" if is_static else "per_token"
    everywhere = {
        "weight": said(qscheme="per_channel", ch_axis=0, is_dynamic=False),
        "input_tensors": said(qscheme=qscheme, ch_axis=None, is_dynamic=not is_static),
        "output_tensors": None, "bias": None, "target_device": None,
    }  # fmt: skip
    description = {
        "quant_method": "quark", "global_quant_config": everywhere, "algo_config": None,
        "exclude": ["lm_head", LEFT_OUT], "layer_quant_config": {}, "layer_type_quant_config": {},
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        "kv_cache_quant_config": {}, "quant_mode": "eager_mode", "softmax_quant_spec": None,
    }  # fmt: skip

    def store(module: str, matrix: Matrix) -> Stored:
        parts, stood_for = store_int8(matrix, torch.float32)
        parts["weight_scale"] = parts["weight_scale"][:, 0]
        parts["weight_zero_point"] = torch.zeros(matrix.shape[0], dtype=torch.int8)
        if is_static:
            parts["input_scale"] = torch.tensor(0.0371)
        return parts, stood_for

    return Writer(store, lambda *_: description)


# --- ModelSlim -----------------------------------------------------------------------------------


def modelslim(
    kind: str, *, deq_scale: torch.dtype = torch.float32, weight_scale: bool = True
) -> Writer:
    """Rows of int8.

    Static formats add scales for activations: (round(x / input_scale + input_offset) W +
    quant_bias) * deq_scale. A deq_scale in int64 holds the bits of fp32.
    """
    is_static = kind in ("W8A8", "W8A8_MIX")

    def store(module: str, matrix: Matrix) -> Stored:
        parts, stood_for = store_int8(matrix, torch.float32)
        parts["weight_offset"] = torch.zeros_like(parts["weight_scale"])
        if not is_static:
            return parts, stood_for
        input_scale, offset = np.float32(0.0371), -7
        codes, scale = parts["weight"].numpy().astype(np.int64), parts["weight_scale"].numpy()
        together = (input_scale * scale[:, 0]).astype(np.float32)
        bits = together.view(np.int32).astype(np.int64)
        is_bits = deq_scale is torch.int64
        parts["deq_scale"] = torch.from_numpy(bits if is_bits else together)
        parts["quant_bias"] = torch.from_numpy((-offset * codes.sum(axis=1)).astype(np.int32))
        parts["input_scale"] = torch.tensor([input_scale])
        parts["input_offset"] = torch.tensor([float(offset)])
        if not weight_scale:
            del parts["weight_scale"], parts["weight_offset"]
            stood_for = codes.astype(np.float32) * (together / input_scale)[:, None]
        return parts, stood_for

    return Writer(store, partial(description_of, kind), "quant_model_description.json")


def description_of(
    kind: str, modules: Sequence[str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    types = {name: kind if name.rpartition(".")[0] in modules else "FLOAT" for name in tensors}
    return {
        "model_quant_type": kind, "version": "1.0.0", "metadata": {}, "group_size": 0,
        "optional": {"quarot": {"rotation_map": {"global_rotation": "optional/q.safetensors"}}},
        **types,
    }  # fmt: skip


def modelslim_int4() -> Writer:
    """W4A8_DYNAMIC: rows of two's complement int4, the even row in the low half of a byte."""

    def store(module: str, matrix: Matrix) -> Stored:
        made = rounded(matrix, 4, -1, symmetric=True, dtype=torch.float32)
        numbers = made.codes - made.zeros
        pairs = (numbers[0::2] & 15 | (numbers[1::2] & 15) << 4).astype(np.uint8)
        columns = 16 if module.endswith(("o_proj", "w2")) else 1
        return {
            "weight": torch.from_numpy(pairs.view(np.int8)),
            "weight_scale": made.scale,
            "weight_offset": torch.zeros_like(made.scale),
            "scale_bias": torch.zeros(matrix.shape[0], columns),
        }, made.matrix

    file = "quant_model_description.json"
    return Writer(store, partial(description_of, "W4A8_DYNAMIC"), file)


# --- FP8 and FP4 ----------------------------------------------------------------------------------


def store_float(layout: float_layouts.Layout, matrix: Matrix) -> Stored:
    tensors, plain = layout.write(torch.from_numpy(matrix))
    return tensors, plain.numpy()


def floats(name: str, describe: Any, *, file: str = "", others: str = "") -> Writer:
    """The float layout `name`; `others` is the layout of all modules but the experts."""
    layouts = float_layouts.LAYOUTS

    def store(module: str, matrix: Matrix) -> Stored:
        is_other = others and ".experts." not in module
        return store_float(layouts[others if is_other else name], matrix)

    return Writer(store, describe, file)


FLOATS = {
    name: floats(name, lambda *_, made=made: made)
    for name, made in float_layouts.descriptions(LEFT_OUT).items()
} | {
    "fp8-fnuz-dtype": floats(  # only the file headers show FNUZ
        "fp8-fnuz", lambda *_: float_layouts.descriptions(LEFT_OUT)["fp8-block"]
    ),
    "modelopt-nvfp4": floats(
        "modelopt-nvfp4",
        lambda *_: float_layouts.modelopt_file("NVFP4", LEFT_OUT),
        file="hf_quant_config.json",
    ),
    "modelopt-mixed": floats(
        "modelopt-nvfp4", lambda modules, _: float_layouts.mixed(modules), others="modelopt-mxfp8"
    ),
}


WRITERS: dict[str, Writer] = {
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
