"""Published checkpoints of the M2 family as rules: names, dtypes, shapes, descriptions.

Written from the documentation of the checkpoints and tools, not from Negamax's formats.
"""

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


def plain(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("BF16", (n, k))}


def fp8_blocks(n: int, k: int) -> dict[str, Tensor]:
    scale = (math.ceil(n / 128), math.ceil(k / 128))
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", scale)}


def _fp8_stored_blocks(n: int, k: int) -> dict[str, Tensor]:
    """Block scales under the names of compressed-tensors."""
    return {name.removesuffix("_inv"): tensor for name, tensor in fp8_blocks(n, k).items()}


def _fp8_channels(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("BF16", (n, 1))}


def packed(bits: int, group: int, *, symmetric: bool = True) -> Stored:
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


def _awq(group: int) -> Stored:
    return lambda n, k: {
        "qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // group, n // 8)),
        "scales": ("F16", (k // group, n)),
    }  # fmt: skip


def gptq(group: int) -> Stored:
    return lambda n, k: {
        "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // group, n // 8)),
        "scales": ("F16", (k // group, n)),
    }  # fmt: skip


def _gptq_in_order(group: int) -> Stored:
    """GPTQModel's files, which have g_idx with and without act-order."""
    return lambda n, k: {**gptq(group)(n, k), "g_idx": ("I32", (k,))}


def modelslim(n: int, k: int) -> dict[str, Tensor]:
    scale: Tensor = "F32", (n, 1)
    return {"weight": ("I8", (n, k)), "weight_scale": scale, "weight_offset": scale}


def _quark_int8(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("I8", (n, k)), "weight_scale": ("F32", (n,))}


def nvfp4(values: str, whole: str, activations: str, one: tuple[int, ...]) -> Stored:
    """E2M1 with an E4M3 scale per 16 columns, a global scale and an activation scale."""
    return lambda n, k: {
        values: ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16)),
        whole: ("F32", one), activations: ("F32", one),
    }  # fmt: skip


# --- checkpoints ----------------------------------------------------------------------------------

LAYER = re.compile(r"\.layers\.(\d+)\.")
ATTENTION = re.compile(r"\.self_attn\.[qkvo]_proj$")
EXPERT = re.compile(r"\.experts\.\d+\.w[123]$")


@dataclass(frozen=True)
class Published:
    ids: tuple[str, ...]
    quantization: Mapping[str, Any] | None
    attention: Stored
    experts: Stored
    files: tuple[str, ...]
    router: str = "F32"  # dtype of the router's tensors
    kv_scales: tuple[str, ...] = ()  # names after "self_attn."
    side_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: str = "minimax-m2"  # name of the bundled spec
    layers: int = LAYERS
    fewest_layers: int = 1  # least number with all kinds of tensors
    num_skipped: int = 0

    def tensors(self, layers: int = LAYERS) -> Iterator[tuple[str, Tensor]]:
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

    def write(self, folder: Path, layers: int) -> int:
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
        index = folder / f"{self.files[0].partition('-')[0]}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        for file, content in self.side_files.items():
            (folder / file).write_text(json.dumps(_of_first(content, layers)))
        return len(tensors)

    def quantization_of(self, layers: int) -> Mapping[str, Any] | None:
        said = self.quantization
        if said is None or "quantized_layers" not in said:
            return said
        return {**said, "quantized_layers": _of_first(said["quantized_layers"], layers)}


def _of_first(content: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        name: said
        for name, said in content.items()
        if int((LAYER.search(name) or "00")[1]) < layers
    }


def shards(
    count: int, *, named: int | None = None, first: int = 1, stem: str = "model"
) -> tuple[str, ...]:
    named = named or count
    numbers = range(first, first + count)
    return tuple(f"{stem}-{number:05}-of-{named:05}.safetensors" for number in numbers)


FP8 = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
_EXPERTS_ONLY = ["lm_head", "re:.*block_sparse_moe.gate$", "re:.*self_attn.*"]


def compressed(
    form: str, weights: Mapping[str, Any], *, ignore: list[str], inputs: Any = None
) -> dict[str, Any]:
    """LLM Compressor's description with one group, for all linear layers but `ignore`."""
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
        FP8,
        attention=fp8_blocks,
        experts=fp8_blocks,
        files=shards(125, named=130, first=0),
    ),
    "fp8": Published(
        ("MiniMaxAI/MiniMax-M2.1", "MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7"),
        FP8,
        attention=fp8_blocks,
        experts=fp8_blocks,
        files=shards(126, first=0),
    ),
    "bf16": Published(
        ("amd/MiniMax-M2.7-BF16",), None, attention=plain, experts=plain, files=shards(100),
        router="BF16",
    ),
    "int4, symmetric, experts": Published(
        ("mratsim/MiniMax-M2.1-BF16-INT4-AWQ", "ayysasha/MiniMax-M2.7-AWQ-G32-STRIX-2H"),
        compressed(
            "pack-quantized", {"strategy": "group", "group_size": 32}, ignore=_EXPERTS_ONLY
        ),
        attention=plain,
        experts=packed(4, 32),
        files=shards(32),
        router="BF16",
    ),
    "int4 experts, fp8 attention": Published(
        ("EliasOenal/MiniMax-M2.5",),  # assumed: compressed-tensors describes both
        {
            **compressed("mixed-precision", {}, ignore=["lm_head", "re:.*block_sparse_moe.gate$"]),
            "config_groups": {
                "attention": {
                    "targets": ["re:.*self_attn.*"], "format": "float-quantized",
                    "weights": {
                        "num_bits": 8, "type": "float", "strategy": "block", "symmetric": True,
                        "dynamic": False, "block_structure": [128, 128],
                    },
                },
                "experts": {
                    "targets": ["Linear"], "format": "pack-quantized",
                    "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128,
                        "symmetric": True, "dynamic": False,
                    },
                },
            },
        },
        attention=_fp8_stored_blocks,
        experts=packed(4, 128),
        files=shards(27),
        kv_scales=("k_scale", "v_scale"),
        router="BF16",
    ),
    "int4, asymmetric": Published(
        ("cyankiwi/MiniMax-M2.1-AWQ-4bit",),
        compressed(
            "pack-quantized",
            {"strategy": "group", "group_size": 128, "symmetric": False},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
        ),
        attention=packed(4, 128, symmetric=False),
        experts=packed(4, 128, symmetric=False),
        files=shards(27),
        router="BF16",
    ),
    "int8 weights": Published(
        ("operationrange/MiniMax-M2.7-8bit",),
        compressed(
            "pack-quantized",
            {"num_bits": 8, "strategy": "group", "group_size": 128},
            ignore=_EXPERTS_ONLY,
        ),
        attention=plain,
        experts=packed(8, 128),
        files=shards(47),
        router="BF16",
    ),
    "int8": Published(
        (),
        compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
            inputs=_PER_TOKEN,
        ),
        attention=_int8_channels,
        experts=_int8_channels,
        files=shards(48),
        router="BF16",
    ),
    "awq": Published(
        # assumed: it leaves the same modules plain as similar checkpoints
        ("QuantTrio/MiniMax-M2-AWQ",),
        {
            "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
            "zero_point": True, "modules_to_not_convert": ["self_attn", "gate", "lm_head"],
        },
        attention=plain,
        experts=_awq(128),
        files=shards(41),
        router="BF16",
    ),
    "gptq": Published(
        ("ModelCloud/MiniMax-M2-GPTQMODEL-W4A16",),  # assumed: the tool's defaults
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
            "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        },
        attention=_gptq_in_order(128),
        experts=_gptq_in_order(128),
        files=shards(32),
        router="BF16",
    ),
    "auto-round": Published(
        ("Intel/MiniMax-M2.5-int4-AutoRound",),
        {
            "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
            "group_size": 128, "sym": True, "data_type": "int", "iters": 0,
            "block_name_to_quantize": "model.layers", "autoround_version": "0.10.0",
            "extra_config": {name: {"bits": 16, "data_type": "float"} for name in _EACH_GATE},
        },
        attention=gptq(128),
        experts=gptq(128),
        files=shards(26),
        router="BF16",
    ),
    "modelslim": Published(
        ("Eco-Tech/MiniMax-M2.5-w8a8-QuaRot", "Eco-Tech/MiniMax-M2.7-w8a8-QuaRot"),
        None,
        attention=modelslim,
        experts=modelslim,
        files=shards(58, stem="quant_model_weights"),
        router="BF16",
        side_files={
            "quant_model_description.json": {
                "version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "group_size": 0,
                "metadata": {}, "optional": {"quarot": {"rotation_map": {
                    "global_rotation": "optional/quarot.safetensors"
                }}},
                **{
                    f"model.layers.{layer}.{module}.weight": "W8A8_DYNAMIC"
                    for layer in range(LAYERS)
                    for module in (
                        *(f"self_attn.{name}_proj" for name in "qkvo"),
                        *(
                            f"block_sparse_moe.experts.{expert}.w{number}"
                            for expert in range(EXPERTS)
                            for number in (1, 2, 3)
                        ),
                    )
                },
            },
        },
    ),
    "int8 of Quark": Published(
        ("nameistoken/MiniMax-M2.1-Quark-W8A8-INT8", "nameistoken/MiniMax-M2.5-Quark-W8A8-INT8"),
        {
            "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None,
            "global_quant_config": {
                "weight": {
                    "dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True,
                    "is_dynamic": False,
                },
                "input_tensors": {
                    "dtype": "int8", "qscheme": "per_channel", "ch_axis": 1, "symmetric": True,
                    "is_dynamic": True,
                },
                "output_tensors": None, "bias": None, "target_device": None,
            },
            "exclude": ["lm_head", *_EACH_GATE], "layer_quant_config": {},
            "layer_type_quant_config": {}, "kv_cache_quant_config": {},
            "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        },
        attention=_quark_int8,
        experts=_quark_int8,
        files=shards(47),
        router="BF16",
    ),
    "fp8 per channel": Published(
        (),
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
            inputs={**_PER_TOKEN, "type": "float"},
        ),
        attention=_fp8_channels,
        experts=_fp8_channels,
        files=shards(48),
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
        attention=plain,
        experts=nvfp4("weight", "weight_scale_2", "input_scale", ()),
        files=shards(28),
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
        # assumed: the modules that the tool leaves plain by default
        ("RedHatAI/MiniMax-M2-NVFP4",),
        compressed(
            "nvfp4-pack-quantized",
            {
                "type": "float", "strategy": "tensor_group", "group_size": 16,
                "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
            },
            ignore=["lm_head", *_EACH_GATE],
            inputs={**_E2M1, "dynamic": "local", "strategy": "tensor_group"},
        ),
        attention=nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
        experts=nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
        files=shards(27),
        router="BF16",
    ),
}  # fmt: skip
