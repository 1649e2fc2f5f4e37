from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from published_layouts import (
    FP8,
    VOCAB,
    Published,
    Stored,
    Tensor,
    compressed,
    fp8_blocks,
    gptq,
    modelslim,
    nvfp4,
    packed,
    plain,
    shards,
)

HIDDEN, WIDTH, DENSE_WIDTH, EXPERTS, LAYERS, DENSE_LAYERS = 6144, 3072, 12_288, 128, 60, 3
Q_ROWS, KV_ROWS, INDEX_ROWS, HEAD = 8192, 512, 512, 128
VISION_LAYERS, VISION_HIDDEN, VISION_WIDTH = 32, 1280, 5120
ATTENTION = {
    "q_proj": (Q_ROWS, HIDDEN),
    "k_proj": (KV_ROWS, HIDDEN),
    "v_proj": (KV_ROWS, HIDDEN),
    "o_proj": (HIDDEN, Q_ROWS),
}
INDEX = {"index_q_proj": (INDEX_ROWS, HIDDEN), "index_k_proj": (HEAD, HIDDEN)}


def _mlp(width: int) -> dict[str, tuple[int, int]]:
    tall, wide = (width, HIDDEN), (HIDDEN, width)
    return {"gate_proj": tall, "up_proj": tall, "down_proj": wide}


def _mx(values: str, dtype: str, per_byte: int, scale: str) -> Stored:
    return lambda n, k: {values: (dtype, (n, k // per_byte)), scale: ("U8", (n, k // 32))}


@dataclass(frozen=True, kw_only=True)
class PublishedM3(Published):
    index: Stored
    dense: Stored
    shared: Stored
    model: str = "minimax-m3"
    layers: int = LAYERS
    fewest_layers: int = DENSE_LAYERS + 1  # least number with all kinds of tensors
    num_skipped: int = 523

    def tensors(self, layers: int = LAYERS) -> Iterator[tuple[str, Tensor]]:
        for name in ("model.embed_tokens", "lm_head"):
            yield f"language_model.{name}.weight", ("BF16", (VOCAB, HIDDEN))
        yield "language_model.model.norm.weight", ("BF16", (HIDDEN,))
        for layer in range(layers):
            yield from self._layer(f"language_model.model.layers.{layer}.", layer)
        yield from _vision()

    def _layer(self, prefix: str, layer: int = 0) -> Iterator[tuple[str, Tensor]]:
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        is_sparse = layer >= DENSE_LAYERS
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", ("BF16", (HIDDEN,))
        for name in ("q_norm", "k_norm", *(("index_q_norm", "index_k_norm") * is_sparse)):
            yield f"{attention}{name}.weight", ("BF16", (HEAD,))
        yield from _matrices(attention, ATTENTION, self.attention)
        if not is_sparse:
            yield from _matrices(f"{prefix}mlp.", _mlp(DENSE_WIDTH), self.dense)
            return
        yield from _matrices(attention, INDEX, self.index)
        yield f"{moe}gate.weight", (self.router, (EXPERTS, HIDDEN))
        yield f"{moe}e_score_correction_bias", (self.router, (EXPERTS,))
        yield from _matrices(f"{moe}shared_experts.", _mlp(WIDTH), self.shared)
        shapes = dict(zip(("w1", "w3", "w2"), _mlp(WIDTH).values(), strict=True))
        for expert in range(EXPERTS):
            yield from _matrices(f"{moe}experts.{expert}.", shapes, self.experts)


def _matrices(
    prefix: str, shapes: Mapping[str, tuple[int, int]], stored: Stored
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        for suffix, tensor in stored(*shape).items():
            yield f"{prefix}{name}.{suffix}", tensor


def _vision() -> Iterator[tuple[str, Tensor]]:
    tower, hidden = "vision_tower.vision_model.", VISION_HIDDEN
    yield f"{tower}embeddings.patch_embedding.weight", ("F32", (hidden, 3, 2, 14, 14))
    yield from _norm(f"{tower}pre_layrnorm")
    for layer in range(VISION_LAYERS):
        prefix = f"{tower}encoder.layers.{layer}."
        for name in ("layer_norm1", "layer_norm2"):
            yield from _norm(prefix + name)
        for name in ("q", "k", "v", "out"):
            yield from _linear(f"{prefix}self_attn.{name}_proj", hidden, hidden)
        yield from _linear(f"{prefix}mlp.fc1", VISION_WIDTH, hidden)
        yield from _linear(f"{prefix}mlp.fc2", hidden, VISION_WIDTH)
    yield from _linear("multi_modal_projector.linear_1", HIDDEN, hidden)
    yield from _linear("multi_modal_projector.linear_2", HIDDEN, HIDDEN)
    yield from _linear("patch_merge_mlp.linear_1", HIDDEN, 4 * HIDDEN)
    yield from _linear("patch_merge_mlp.linear_2", HIDDEN, HIDDEN)


def _norm(name: str) -> Iterator[tuple[str, Tensor]]:
    for part in ("weight", "bias"):
        yield f"{name}.{part}", ("BF16", (VISION_HIDDEN,))


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", ("BF16", (rows, columns))
    yield f"{name}.bias", ("BF16", (rows,))


# --- what they say of their quantisation ----------------------------------------------------------

_TEXT = [f"language_model.model.layers.{layer}." for layer in range(LAYERS)]
_SPARSE = _TEXT[DENSE_LAYERS:]
_EACH_GATE = [f"{prefix}block_sparse_moe.gate" for prefix in _SPARSE]
_VISION = ["vision_tower", "multi_modal_projector", "patch_merge_mlp"]
_ATTENTION = [f"{prefix}self_attn.{name}" for prefix in _TEXT for name in ATTENTION]
_INDEX = [f"{prefix}self_attn.{name}" for prefix in _SPARSE for name in INDEX]
_DENSE = [f"{prefix}mlp.{name}" for prefix in _TEXT[:DENSE_LAYERS] for name in _mlp(DENSE_WIDTH)]
_SHARED = [
    f"{prefix}block_sparse_moe.shared_experts.{name}" for prefix in _SPARSE for name in _mlp(WIDTH)
]
_ROUTED = [
    f"{prefix}block_sparse_moe.experts.{expert}.w{number}"
    for prefix in _SPARSE
    for expert in range(EXPERTS)
    for number in (1, 2, 3)
]
_PLAIN_PARTS = ["lm_head", "model.embed_tokens", *_VISION, *_EACH_GATE]
_MIXED: dict[str, Any] = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": None,
    "exclude_modules": _PLAIN_PARTS,
    "quantized_layers": {
        **{name: {"quant_algo": "MXFP8"} for name in (*_ATTENTION, *_INDEX, *_DENSE, *_SHARED)},
        **{name: {"quant_algo": "NVFP4", "group_size": 16} for name in _ROUTED},
    },
}
_MXFP4 = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1,
    "symmetric": None,
}  # fmt: skip
_MXFP8_MATRIX = _mx("weight", "F8_E4M3", 1, "weight_scale_inv")
_MODELOPT_MXFP8 = _mx("weight", "F8_E4M3", 1, "weight_scale")
_MXFP4_MATRIX = _mx("weight", "U8", 2, "weight_scale")


_GATES = ["re:.*lm_head$", "re:.*block_sparse_moe.gate$", "re:.*vision.*", "re:.*projector.*"]
_GATES += ["re:.*patch_merge.*"]


def _mx_groups() -> dict[str, Any]:
    groups = {}
    for name, bits, target in (
        ("mxfp4-pack-quantized", 4, "re:.*\\.experts\\..*"),
        ("mxfp8-quantized", 8, "Linear"),
    ):
        weights = {
            "num_bits": bits, "type": "float", "strategy": "group", "group_size": 32,
            "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8",
        }  # fmt: skip
        groups[name] = {"targets": [target], "weights": weights, "format": name}
    whole = compressed("mixed-precision", {}, ignore=_GATES)
    return {**whole, "config_groups": groups}


def _published(
    ids: tuple[str, ...],
    quantization: Mapping[str, Any] | None,
    files: int,
    *,
    experts: Stored,
    others: Stored = plain,
    stem: str = "model",
    **parts: Any,
) -> PublishedM3:
    stored: dict[str, Any] = dict.fromkeys(("attention", "index", "dense", "shared"), others)
    stored |= {"experts": experts, "files": shards(files, stem=stem), **parts}
    return PublishedM3(ids, quantization, **stored)


PUBLISHED_M3 = {
    "m3, bf16": _published(("MiniMaxAI/MiniMax-M3",), None, 59, experts=plain),
    "m3, mxfp8": _published(
        # assumed: modules are plain if the file size leaves no room for scales
        ("MiniMaxAI/MiniMax-M3-MXFP8",),
        {
            "quant_method": "mxfp8", "weight_block_size": [1, 32],
            "ignored_layers": ["language_model.lm_head", "language_model.model.embed_tokens",
                               *_VISION, *_EACH_GATE],
        },
        31,
        experts=_MXFP8_MATRIX,
        others=_MXFP8_MATRIX,
    ),
    "m3, fp8": _published(
        (),
        {**FP8, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head", *_VISION]},
        60,
        experts=fp8_blocks,
        others=fp8_blocks,
    ),
    "m3, nvfp4 of ModelOpt": _published(
        ("nvidia/MiniMax-M3-NVFP4",),
        {"quant_method": "modelopt", **_MIXED},
        28,
        experts=nvfp4("weight", "weight_scale_2", "input_scale", ()),
        others=_MODELOPT_MXFP8,
    ),
    "m3, nvfp4 experts": _published(
        ("Mapika/MiniMax-M3-NVFP4",),  # assumed: the description has the fields of NVIDIA's for M2
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4",
            "ignore": ["*lm_head", *_VISION, *_EACH_GATE, *_DENSE, "*self_attn*"],
        },
        28,
        experts=nvfp4("weight", "weight_scale_2", "input_scale", ()),
        shared=nvfp4("weight", "weight_scale_2", "input_scale", ()),
    ),
    "m3, mxfp4 and mxfp8": _published(
        # assumed: it leaves the same modules plain as similar checkpoints
        ("olka-fi/MiniMax-M3-MXFP4",),
        _mx_groups(),
        30,
        experts=_mx("weight_packed", "U8", 2, "weight_scale"),
        others=_MODELOPT_MXFP8,
    ),
    "m3, auto-round": _published(
        # assumed: all linear layers but the routers are packed
        ("bullerwins/MiniMax-M3-4bit-W4A16",),
        {
            "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
            "group_size": 128, "sym": True, "data_type": "int",
            "block_name_to_quantize": "language_model.model.layers",
            "extra_config": {name: {"bits": 16, "data_type": "float"} for name in _EACH_GATE},
        },
        46,
        experts=gptq(128),
        others=gptq(128),
        router="BF16",
    ),
    "m3, int4, asymmetric": _published(
        ("cyankiwi/MiniMax-M3-AWQ-INT4",),  # assumed: groups of 128 columns
        compressed(
            "pack-quantized",
            {"strategy": "group", "group_size": 128, "symmetric": False},
            ignore=[*_GATES, "re:.*self_attn.*"],
        ),
        46,
        experts=packed(4, 128, symmetric=False),
        dense=packed(4, 128, symmetric=False),
        shared=packed(4, 128, symmetric=False),
        router="BF16",
    ),
    "m3, mxfp4 of Quark": _published(
        ("amd/MiniMax-M3-MXFP4",),
        {
            "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None,
            "global_quant_config": {
                "weight": {**_MXFP4, "is_dynamic": False},
                "input_tensors": {**_MXFP4, "is_dynamic": True},
                "output_tensors": None, "bias": None, "target_device": None,
            },
            "exclude": [
                "language_model.lm_head", *_VISION, *_EACH_GATE, *_ATTENTION, *_INDEX, *_DENSE,
            ],
            "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
            "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
        },
        30,
        experts=_MXFP4_MATRIX,
        shared=_MXFP4_MATRIX,
    ),
    "m3, modelslim": _published(
        ("Eco-Tech/MiniMax-M3-w8a8",),  # assumed: plain indexers
        None,
        110,
        stem="quant_model_weights",
        experts=modelslim,
        others=modelslim,
        index=plain,
        side_files={
            "quant_model_description.json": {
                "version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", "group_size": 0,
                "metadata": {},
                **{
                    f"{name}.weight": "W8A8_DYNAMIC"
                    for name in (*_ATTENTION, *_DENSE, *_SHARED, *_ROUTED)
                },
                **{f"{name}.weight": "FLOAT" for name in (*_INDEX, *_EACH_GATE)},
            },
        },
    ),
}  # fmt: skip
