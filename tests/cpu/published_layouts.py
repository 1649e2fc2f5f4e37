"""The published checkpoints of the M2 family as rules: names, dtypes, shapes, files, and what they
say of their quantisation. Written from what their pages and tools document, not from our formats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, EXPERTS, VOCAB, LAYERS = 3072, 1536, 256, 200_064, 62
Q_ROWS, KV_ROWS = 6144, 1024
ITEM_BYTES = {
    "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8,
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...]]  # dtype, shape
Stored = Callable[[int, int], dict[str, Tensor]]  # rows, columns -> suffix -> tensor

# --- how a matrix [n, k] is stored ----------------------------------------------------------------


def _plain(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("BF16", (n, k))}


def _fp8_blocks(n: int, k: int) -> dict[str, Tensor]:
    scale = (math.ceil(n / 128), math.ceil(k / 128))
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", scale)}


def _fp8_channels(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("BF16", (n, 1))}


def _packed(bits: int, group: int, *, symmetric: bool = True) -> Stored:
    """compressed-tensors: words along the columns; zero points in words along the rows."""

    def stored(n: int, k: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {
            "weight_packed": ("I32", (n, k * bits // 32)),
            "weight_scale": ("BF16", (n, k // group)),
            "weight_shape": ("I64", (2,)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = "I32", (n * bits // 32, k // group)
        return tensors

    return stored


def _int8_channels(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("I8", (n, k)), "weight_scale": ("BF16", (n, 1))}


def _nvfp4(values: str, whole: str, activations: str, one: tuple[int, ...]) -> Stored:
    """E2M1, an E4M3 scale for 16 columns; of the matrix and of its activations one number each."""
    return lambda n, k: {
        values: ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16)),
        whole: ("F32", one), activations: ("F32", one),
    }  # fmt: skip


# --- checkpoints ----------------------------------------------------------------------------------

ATTENTION = re.compile(r"\.self_attn\.[qkvo]_proj$")
EXPERT = re.compile(r"\.experts\.\d+\.w[123]$")


@dataclass(frozen=True)
class Published:
    """One or several checkpoints of the same layout."""

    ids: tuple[str, ...]
    quantization: Mapping[str, Any] | None
    attention: Stored
    experts: Stored
    files: tuple[str, ...]
    router: str = "F32"  # dtype of the router's tensors
    kv_scales: tuple[str, ...] = ()  # names behind "self_attn."
    side_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def tensors(self, layers: int = LAYERS) -> Iterator[tuple[str, Tensor]]:
        """All of a checkpoint with so many layers."""
        for name in ("model.embed_tokens", "lm_head"):
            yield f"{name}.weight", ("BF16", (VOCAB, HIDDEN))
        yield "model.norm.weight", ("BF16", (HIDDEN,))
        for layer in range(layers):
            yield from self._layer(f"model.layers.{layer}.")

    def _layer(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", ("BF16", (HIDDEN,))
        yield f"{attention}q_norm.weight", ("BF16", (Q_ROWS,))
        yield f"{attention}k_norm.weight", ("BF16", (KV_ROWS,))
        for name in self.kv_scales:
            yield attention + name, ("F32", ())
        yield f"{moe}gate.weight", (self.router, (EXPERTS, HIDDEN))
        yield f"{moe}e_score_correction_bias", (self.router, (EXPERTS,))
        shapes = {"q": (Q_ROWS, HIDDEN), "k": (KV_ROWS, HIDDEN), "v": (KV_ROWS, HIDDEN)}
        for name, shape in {**shapes, "o": (HIDDEN, Q_ROWS)}.items():
            for suffix, tensor in self.attention(*shape).items():
                yield f"{attention}{name}_proj.{suffix}", tensor
        for expert in range(EXPERTS):
            for name in ("w1", "w2", "w3"):
                shape = (HIDDEN, WIDTH) if name == "w2" else (WIDTH, HIDDEN)
                for suffix, tensor in self.experts(*shape).items():
                    yield f"{moe}experts.{expert}.{name}.{suffix}", tensor

    def write(self, folder: Path, layers: int = LAYERS) -> int:
        """The files with true headers and no data on the disk; how many tensors they name."""
        tensors = sorted(self.tensors(layers))
        headers: dict[str, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        for number, (name, (dtype, shape)) in enumerate(tensors):
            file = self.files[number * len(self.files) // len(tensors)]
            first = sizes.get(file, 0)
            last = first + math.prod(shape) * ITEM_BYTES[dtype]
            headers.setdefault(file, {})[name] = {
                "dtype": dtype, "shape": shape, "data_offsets": (first, last),
            }  # fmt: skip
            sizes[file] = last
        for file, header in headers.items():
            text = json.dumps(header).encode()
            with (folder / file).open("wb") as stream:
                stream.write(len(text).to_bytes(8, "little") + text)
                stream.truncate(8 + len(text) + sizes[file])
        weight_map = {name: file for file, header in headers.items() for name in header}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        for file, content in self.side_files.items():
            (folder / file).write_text(json.dumps(content))
        return len(tensors)


def _shards(count: int, *, named: int | None = None, first: int = 1) -> tuple[str, ...]:
    named = named or count
    numbers = range(first, first + count)
    return tuple(f"model-{number:05}-of-{named:05}.safetensors" for number in numbers)


_FP8 = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
_EXPERTS_ONLY = ["lm_head", "re:.*block_sparse_moe.gate$", "re:.*self_attn.*"]


def _compressed(
    form: str, weights: Mapping[str, Any], *, ignore: list[str], inputs: Any = None
) -> dict[str, Any]:
    """As LLM Compressor writes it: one group, for all linear layers but `ignore`."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "actorder": None,
            "block_structure": None, "observer": "minmax", "observer_kwargs": {},
            "group_size": None, **weights,
        },
        "input_activations": inputs,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ignore,
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip


_PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

_EACH_GATE = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(LAYERS)]
_EXCLUDED = ["lm_head", *_EACH_GATE, *(f"model.layers.{n}.self_attn*" for n in range(LAYERS))]
_E2M1 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}

PUBLISHED = {
    "fp8 of M2": Published(
        ("MiniMaxAI/MiniMax-M2",),
        _FP8,
        attention=_fp8_blocks,
        experts=_fp8_blocks,
        files=_shards(125, named=130, first=0),
    ),
    "fp8": Published(
        ("MiniMaxAI/MiniMax-M2.1", "MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7"),
        _FP8,
        attention=_fp8_blocks,
        experts=_fp8_blocks,
        files=_shards(126, first=0),
    ),
    "bf16": Published(
        ("amd/MiniMax-M2.7-BF16",), None, attention=_plain, experts=_plain, files=_shards(100),
        router="BF16",
    ),
    "int4, symmetric, experts": Published(
        ("mratsim/MiniMax-M2.1-BF16-INT4-AWQ", "ayysasha/MiniMax-M2.7-AWQ-G32-STRIX-2H"),
        _compressed(
            "pack-quantized", {"strategy": "group", "group_size": 32}, ignore=_EXPERTS_ONLY
        ),
        attention=_plain,
        experts=_packed(4, 32),
        files=_shards(32),
        router="BF16",
    ),
    "int4, asymmetric": Published(
        ("cyankiwi/MiniMax-M2.1-AWQ-4bit",),
        _compressed(
            "pack-quantized",
            {"strategy": "group", "group_size": 128, "symmetric": False},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
        ),
        attention=_packed(4, 128, symmetric=False),
        experts=_packed(4, 128, symmetric=False),
        files=_shards(27),
        router="BF16",
    ),
    "int8 weights": Published(
        ("operationrange/MiniMax-M2.7-8bit",),
        _compressed(
            "pack-quantized",
            {"num_bits": 8, "strategy": "group", "group_size": 128},
            ignore=_EXPERTS_ONLY,
        ),
        attention=_plain,
        experts=_packed(8, 128),
        files=_shards(47),
        router="BF16",
    ),
    "int8": Published(
        (),
        _compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
            inputs=_PER_TOKEN,
        ),
        attention=_int8_channels,
        experts=_int8_channels,
        files=_shards(48),
        router="BF16",
    ),
    "fp8 per channel": Published(
        (),
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
            inputs={**_PER_TOKEN, "type": "float"},
        ),
        attention=_fp8_channels,
        experts=_fp8_channels,
        files=_shards(48),
        router="BF16",
    ),
    "nvfp4 of ModelOpt": Published(
        ("nvidia/MiniMax-M2.5-NVFP4", "nvidia/MiniMax-M2.7-NVFP4"),
        {
            "config_groups": {
                "group_0": {"input_activations": _E2M1, "weights": _E2M1, "targets": ["Linear"]}
            },
            "ignore": _EXCLUDED, "quant_algo": "NVFP4", "quant_method": "modelopt",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.43.0"},
        },
        attention=_plain,
        experts=_nvfp4("weight", "weight_scale_2", "input_scale", ()),
        files=_shards(28),
        kv_scales=("k_proj.k_scale", "v_proj.v_scale"),
        side_files={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.43.0"},
                "quantization": {
                    "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                    "exclude_modules": _EXCLUDED,
                },
            },
        },
    ),
    "nvfp4": Published(
        ("RedHatAI/MiniMax-M2-NVFP4",),  # if it leaves out what the tool leaves out by itself
        _compressed(
            "nvfp4-pack-quantized",
            {
                "type": "float", "strategy": "tensor_group", "group_size": 16,
                "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
            },
            ignore=["lm_head", *_EACH_GATE],
            inputs={**_E2M1, "dynamic": "local", "strategy": "tensor_group"},
        ),
        attention=_nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
        experts=_nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
        files=_shards(27),
        router="BF16",
    ),
}  # fmt: skip
