"""Check that published checkpoints of MiniMax-M2 and M3 pass the load plan on every split.

No tensor is missing or left over, and a rank holds the planned bytes. Names, dtypes, shapes and
descriptions follow the documentation of the checkpoints and tools, not our own code.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_support import H200

from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import read_quantization
from negamax.formats.platform import CPU, Platform
from negamax.formats.readable import is_kept
from negamax.kernels.registry import resolve
from negamax.layers.weights import WeightSlot
from negamax.models.build import build_empty_slots
from negamax.models.memory import expert_padding, weight_bytes
from negamax.models.minimax_names import SPELLINGS
from negamax.models.registry import bundled_spec
from negamax.parallel.layout import ParallelLayout
from tests import quantization_descriptions as described
from tests.layouts import full

ITEM_BYTES = {
    "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8,
}  # fmt: skip
VOCAB, LAYERS, EXPERTS, HIDDEN, WIDTH = 200_064, 62, 256, 3072, 1536
Q_ROWS, KV_ROWS = 6144, 1024

Tensor = tuple[str, tuple[int, ...]]  # dtype, shape
Named = Iterator[tuple[str, Tensor]]
Stored = Callable[[int, int], dict[str, Tensor]]  # (rows, columns) -> tensor by suffix

# --- how a matrix [n, k] is stored ----------------------------------------------------------------


def plain(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("BF16", (n, k))}


def _quark_int8(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": ("I8", (n, k)), "weight_scale": ("F32", (n,))}


def _fp8_blocks(scale: str = "weight_scale_inv") -> Stored:
    return lambda n, k: {
        "weight": ("F8_E4M3", (n, k)), scale: ("F32", (math.ceil(n / 128), math.ceil(k / 128))),
    }  # fmt: skip


def _packed(bits: int, group: int, *, symmetric: bool = True) -> Stored:
    def stored(n: int, k: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {
            "weight_packed": ("I32", (n, k * bits // 32)),
            "weight_scale": ("BF16", (n, k // group)), "weight_shape": ("I64", (2,)),
        }  # fmt: skip
        if not symmetric:
            tensors["weight_zero_point"] = "I32", (n * bits // 32, k // group)
        return tensors

    return stored


def _awq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // 128, n // 8)),
        "scales": ("F16", (k // 128, n)),
    }  # fmt: skip


def _gptq(n: int, k: int) -> dict[str, Tensor]:
    return {**_awq(n, k), "qweight": ("I32", (k // 8, n))}


def _gptq_in_order(n: int, k: int) -> dict[str, Tensor]:
    return {**_gptq(n, k), "g_idx": ("I32", (k,))}


def _modelslim(n: int, k: int) -> dict[str, Tensor]:
    scale: Tensor = "F32", (n, 1)
    return {"weight": ("I8", (n, k)), "weight_scale": scale, "weight_offset": scale}


def _nvfp4(values: str, whole: str, activations: str, one: tuple[int, ...]) -> Stored:
    """Return E2M1 with an E4M3 scale per 16 columns, a global scale and an activation scale."""
    return lambda n, k: {
        values: ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16)),
        whole: ("F32", one), activations: ("F32", one),
    }  # fmt: skip


def _mx(values: str, dtype: str, per_byte: int, scale: str) -> Stored:
    return lambda n, k: {values: (dtype, (n, k // per_byte)), scale: ("U8", (n, k // 32))}


_MODELOPT_NVFP4 = _nvfp4("weight", "weight_scale_2", "input_scale", ())
_COMPRESSED_NVFP4 = _nvfp4("weight_packed", "weight_global_scale", "input_global_scale", (1,))
_MXFP8 = _mx("weight", "F8_E4M3", 1, "weight_scale_inv")
_MODELOPT_MXFP8 = _mx("weight", "F8_E4M3", 1, "weight_scale")
_MXFP4 = _mx("weight", "U8", 2, "weight_scale")
_INT4_ASYMMETRIC = _packed(4, 128, symmetric=False)

# --- checkpoints ----------------------------------------------------------------------------------

LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Published:
    quantization: Mapping[str, Any] | None
    attention: Stored
    experts: Stored
    files: tuple[str, ...]
    router: str = "BF16"  # dtype of the router's tensors
    kv_scales: tuple[str, ...] = ()  # names after "self_attn."
    side_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: str = "minimax-m2"  # name of the bundled spec
    layers: int = LAYERS
    fewest_layers: int = 1  # least number of layers that has all kinds of tensors
    num_skipped: int = 0

    def tensors(self, layers: int = LAYERS) -> Named:
        yield from _embeddings("", HIDDEN)
        for layer in range(layers):
            yield from self._layer(f"model.layers.{layer}.")

    def _layer(self, prefix: str) -> Named:
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        yield from _vectors(prefix, HIDDEN, "input_layernorm", "post_attention_layernorm")
        yield from _vectors(attention, Q_ROWS, "q_norm")
        yield from _vectors(attention, KV_ROWS, "k_norm")
        for name in self.kv_scales:
            yield attention + name, ("F32", ())
        yield from self._router(moe, EXPERTS, HIDDEN)
        shapes = {f"{name}_proj": (KV_ROWS, HIDDEN) for name in "kv"}
        shapes |= {"q_proj": (Q_ROWS, HIDDEN), "o_proj": (HIDDEN, Q_ROWS)}
        yield from _matrices(attention, shapes, self.attention)
        experts = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
        for expert in range(EXPERTS):
            yield from _matrices(f"{moe}experts.{expert}.", experts, self.experts)

    def _router(self, moe: str, experts: int, hidden: int) -> Named:
        yield f"{moe}gate.weight", (self.router, (experts, hidden))
        yield f"{moe}e_score_correction_bias", (self.router, (experts,))

    def write(self, folder: Path, layers: int) -> None:
        tensors = sorted(self.tensors(layers))
        headers: dict[str, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        for number, (name, (dtype, shape)) in enumerate(tensors):
            file = self.files[number * len(self.files) // len(tensors)]
            first = sizes.get(file, 0)
            last = first + math.prod(shape) * ITEM_BYTES[dtype]
            tensor = {"dtype": dtype, "shape": shape, "data_offsets": (first, last)}
            headers.setdefault(file, {})[name] = tensor
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

    def quantization_of(self, layers: int) -> Mapping[str, Any] | None:
        fields = self.quantization
        if fields is None or "quantized_layers" not in fields:
            return fields
        return {**fields, "quantized_layers": _of_first(fields["quantized_layers"], layers)}


def _embeddings(prefix: str, hidden: int) -> Named:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{prefix}{name}.weight", ("BF16", (VOCAB, hidden))
    yield f"{prefix}model.norm.weight", ("BF16", (hidden,))


def _vectors(prefix: str, size: int, *names: str, parts: tuple[str, ...] = ("weight",)) -> Named:
    for name in names:
        for part in parts:
            yield f"{prefix}{name}.{part}", ("BF16", (size,))


def _matrices(prefix: str, shapes: Mapping[str, tuple[int, int]], stored: Stored) -> Named:
    for name, shape in shapes.items():
        for suffix, tensor in stored(*shape).items():
            yield f"{prefix}{name}.{suffix}", tensor


def _of_first(content: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        name: value
        for name, value in content.items()
        if int((LAYER.search(name) or "00")[1]) < layers
    }


def shards(
    count: int, *, named: int | None = None, first: int = 1, stem: str = "model"
) -> tuple[str, ...]:
    named = named or count
    numbers = range(first, first + count)
    return tuple(f"{stem}-{number:05}-of-{named:05}.safetensors" for number in numbers)


def _everywhere(
    quantization: Mapping[str, Any] | None,
    files: int | tuple[str, ...],
    stored: Stored,
    **parts: Any,
) -> Published:
    """Describe an M2 checkpoint. `stored` applies to the experts and, by default, to attention."""
    names = shards(files) if isinstance(files, int) else files
    parts = {"attention": stored, **parts}
    return Published(quantization, experts=stored, files=names, **parts)


_EXPERTS_ONLY = ["lm_head", "re:.*block_sparse_moe.gate$", "re:.*self_attn.*"]
_GATES_PLAIN = ["lm_head", "re:.*block_sparse_moe.gate$"]
_EACH_GATE = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(LAYERS)]
_EXCLUDED = ["lm_head", *_EACH_GATE, *(f"model.layers.{n}.self_attn*" for n in range(LAYERS))]
_E2M1 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_LINEAR = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"block_sparse_moe.experts.{n}.w{w}" for n in range(EXPERTS) for w in (1, 2, 3)),
]


def _compressed(stored: str, weights: Mapping[str, Any], ignore: list[str], **more: Any) -> Any:
    group = described.group({"group_size": 128, **weights}, **more)
    return described.compressed(stored, group, ignore=ignore)


def _plain_layers(gates: list[str]) -> dict[str, Any]:
    return {name: {"bits": 16, "data_type": "float"} for name in gates}


PUBLISHED_M2 = {
    "MiniMaxAI/MiniMax-M2": _everywhere(
        described.FP8, shards(125, named=130, first=0),
        _fp8_blocks(), router="F32",
    ),
    "MiniMaxAI/MiniMax-M2.1, M2.5, M2.7": _everywhere(
        described.FP8, shards(126, first=0), _fp8_blocks(), router="F32",
    ),
    "amd/MiniMax-M2.7-BF16": _everywhere(None, 100, plain),
    "mratsim/MiniMax-M2.1-BF16-INT4-AWQ, ayysasha/MiniMax-M2.7-AWQ-G32-STRIX-2H": _everywhere(
        _compressed("pack-quantized", {"group_size": 32}, _EXPERTS_ONLY),
        32, _packed(4, 32), attention=plain,
    ),
    "EliasOenal/MiniMax-M2.5": _everywhere(
        # We assume that compressed-tensors describes both kinds of modules.
        described.compressed(
            "mixed-precision",
            described.group(
                described.E4M3_BLOCKS, targets=["re:.*self_attn.*"], stored="float-quantized"
            ),
            described.group({"group_size": 128}, stored="pack-quantized"),
            ignore=_GATES_PLAIN,
        ),
        27, _packed(4, 128), attention=_fp8_blocks("weight_scale"),
        kv_scales=("k_scale", "v_scale"),
    ),
    "cyankiwi/MiniMax-M2.1-AWQ-4bit": _everywhere(
        _compressed("pack-quantized", {"symmetric": False}, _GATES_PLAIN), 27, _INT4_ASYMMETRIC,
    ),
    "operationrange/MiniMax-M2.7-8bit": _everywhere(
        _compressed("pack-quantized", {"num_bits": 8}, _EXPERTS_ONLY),
        47, _packed(8, 128), attention=plain,
    ),
    "QuantTrio/MiniMax-M2-AWQ": _everywhere(
        # We assume that the tool leaves the same modules unquantized as in similar checkpoints.
        described.awq(["self_attn", "gate", "lm_head"]), 41, _awq,
        attention=plain,
    ),
    "ModelCloud/MiniMax-M2-GPTQMODEL-W4A16": _everywhere(
        # We assume the defaults of the tool.
        described.gptq(), 32, _gptq_in_order,
    ),
    "Intel/MiniMax-M2.5-int4-AutoRound": _everywhere(
        described.auto_round(extra_config=_plain_layers(_EACH_GATE)), 26, _gptq,
    ),
    "Eco-Tech/MiniMax-M2.5-w8a8-QuaRot, MiniMax-M2.7-w8a8-QuaRot": _everywhere(
        None, shards(58, stem="quant_model_weights"), _modelslim,
        side_files={
            "quant_model_description.json": described.modelslim({
                f"model.layers.{layer}.{module}.weight": "W8A8_DYNAMIC"
                for layer in range(LAYERS)
                for module in _LINEAR
            }),
        },
    ),
    "nameistoken/MiniMax-M2.1-Quark-W8A8-INT8, MiniMax-M2.5-Quark-W8A8-INT8": _everywhere(
        described.quark(
            described.QUARK_INT8_ROWS,
            {**described.dynamic(described.QUARK_INT8_ROWS), "ch_axis": 1},
            exclude=["lm_head", *_EACH_GATE],
        ),
        47, _quark_int8,
    ),
    "nvidia/MiniMax-M2.5-NVFP4, MiniMax-M2.7-NVFP4": _everywhere(
        described.modelopt(
            "NVFP4", _EXCLUDED,
            kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
            config_groups={
                "group_0": {"input_activations": _E2M1, "weights": _E2M1, "targets": ["Linear"]}
            },
        ),
        28, _MODELOPT_NVFP4, attention=plain, router="F32",
        kv_scales=("k_proj.k_scale", "v_proj.v_scale"),
        side_files={"hf_quant_config.json": described.modelopt_file(_EXCLUDED, "FP8")},
    ),
    "RedHatAI/MiniMax-M2-NVFP4": _everywhere(
        # We assume that the tool leaves its default modules unquantized.
        _compressed(
            "nvfp4-pack-quantized",
            {**described.NVFP4, "scale_dtype": "torch.float8_e4m3fn",
             "zp_dtype": "torch.float8_e4m3fn"},
            ["lm_head", *_EACH_GATE], inputs=described.NVFP4_INPUTS,
        ),
        27, _COMPRESSED_NVFP4,
    ),
}  # fmt: skip

# --- MiniMax-M3 -----------------------------------------------------------------------------------

M3_LAYERS, DENSE_LAYERS, M3_EXPERTS = 60, 3, 128
M3_HIDDEN, M3_WIDTH, DENSE_WIDTH = 6144, 3072, 12_288
M3_Q_ROWS, M3_KV_ROWS, HEAD = 8192, 512, 128
VISION_LAYERS, VISION_HIDDEN, VISION_WIDTH = 32, 1280, 5120
ATTENTION = {
    "q_proj": (M3_Q_ROWS, M3_HIDDEN), "k_proj": (M3_KV_ROWS, M3_HIDDEN),
    "v_proj": (M3_KV_ROWS, M3_HIDDEN), "o_proj": (M3_HIDDEN, M3_Q_ROWS),
}  # fmt: skip
INDEX = {"index_q_proj": (M3_KV_ROWS, M3_HIDDEN), "index_k_proj": (HEAD, M3_HIDDEN)}


def _mlp(width: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Any:
    tall, wide = (width, M3_HIDDEN), (M3_HIDDEN, width)
    return dict(zip(names, (tall, tall, wide), strict=True))


@dataclass(frozen=True, kw_only=True)
class PublishedM3(Published):
    index: Stored
    dense: Stored
    shared: Stored
    router: str = "F32"
    model: str = "minimax-m3"
    layers: int = M3_LAYERS
    fewest_layers: int = DENSE_LAYERS + 1
    num_skipped: int = 523
    first_index: int = DENSE_LAYERS  # first layer that has an index
    has_draft: bool = False

    def tensors(self, layers: int = M3_LAYERS) -> Named:
        yield from _embeddings("language_model.", M3_HIDDEN)
        for layer in range(layers):
            yield from self._layer(f"language_model.model.layers.{layer}.", layer)
        yield from _vision()
        if self.has_draft:
            yield from _dspark()

    def _layer(self, prefix: str, layer: int = 0) -> Named:
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        yield from _vectors(prefix, M3_HIDDEN, "input_layernorm", "post_attention_layernorm")
        yield from _vectors(attention, HEAD, "q_norm", "k_norm")
        yield from _matrices(attention, ATTENTION, self.attention)
        if layer >= self.first_index:
            yield from _vectors(attention, HEAD, "index_q_norm", "index_k_norm")
            yield from _matrices(attention, INDEX, self.index)
        if layer < DENSE_LAYERS:
            yield from _matrices(f"{prefix}mlp.", _mlp(DENSE_WIDTH), self.dense)
            return
        yield from self._router(moe, M3_EXPERTS, M3_HIDDEN)
        yield from _matrices(f"{moe}shared_experts.", _mlp(M3_WIDTH), self.shared)
        shapes = _mlp(M3_WIDTH, ("w1", "w3", "w2"))
        for expert in range(M3_EXPERTS):
            yield from _matrices(f"{moe}experts.{expert}.", shapes, self.experts)


def _dspark() -> Named:
    own = "language_model.model.dspark."
    yield from _vectors(own, M3_HIDDEN, "hidden_norm", "final_norm")
    shapes = {
        "fc": (M3_HIDDEN, 5 * M3_HIDDEN), "markov_head.markov_w1": (VOCAB, 256),
        "markov_head.markov_w2": (VOCAB, 256), "confidence_head.proj": (1, M3_HIDDEN + 256),
    }  # fmt: skip
    yield from _matrices(own, shapes, plain)
    yield f"{own}confidence_head.proj.bias", ("BF16", (1,))
    for layer in range(5):
        prefix = f"{own}layers.{layer}.decoder_layer."
        yield from _vectors(prefix, M3_HIDDEN, "input_layernorm", "post_attention_layernorm")
        yield from _vectors(f"{prefix}self_attn.", HEAD, "q_norm", "k_norm")
        yield from _matrices(f"{prefix}self_attn.", ATTENTION, _MXFP8)
        yield from _matrices(f"{prefix}mlp.", _mlp(DENSE_WIDTH), _MXFP8)


def _vision() -> Named:
    tower, hidden, both = "vision_tower.vision_model.", VISION_HIDDEN, ("weight", "bias")
    yield f"{tower}embeddings.patch_embedding.weight", ("F32", (hidden, 3, 2, 14, 14))
    yield from _vectors(tower, hidden, "pre_layrnorm", parts=both)
    linear = {
        "multi_modal_projector.linear_1": (M3_HIDDEN, hidden),
        "multi_modal_projector.linear_2": (M3_HIDDEN, M3_HIDDEN),
        "patch_merge_mlp.linear_1": (M3_HIDDEN, 4 * M3_HIDDEN),
        "patch_merge_mlp.linear_2": (M3_HIDDEN, M3_HIDDEN),
    }
    for layer in range(VISION_LAYERS):
        prefix = f"{tower}encoder.layers.{layer}."
        yield from _vectors(prefix, hidden, "layer_norm1", "layer_norm2", parts=both)
        for name in ("q", "k", "v", "out"):
            linear[f"{prefix}self_attn.{name}_proj"] = hidden, hidden
        linear[f"{prefix}mlp.fc1"] = VISION_WIDTH, hidden
        linear[f"{prefix}mlp.fc2"] = hidden, VISION_WIDTH
    yield from _matrices(
        "", linear, lambda n, k: {"weight": ("BF16", (n, k)), "bias": ("BF16", (n,))}
    )


_TEXT = [f"language_model.model.layers.{layer}." for layer in range(M3_LAYERS)]
_MOE = [f"{prefix}block_sparse_moe." for prefix in _TEXT[DENSE_LAYERS:]]
_M3_GATES = [f"{moe}gate" for moe in _MOE]
_VISION = ["vision_tower", "multi_modal_projector", "patch_merge_mlp"]
_ATTENTION = [f"{prefix}self_attn.{name}" for prefix in _TEXT for name in ATTENTION]
_INDEX = [f"{prefix}self_attn.{name}" for prefix in _TEXT[DENSE_LAYERS:] for name in INDEX]
_DENSE = [f"{prefix}mlp.{name}" for prefix in _TEXT[:DENSE_LAYERS] for name in _mlp(DENSE_WIDTH)]
_SHARED = [f"{moe}shared_experts.{name}" for moe in _MOE for name in _mlp(M3_WIDTH)]
_ROUTED = [
    f"{moe}experts.{expert}.w{number}"
    for moe in _MOE
    for expert in range(M3_EXPERTS)
    for number in (1, 2, 3)
]
_IGNORED = ["re:.*lm_head$", "re:.*block_sparse_moe.gate$", "re:.*vision.*", "re:.*projector.*"]
_IGNORED += ["re:.*patch_merge.*"]


def _m3(
    quantization: Mapping[str, Any] | None,
    files: int,
    experts: Stored,
    *,
    others: Stored = plain,
    stem: str = "model",
    **parts: Any,
) -> PublishedM3:
    stored: dict[str, Any] = dict.fromkeys(("attention", "index", "dense", "shared"), others)
    stored |= {"experts": experts, "files": shards(files, stem=stem), **parts}
    return PublishedM3(quantization, **stored)


PUBLISHED_M3 = {
    "MiniMaxAI/MiniMax-M3": _m3(None, 59, plain),
    "MiniMaxAI/MiniMax-M3-MXFP8": _m3(
        # We assume that modules are unquantized where the file size leaves no room for scales.
        {
            "quant_method": "mxfp8", "weight_block_size": [1, 32],
            "ignored_layers": ["language_model.lm_head", "language_model.model.embed_tokens",
                               *_VISION, *_M3_GATES],
        },
        31, _MXFP8, others=_MXFP8,
    ),
    "MiniMaxAI/MiniMax-M3.1-Flash": _m3(
        # We assume the unquantized modules of M3, and the tensors that public loaders read.
        {**described.M31,
         "ignored_layers": ["lm_head", "model.embed_tokens", *_VISION, *_M3_GATES]},
        31, _COMPRESSED_NVFP4, others=_MXFP8, model="minimax-m3.1-flash", first_index=0,
        has_draft=True, num_skipped=523 + 97,
    ),
    "nvidia/MiniMax-M3-NVFP4": _m3(
        described.modelopt_mixed(
            {**dict.fromkeys((*_ATTENTION, *_INDEX, *_DENSE, *_SHARED), "MXFP8"),
             **dict.fromkeys(_ROUTED, "NVFP4")},
            ["lm_head", "model.embed_tokens", *_VISION, *_M3_GATES],
        ),
        28, _MODELOPT_NVFP4, others=_MODELOPT_MXFP8,
    ),
    "Mapika/MiniMax-M3-NVFP4": _m3(
        # We assume that the description has the fields of NVIDIA's description for M2.
        described.modelopt("NVFP4", ["*lm_head", *_VISION, *_M3_GATES, *_DENSE, "*self_attn*"]),
        28, _MODELOPT_NVFP4, shared=_MODELOPT_NVFP4,
    ),
    "olka-fi/MiniMax-M3-MXFP4": _m3(
        # We assume that the tool leaves the same modules unquantized as in similar checkpoints.
        described.compressed(
            "mixed-precision",
            described.group(
                described.mx(4), targets=["re:.*\\.experts\\..*"], stored="mxfp4-pack-quantized"
            ),
            described.group(described.mx(8), stored="mxfp8-quantized"),
            ignore=_IGNORED,
        ),
        30, _mx("weight_packed", "U8", 2, "weight_scale"), others=_MODELOPT_MXFP8,
    ),
    "bullerwins/MiniMax-M3-4bit-W4A16": _m3(
        # We assume that all linear layers except routers are packed.
        described.auto_round(
            block_name_to_quantize="language_model.model.layers",
            extra_config=_plain_layers(_M3_GATES),
        ),
        46, _gptq, others=_gptq, router="BF16",
    ),
    "cyankiwi/MiniMax-M3-AWQ-INT4": _m3(
        # We assume groups of 128 columns.
        _compressed("pack-quantized", {"symmetric": False}, [*_IGNORED, "re:.*self_attn.*"]),
        46, _INT4_ASYMMETRIC, dense=_INT4_ASYMMETRIC, shared=_INT4_ASYMMETRIC, router="BF16",
    ),
    "amd/MiniMax-M3-MXFP4": _m3(
        described.quark(
            described.QUARK_MXFP4, described.dynamic(described.QUARK_MXFP4),
            exclude=[
                "language_model.lm_head", *_VISION, *_M3_GATES, *_ATTENTION, *_INDEX, *_DENSE,
            ],
        ),
        30, _MXFP4, shared=_MXFP4,
    ),
    "Eco-Tech/MiniMax-M3-w8a8": _m3(
        # We assume unquantized indexers.
        None, 110, _modelslim, others=_modelslim, stem="quant_model_weights", index=plain,
        side_files={
            "quant_model_description.json": described.modelslim({
                f"{name}.weight": kind
                for kind, names in {
                    "W8A8_DYNAMIC": (*_ATTENTION, *_DENSE, *_SHARED, *_ROUTED),
                    "FLOAT": (*_INDEX, *_M3_GATES),
                }.items()
                for name in names
            }),
        },
    ),
}  # fmt: skip
PUBLISHED: dict[str, Published] = {**PUBLISHED_M2, **PUBLISHED_M3}

# --- tests ----------------------------------------------------------------------------------------

DTYPE = torch.bfloat16
SPLITS = {
    "tp1": ParallelLayout(), "tp4": ParallelLayout(rank=1, tp=4),
    "tp8": ParallelLayout(rank=3, tp=8), "tp8 ep8": ParallelLayout(rank=7, tp=8, ep=8),
    "tp16": ParallelLayout(rank=5, tp=16), "tp16 ep2": ParallelLayout(rank=9, tp=16, ep=2),
}  # fmt: skip
# On the CPU all weights are plain after loading, so two splits suffice for each format.
CHECKED = [(H200, layout) for layout in SPLITS.values()]
CHECKED += [(CPU, SPLITS[name]) for name in ("tp1", "tp16 ep2")]
# The gate checks one split per format, and each split with several formats.
SAMPLED = [(name, (CHECKED[3 * n % len(CHECKED)],)) for n, name in enumerate(PUBLISHED)]
FULL_COUNTS = {
    "MiniMaxAI/MiniMax-M2": 96_103,
    "MiniMaxAI/MiniMax-M2.1, M2.5, M2.7": 96_103,
    "amd/MiniMax-M2.7-BF16": 48_239,
    "MiniMaxAI/MiniMax-M3": 23_416,
    "MiniMaxAI/MiniMax-M3.1-Flash": 89_632 + 97,
}


@pytest.fixture(scope="module", autouse=True)
def names_respelled_once() -> Iterator[None]:
    """Cache the renaming, since all splits and formats have the same names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SPELLINGS, "respell", cache(SPELLINGS.respell))
        yield


def spec_of(name: str, folder: Path, *, layers: int) -> ModelSpec:
    published = PUBLISHED[name]
    fields = published.quantization_of(layers)
    quantization = read_quantization({"quantization_config": fields}, folder)
    spec = bundled_spec(published.model).first_layers(layers)
    return replace(spec, vision=None, quantization=quantization)


def held_bytes(slots: dict[str, WeightSlot]) -> tuple[int, int]:
    parameters, written = {}, 0
    for slot in slots.values():
        if slot.needed and not slot.optional and slot.target is not None:
            storage = slot.target.untyped_storage()
            parameters[storage._cdata] = storage.nbytes()
            written += slot.target.nbytes
    return sum(parameters.values()), written


def check(
    name: str, folder: Path, platform: Platform, layout: ParallelLayout, *, layers: int
) -> None:
    published, spec = PUBLISHED[name], spec_of(name, folder, layers=layers)
    slots = build_empty_slots(spec, layout, kernels=resolve(platform=platform, dtype=DTYPE))
    plan = plan_load(slots, spec, folder)
    num_skipped = sum(map(len, plan.skipped.values()))
    assert num_skipped == published.num_skipped
    assert plan.num_tensors + num_skipped == sum(1 for _ in published.tensors(layers))
    parameters, written = held_bytes(slots)
    split = {"kept": partial(is_kept, platform=platform), "layout": layout}
    # The embedding has two padding rows for token ids of other ranks.
    border = 2 * spec.hidden_size * DTYPE.itemsize
    assert parameters == weight_bytes(spec, dtype="bfloat16", **split) + border
    # Every parameter is written in full, except the padding of shards to whole blocks.
    assert parameters == written + border or expert_padding(spec, **split) is not None


@pytest.mark.parametrize(
    ("name", "splits"),
    [pytest.param(*each, id=each[0]) for each in SAMPLED]
    + [full(name, CHECKED) for name in PUBLISHED],
)
def test_published_checkpoints_fit_on_every_split(
    tmp_path: Path, name: str, splits: Sequence[tuple[Platform, ParallelLayout]]
) -> None:
    """Write the fewest layers that have all kinds of tensors, and check every split."""
    layers = PUBLISHED[name].fewest_layers
    PUBLISHED[name].write(tmp_path, layers)
    for platform, layout in splits:
        check(name, tmp_path, platform, layout, layers=layers)


def test_published_layouts_have_the_known_tensor_counts() -> None:
    m2, m3 = PUBLISHED["MiniMaxAI/MiniMax-M2"], PUBLISHED["MiniMaxAI/MiniMax-M3"]
    for name, count in FULL_COUNTS.items():
        assert sum(1 for _ in PUBLISHED[name].tensors(PUBLISHED[name].layers)) == count
    e4m3 = sum(math.prod(shape) for _, (dtype, shape) in m2.tensors() if dtype == "F8_E4M3")
    assert 227.40e9 < e4m3 < 227.42e9 and len(m2.files) == 125
    size = sum(math.prod(shape) * ITEM_BYTES[dtype] for _, (dtype, shape) in m3.tensors())
    assert size == 854_172_958_720 and len(m3.files) == 59


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_fit_at_full_size(tmp_path: Path, name: str) -> None:
    layers = PUBLISHED[name].layers
    PUBLISHED[name].write(tmp_path, layers)
    for platform, layout in (H200, SPLITS["tp4"]), (CPU, SPLITS["tp16 ep2"]):
        check(name, tmp_path, platform, layout, layers=layers)
