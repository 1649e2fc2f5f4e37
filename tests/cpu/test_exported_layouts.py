"""Exports of MiniMax-M2 by LLM Compressor, AutoRound, Model Optimizer and Quark, as rules.

Names, descriptions and scales are those of files exported from transformers 5.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from float_layouts import LAYOUTS as FLOATS
from quantized_writers import (
    Matrix,
    Stored,
    Writer,
    is_matrix,
    packed,
    rounded,
    store_float,
    store_int8,
    write,
)
from safetensors.torch import load_file, save_file
from stored_support import load, part_of
from test_stored_formats import CONFIG, TENSORS
from torch import Tensor

from negamax.base.errors import CheckpointError, ConfigError
from negamax.parallel.layout import ParallelLayout

MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
GATES = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
LEFT_OUT = "model.layers.1.self_attn.o_proj"  # plain, as in `write`


def compressed(groups: Sequence[dict[str, Any]], stored_as: str, **more: Any) -> dict[str, Any]:
    for group in groups:
        group["weights"] = {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": None,
            "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None,
            "symmetric": True, "zp_dtype": None, **group["weights"],
        }  # fmt: skip
        group["output_activations"] = None
        group.setdefault("input_activations", None)
    return {
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "format": stored_as, "global_compression_ratio": None, "kv_cache_scheme": None,
        "ignore": [*GATES, "lm_head", LEFT_OUT], "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.19.0", **more,
    }  # fmt: skip


def store_mixed(module: str, matrix: Matrix) -> Stored:
    name = "compressed-nvfp4" if ".experts." in module else "compressed-fp8-channel"
    return store_float(FLOATS[name], matrix)


TOKENS = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MIXED = compressed(
    [
        {
            "format": "nvfp4-pack-quantized", "weights": NVFP4,
            "targets": ["re:.*experts.*(gate|up|down)_proj$"],
            "input_activations": {**NVFP4, "dynamic": "local"},
        },
        {
            "format": "float-quantized", "targets": ["re:.*self_attn.(q|k|v|o)_proj$"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {**TOKENS, "type": "float"},
        },
    ],
    "mixed-precision",
)  # fmt: skip


def store_int4(matrix: Matrix) -> Stored:
    made = rounded(matrix, 4, 32, symmetric=True, dtype=torch.bfloat16)
    values = torch.from_numpy(made.codes - made.zeros[:, made.group_of]).to(torch.int8)
    return {"weight": values, "weight_scale": made.scale}, made.matrix


W4AFP8 = compressed(
    [
        {
            "format": "int-quantized", "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            "input_activations": {**TOKENS, "type": "float"},
        }
    ],
    "int-quantized",
)  # fmt: skip


def spin(location: str = "weight_input") -> dict[str, Any]:
    steps = [
        {"targets": ["re:.*o_proj$"], "location": "weight_output", "inverse": False, "ignore": []},
        {"targets": ["re:.*q_proj$"], "location": location, "inverse": True, "ignore": []},
    ]
    r1 = {"type": "hadamard", "apply": steps, "randomize": False, "requires_grad": False}
    group = {
        "format": "pack-quantized", "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }  # fmt: skip
    return compressed([group], "pack-quantized", transform_config={"config_groups": {"R1": r1}})


def auto_round(data_type: str, bits: int, size: Any, **more: Any) -> dict[str, Any]:
    left_out = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}
    return {
        "quant_method": "auto-round", "autoround_version": "0.16.1", "bits": bits, "sym": True,
        "data_type": data_type, "group_size": size, "block_name_to_quantize": "model.layers",
        "act_bits": bits, "act_data_type": data_type, "act_dynamic": True, "act_sym": True,
        "act_group_size": size, "enable_quanted_input": False,
        "extra_config": {
            r".*model\.layers\.0\.mlp\.gate.*": left_out, LEFT_OUT: left_out,
        }, **more,
    }  # fmt: skip


FP8_BLOCKS = {
    "packing_format": "auto_round:fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
}  # fmt: skip


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "ignore": ["lm_head", "model.embed_tokens", *GATES, f"{LEFT_OUT}*"], **more,
        "quant_algo": algorithm, "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }  # fmt: skip


def quark(weight: dict[str, Any], **more: Any) -> dict[str, Any]:
    inputs = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None}
    layer = {
        "weight": {"is_dynamic": False, "symmetric": True, "block_size": None, **weight},
        "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None,
    }  # fmt: skip
    return {
        "quant_method": "quark", "version": "0.13", "global_quant_config": layer,
        "exclude": ["lm_head", *GATES, LEFT_OUT], "layer_quant_config": {}, **more,
    }  # fmt: skip


PER_MATRIX = {"dtype": "int8", "qscheme": "per_tensor", "ch_axis": None}
MXFP4 = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
    "ch_axis": -1, "symmetric": None,
}  # fmt: skip
# Description of an FP8 cache in files quantized without calibration.
CACHED = {"*k_proj": {**quark(MXFP4)["global_quant_config"]}}
CACHED["*k_proj"]["output_tensors"] = CACHED["*k_proj"]["input_tensors"]


def store_rows(matrix: Matrix) -> Stored:
    parts, plain = store_int8(matrix, torch.float32)
    return {**parts, "weight_scale": parts["weight_scale"][:, 0]}, plain


def store_whole(matrix: Matrix) -> Stored:
    scale = torch.tensor(abs(matrix).max() / 127)
    values = (torch.from_numpy(matrix) / scale).round().to(torch.int8)
    zero = torch.tensor(0, dtype=torch.int8)
    parts = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    return parts, (values.float() * scale).numpy()


def store(name: str, **activations: float) -> Any:
    def stored(matrix: Matrix) -> Stored:
        parts, plain = store_float(FLOATS[name], matrix)
        for part, tensor in parts.items():
            if part.startswith("weight_scale") and tensor.dtype is torch.float32:
                parts[part] = tensor.bfloat16()
                plain = plain * _grown(parts[part].float() / tensor, plain)
        return {**parts, **{key: torch.tensor(n) for key, n in activations.items()}}, plain

    return stored


def _grown(factors: Tensor, matrix: Matrix) -> Matrix:
    found = factors.reshape(-1, 1) if factors.dim() < 2 else factors
    if found.shape[0] not in (1, len(matrix)):
        found = found.repeat_interleave(128, 0)[: len(matrix)]
    if found.shape[1] > 1:
        found = found.repeat_interleave(128, 1)[:, : matrix.shape[1]]
    return found.numpy()


def of(write_matrix: Any, description: dict[str, Any]) -> Writer:
    return Writer(lambda module, matrix: write_matrix(matrix), lambda *_: description)


EXPORTS = {
    "llm-compressor, mixed": Writer(store_mixed, lambda *_: MIXED),
    "llm-compressor, W4AFP8": of(store_int4, W4AFP8),
    "llm-compressor, SpinQuant": Writer(packed().store, lambda *_: spin()),
    "auto-round, compressed-tensors": Writer(
        packed().store, lambda *_: {**spin(), "transform_config": None, "moe_sparsity_config": None}
    ),
    "auto-round, FP8 rows": of(
        store("modelopt-fp8-channel", input_scale=0.065),
        auto_round(
            "fp", 8, -1, act_dynamic=False, activation_scheme="static", fmt="e4m3",
            packing_format="auto_round:fp8_static", static_kv_dtype="fp8",
        ),
    ),
    "auto-round, FP8 matrices": of(
        store("fp8-static"),
        {**auto_round("fp", 8, 0, activation_scheme="dynamic", fmt="e4m3"), "act_bits": 16},
    ),
    "auto-round, FP8 blocks": of(
        store("fp8-block"), auto_round("fp", 8, [128, 128], **FP8_BLOCKS)
    ),
    "auto-round, as fp8": of(
        store("fp8-block"),
        {**auto_round("fp", 8, [128, 128], **FP8_BLOCKS), "quant_method": "fp8",
         "modules_to_not_convert": [LEFT_OUT, "gate"]},
    ),
    "auto-round, MXFP4": of(
        store("compressed-mxfp4"),
        auto_round("mx_fp", 4, 32, packing_format="auto_round:llm_compressor"),
    ),
    "auto-round, MXFP8": of(
        store("compressed-mxfp8"),
        auto_round("mx_fp_rceil", 8, 32, packing_format="auto_round:llm_compressor"),
    ),
    "auto-round, NVFP4": of(
        store("compressed-nvfp4"),
        auto_round("nv_fp", 4, 16, packing_format="auto_round:llm_compressor"),
    ),
    "modelopt, MXFP4": of(store("quark-mxfp4"), modelopt("mxfp4")),
    "modelopt, W4A8": of(store("quark-mxfp4"), modelopt("W4A8_MXFP4_FP8")),
    "modelopt, W8A16": of(store_rows, modelopt("W8A16")),
    "quark, MXFP4 and FP8": of(store("quark-mxfp4", input_scale=0.065), quark(MXFP4)),
    "quark, INT8": of(store_whole, quark(PER_MATRIX)),
    "quark, from files": of(
        store("quark-mxfp4"),
        quark(MXFP4, layer_quant_config=CACHED, kv_cache_quant_config=CACHED),
    ),
}  # fmt: skip


def export(folder: Path, writer: Writer) -> dict[str, Tensor]:
    plain = write(folder, CONFIG, TENSORS, writer)
    stored, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    words = {
        re.sub(r"(?<=\d\.)w[123](?=\.)", lambda match: MATRICES[match[0]], name): tensor
        for name, tensor in stored.items()
    }
    save_file(words, file)
    return plain


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_load_as_their_stored_values(name: str, tmp_path: Path) -> None:
    plain = export(tmp_path, EXPORTS[name])
    model, found, report = load(tmp_path, ParallelLayout(rank=1, tp=2))
    assert report.num_dequantized == sum(map(is_matrix, found)) - 1 == 31
    for key, values in found.items():
        expected = part_of(model.weight_slots()[key], plain[key])
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    "description",
    [
        compressed([], "dense", kv_cache_scheme=CACHE),
        {**modelopt(""), "quant_algo": None, "kv_cache_scheme": CACHE},
    ],
    ids=["llm-compressor", "modelopt"],
)
def test_only_the_cache_has_scales(tmp_path: Path, description: dict[str, Any]) -> None:
    stored = {**TENSORS, "model.layers.0.self_attn.k_scale": torch.tensor([0.25]).bfloat16()}
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": description})
    )
    save_file(stored, tmp_path / "model.safetensors")
    _, found, report = load(tmp_path, ParallelLayout())
    assert float(found["model.layers.0.self_attn.k_scale"]) == 0.25
    assert report.num_dequantized == 0


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (spin("input"), "R1.location is 'input'; supported: weight_input, weight_output"),
        (
            modelopt("NVFP4", kv_cache_scheme="NVFP4"),
            "kv_cache_scheme is 'NVFP4'; supported: an FP8 object",
        ),
        (
            modelopt(
                "W4A16_NVFP4", config_groups={"group_0": {"weights": {"group_size": 32}}}
            ),
            "group_size is 32; supported: 16",
        ),
        (quark({"dtype": "int4"}), "weight.dtype is 'int4'; supported: fp8_e4m3, fp4, int8"),
        (auto_round("fp", 8, 64), "group_size is 64; supported: -1"),
        (auto_round("mx_fp", 4, 16), "group_size is 16; supported: 32"),
        (auto_round("mx_int", 4, 32), "act_bits is 4; supported: 16"),
    ],
)  # fmt: skip
def test_unsupported_exports_are_refused_by_name(
    description: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {**CONFIG, "quantization_config": description}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, ParallelLayout())


def test_experts_missing_from_an_export_are_named(tmp_path: Path) -> None:
    """GPTQModel omits all experts of transformers 5 but the first."""
    export(tmp_path, EXPORTS["modelopt, W8A16"])
    file = tmp_path / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if not re.search(r"experts\.[1-9]", n)}
    save_file(kept, file)
    with pytest.raises(CheckpointError, match=r"36 tensors are missing .*experts\.1\.w1") as failed:
        load(tmp_path, ParallelLayout())
    assert "the tool that wrote the checkpoint left them out" in (failed.value.hint or "")
