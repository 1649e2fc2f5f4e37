"""MiniMax-M3: the spec, its reader, and the published model.

The reader accepts the config.json that MiniMax or transformers writes for a vision-language model
or for a text model. A vision-language config describes the text model in `text_config`. Unknown
fields are logged, except in `sparse_attention_config`, where they are errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from negamax.base.errors import ConfigError
from negamax.config import fields, spellings
from negamax.config.fields import refuse
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.config.model_spec import MoeSpec
from negamax.config.quantization import QuantizationSpec
from negamax.config.vision import VisionSpec
from negamax.models.family import ModelFamily
from negamax.models.minimax_m2 import config as minimax_m2
from negamax.models.minimax_m2.config import FIXED, PUBLISHED, read_experts
from negamax.models.minimax_m3.chat import MINIMAX_M3_FAMILY

T = TypeVar("T")

VISION_ARCHITECTURE = "MiniMaxM3SparseForConditionalGeneration"
VISION_TYPE = "minimax_m3_vl"
# transformers uses the second name.
TEXT_ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM")
TEXT_TYPES = ("minimax_m3_vl_text", "minimax_m3_text", "minimax_m3")
BLOCK_SIZES = (16, 32, 64, 128)  # Supported block sizes of sparse attention, in tokens.
MAX_TOPK_BLOCKS = 1024  # Maximum blocks that sparse attention selects per token.

_FIXED = {**FIXED, "qk_norm_type": "per_head", "use_gemma_norm": True, "swiglu_beta": 1.0}
# transformers writes "silu" for SwiGLU-OAI.
_ACTIVATIONS = ("swigluoai", "silu")

_READ = {
    "dense_intermediate_size", "first_k_dense_replace", "hidden_act", "index_block_size",
    "index_head_dim", "index_local_blocks", "index_n_heads", "index_topk_blocks",
    "intermediate_size", "layer_types", "mlp_layer_types", "moe_intermediate_size",
    "moe_layer_freq", "n_shared_experts", "num_experts_per_tok", "num_local_experts",
    "routed_scaling_factor", "shared_intermediate_size", "sparse_attention_config",
    "swiglu_alpha", "swiglu_limit",
}  # fmt: skip
# `_AROUND`: known fields of config.json beside `text_config`, some of them for images or videos
_AROUND = {
    "image_grid_pinpoints", "image_seq_length", "image_token_index",
    "img_token_compression_config", "merged_hidden_size", "multimodal_projector_bias",
    "num_reward_heads", "process_image_mode", "projector_hidden_act", "projector_hidden_size",
    "text_config", "tie_word_embeddings", "video_token_index", "vision_config",
    "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip
_SPARSE = {
    "sparse_attention_freq", "sparse_block_size", "sparse_disable_index_value", "sparse_index_dim",
    "sparse_init_block", "sparse_init_tokens", "sparse_local_block", "sparse_local_tokens",
    "sparse_num_index_heads", "sparse_score_type", "sparse_topk_blocks", "use_sparse_attention",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSpec:
    """Block-sparse attention: the query heads of each KV head attend to `topk_blocks` blocks.

    The index head of a KV head selects the blocks with the highest scores. The first `init_blocks`
    and the last `local_blocks` blocks are always selected.
    """

    index_heads: int  # number of index heads, one for each KV head
    index_dim: int
    topk_blocks: int
    block_size: int  # tokens per block
    init_blocks: int
    local_blocks: int
    layers: tuple[bool, ...]  # For each layer, whether its attention is sparse.
    # `is_sharded`: whether each rank computes the index queries of all heads and stores a shard of
    # the index keys. The engine sets this field.
    is_sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Spec(MoeSpec):
    """Layers have full or block-sparse attention, and a dense MLP or experts."""

    supports_dcp: ClassVar[bool] = True

    routed_scaling_factor: float
    shared_width: int  # Width of the shared expert; 0: no shared expert.
    dense_width: int  # Width of the MLP in layers without experts; 0: no such layers.
    swiglu_alpha: float
    swiglu_limit: float
    moe_layers: tuple[bool, ...]  # For each layer, whether it has experts.
    sparse: SparseAttentionSpec | None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("routed_scaling_factor", "swiglu_alpha", "swiglu_limit"):
            if not 0.0 < getattr(self, name) < float("inf"):
                refuse(name, getattr(self, name), "a finite number above 0")
        self._check_layers("moe_layer_freq", self.moe_layers)
        if self.sparse is not None:
            self._check_sparse(self.sparse)

    def _check_layers(self, name: str, layers: Sequence[object]) -> None:
        if len(layers) != self.num_layers:
            refuse(name, layers, f"{self.num_layers} entries, one per layer")

    def _check_sparse(self, sparse: SparseAttentionSpec) -> None:
        self._check_layers("sparse_attention_freq", sparse.layers)
        if sparse.index_heads != self.num_kv_heads:
            heads = f"as many as num_key_value_heads ({self.num_kv_heads})"
            refuse("sparse_num_index_heads", sparse.index_heads, heads)
        if sparse.index_dim < self.rotary_dim:
            refuse("sparse_index_dim", sparse.index_dim, f"rotary_dim ({self.rotary_dim}) or more")
        if sparse.block_size not in BLOCK_SIZES:
            refuse("sparse_block_size", sparse.block_size, ", ".join(map(str, BLOCK_SIZES)))
        if sparse.local_blocks < 1:
            refuse("sparse_local_block", sparse.local_blocks, "1 or more")
        if sparse.init_blocks < 0:
            refuse("sparse_init_block", sparse.init_blocks, "0 or more")
        if sparse.topk_blocks > MAX_TOPK_BLOCKS:
            refuse("sparse_topk_blocks", sparse.topk_blocks, f"at most {MAX_TOPK_BLOCKS}")
        if sparse.init_blocks + sparse.local_blocks > sparse.topk_blocks:
            forced = f"at least the {sparse.init_blocks} first and {sparse.local_blocks} last"
            refuse("sparse_topk_blocks", sparse.topk_blocks, f"{forced} blocks")

    def first_layers(self, num_layers: int) -> Self:
        sparse = self.sparse and replace(self.sparse, layers=self.sparse.layers[:num_layers])
        moe_layers = self.moe_layers[:num_layers]
        return replace(self, num_layers=num_layers, moe_layers=moe_layers, sparse=sparse)

    def shard_index(self) -> Self:
        return replace(self, sparse=self.sparse and replace(self.sparse, is_sharded=True))

    def kv_caches(self) -> KvCacheSpecs:
        """Return the key and value caches, and in sparse layers the cache of index keys."""
        full = [KvCacheSpec(name, self.num_kv_heads, self.head_dim) for name in ("k", "v")]
        if self.sparse is None:
            return [full] * self.num_layers
        dense_tokens = self.sparse.topk_blocks * self.sparse.block_size
        selected = [replace(cache, most_read_tokens=dense_tokens) for cache in full]
        index = KvCacheSpec(
            "index", 1, self.sparse.index_dim,
            block_tokens=self.sparse.block_size,
            replicated=True,
            is_sharded=self.sparse.is_sharded,
            is_index=True,
            unread_tokens=dense_tokens,
        )  # fmt: skip
        return [[*selected, index] if is_sparse else full for is_sparse in self.sparse.layers]

    def mlp_widths(self) -> Mapping[str, int]:
        widths = {"dense": self.dense_width, "shared": self.shared_width}
        return {f"{name}_intermediate_size": width for name, width in widths.items() if width}


def read_vision(config: Mapping[str, Any]) -> MiniMaxM3Spec:
    """Read the text model's spec from a vision-language config. Raises `ConfigError`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        refuse("text_config", text, "an object, which describes the text model")
    for name, allowed in (("architectures", TEXT_ARCHITECTURES), ("model_type", TEXT_TYPES)):
        value = text.get(name) or None
        only = value[0] if isinstance(value, list) and len(value) == 1 else value
        is_known = only in allowed or (name == "model_type" and only in spellings.TEXT_TYPES)
        if value is not None and not is_known:
            refuse(f"text_config.{name}", value, ", ".join(allowed))
    fields.check_fixed(config, {"tie_word_embeddings": False})
    spec = read_text(text_config(config), architecture=VISION_ARCHITECTURE)
    notes = list(spec.notes)
    fields.note_unknown(config, _AROUND, notes=notes)
    vision = _read_tower(config, spec, notes)
    return replace(spec, vision=vision, notes=tuple(notes))


def _read_tower(
    config: Mapping[str, Any], text: MiniMaxM3Spec, notes: list[str]
) -> VisionSpec | None:
    """Read the sizes of the vision tower and projector, named as by MiniMax or transformers.

    Return None if `vision_config` is missing or the vocabulary has no image token.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping | None):
        refuse("vision_config", tower, "an object or null")
    image_token = config.get("image_token_index", 200_025)
    if not tower:
        return None
    if not isinstance(image_token, int) or not 0 <= image_token < text.vocab_size:
        notes.append(
            f"config.json: image_token_index {image_token} is not in the vocabulary of "
            f"{text.vocab_size} tokens; the model is served without images"
        )
        return None
    fixed = {
        "hidden_act": "gelu",
        "num_channels": 3,
        "rope_mode": "3d",
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
    }
    fields.check_fixed(tower, fixed)
    around = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}
    fields.check_fixed(config, {**around, "vision_feature_layer": -1})
    sizes = {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        **(config.get("img_token_compression_config") or {}),
        **(tower.get("img_token_compression_config") or {}),
        **tower,
        **(tower.get("rope_parameters") or {}),
    }
    return VisionSpec(
        hidden_size=fields.read_size(sizes, "hidden_size"),
        num_layers=fields.read_size(sizes, "num_hidden_layers"),
        num_heads=fields.read_size(sizes, "num_attention_heads"),
        intermediate_size=fields.read_size(sizes, "intermediate_size"),
        patch_size=fields.read_size(sizes, "patch_size"),
        spatial_merge_size=fields.read_size(sizes, "spatial_merge_size"),
        temporal_patch_size=fields.read_size(sizes, "temporal_patch_size"),
        projector_hidden_size=fields.read_size(
            {"projector_hidden_size": text.hidden_size, **config}, "projector_hidden_size"
        ),
        text_hidden=text.hidden_size,
        rope_theta=fields.read_required_number(sizes, "rope_theta"),
        layer_norm_eps=fields.read_required_number(sizes, "layer_norm_eps"),
        image_token_id=image_token,
        # the ids of the image start and image end tokens follow the ids of image and video tokens
        image_start_id=image_token + 4,
        image_end_id=image_token + 5,
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the config.json of the text model from that of a vision-language model."""
    text = {name: value for name, value in config["text_config"].items() if value is not None}
    around = ("bos_token_id", "eos_token_id", "quantization_config")
    dtypes = (of.get(name) for of in (text, config) for name in ("dtype", "torch_dtype"))
    return {
        **{name: config[name] for name in around if config.get(name) is not None},
        **text,
        "model_type": text["model_type"] if text.get("model_type") in TEXT_TYPES else TEXT_TYPES[0],
        "architectures": [TEXT_ARCHITECTURES[0]],
        "dtype": next((dtype for dtype in dtypes if dtype is not None), None),
    }


def read_text(config: Mapping[str, Any], *, architecture: str) -> MiniMaxM3Spec:
    """Read the spec from the config.json of a text model. Raises `ConfigError`."""
    notes: list[str] = []
    config = {name: value for name, value in config.items() if value is not None}
    # Without partial_rotary_factor, transformers ignores the rotary_dim that `read_common` reads.
    common = fields.read_common(config, default_theta=5_000_000.0, notes=notes)
    num_layers = common["num_layers"]
    fields.check_fixed(config, _FIXED)
    if (activation := config.get("hidden_act", "swigluoai")) not in _ACTIVATIONS:
        refuse("hidden_act", activation, " or ".join(map(repr, _ACTIVATIONS)))
    experts = read_experts(config)
    fields.check_fixed(config, {"moe_intermediate_size": experts["expert_width"]})
    moe_layers = _read_moe_layers(config, num_layers)
    fields.note_unknown(config, {*_READ, *_FIXED}, notes=notes)
    return MiniMaxM3Spec(
        architecture=architecture,
        **common,
        **experts,
        routed_scaling_factor=fields.read_required_number(config, "routed_scaling_factor"),
        shared_width=_read_shared_width(config),
        dense_width=0 if all(moe_layers) else fields.read_size(config, "dense_intermediate_size"),
        swiglu_alpha=fields.read_required_number(config, "swiglu_alpha"),
        swiglu_limit=fields.read_required_number(config, "swiglu_limit"),
        moe_layers=moe_layers,
        sparse=_read_sparse(config, num_layers),
        notes=tuple(notes),
    )


def _read_shared_width(config: Mapping[str, Any]) -> int:
    """Read the width of the shared expert. The width is 0 if `n_shared_experts` is 0."""
    experts = config.get("n_shared_experts", 1)
    if experts not in (0, 1) or isinstance(experts, bool):
        refuse("n_shared_experts", experts, "0 or 1")
    width = config.get("shared_intermediate_size")
    if experts == 0 or width == 0:
        fields.check_fixed(config, {"shared_intermediate_size": 0})
        fields.check_fixed(config, {"n_shared_experts": 0})
        return 0
    return fields.read_size(config, "shared_intermediate_size")


def _read_moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts. By default all layers have experts."""
    found = {
        **_read_layers(config, "moe_layer_freq", (0, 1), num_layers),
        **_read_layers(config, "mlp_layer_types", ("dense", "sparse"), num_layers),
    }
    if "first_k_dense_replace" in config:
        dense = fields.read_size(config, "first_k_dense_replace", least=0)
        found["first_k_dense_replace"] = tuple(layer >= dense for layer in range(num_layers))
    return _agree(found, (True,) * num_layers)


def _read_sparse(config: Mapping[str, Any], num_layers: int) -> SparseAttentionSpec | None:
    """Read `sparse_attention_config`, or the fields into which transformers converts it."""
    given = config.get("sparse_attention_config")
    if not isinstance(given, Mapping | None):
        refuse("sparse_attention_config", given, "an object or null")
    given = given or {}
    for name in sorted(set(given) - _SPARSE):
        refuse(f"sparse_attention_config.{name}", given[name], ", ".join(sorted(_SPARSE)))
    fields.check_fixed(given, {"sparse_score_type": "max"})
    found = {
        **_read_layers(given, "sparse_attention_freq", (0, 1), num_layers),
        **_read_layers(config, "layer_types", ("full_attention", "minimax_m3_sparse"), num_layers),
    }
    if given and not found:
        raise ConfigError("sparse_attention_config has no sparse_attention_freq, which is required")
    layers = _agree(found, ())
    fields.check_fixed(given, {"use_sparse_attention": any(layers)})
    if not any(layers):
        return None
    for flags in _read_layers(given, "sparse_disable_index_value", (0, 1), num_layers).values():
        for layer in range(num_layers):
            if layers[layer] and not flags[layer]:
                refuse(f"sparse_disable_index_value[{layer}]", 0, "1 in a sparse layer")

    def size(name: str, flat: str) -> int:
        sources = {name: given, flat: config}
        found = {name: fields.read_size(of, name) for name, of in sources.items() if name in of}
        return _agree(found, None) or fields.read_size(given, name)

    block_size = size("sparse_block_size", "index_block_size")
    return SparseAttentionSpec(
        index_heads=size("sparse_num_index_heads", "index_n_heads"),
        index_dim=size("sparse_index_dim", "index_head_dim"),
        topk_blocks=size("sparse_topk_blocks", "index_topk_blocks"),
        block_size=block_size,
        init_blocks=_read_forced(given, "init", block_size),
        local_blocks=_read_forced({**given, **config}, "local", block_size),
        layers=layers,
    )


def _read_forced(given: Mapping[str, Any], which: str, block_size: int) -> int:
    """Read how many of the first or last blocks are always selected. SGLang's config may give the
    number of tokens instead of blocks, and the last tokens may begin inside a block.
    """
    own = int(which == "local")  # the local blocks include the query token's block
    names = (f"sparse_{which}_block", f"index_{which}_blocks")
    stated = [name for name in names if given.get(name) is not None]
    found = {name: fields.read_size(given, name, least=0) for name in stated}
    tokens = f"sparse_{which}_tokens"
    if given.get(tokens) is not None:
        count = fields.read_size(given, tokens, least=0)
        found[f"{tokens} {count} in blocks"] = -(-count // block_size) + own
    return _agree(found, own)


def _read_layers(
    config: Mapping[str, Any], name: str, values: tuple[object, object], num_layers: int
) -> dict[str, tuple[bool, ...]]:
    """Return {name: whether each layer's entry is `values[1]`}; {} if there is no list `name`."""
    given = config.get(name)
    if given is None:
        return {}
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        refuse(name, given, f"{num_layers} entries, one per layer")
    for layer, entry in enumerate(given):
        if isinstance(entry, bool) or entry not in values:
            refuse(f"{name}[{layer}]", entry, " or ".join(map(repr, values)))
    return {name: tuple(entry == values[1] for entry in given)}


def _agree(found: Mapping[str, T], default: T) -> T:
    """Return the common value of the fields in `found`, or raise `ConfigError` if they differ."""
    (first, value), *others = found.items() if found else [("", default)]
    for name, other in others:
        if other != value:
            refuse(name, other, f"the value of {first}, {value}")
    return value


_AFTER_DENSE = (False,) * 3 + (True,) * 57
_SPARSE_M3 = SparseAttentionSpec(
    index_heads=4,
    index_dim=128,
    topk_blocks=16,
    block_size=128,
    init_blocks=0,
    local_blocks=1,
    layers=_AFTER_DENSE,
)
_M3_TEXT = MiniMaxM3Spec(
    **PUBLISHED,
    architecture=VISION_ARCHITECTURE,
    hidden_size=6144,
    num_layers=60,
    num_heads=64,
    num_kv_heads=4,
    max_position_embeddings=1_048_576,
    expert_width=3072,
    num_experts=128,
    experts_per_token=4,
    routed_scaling_factor=2.0,
    shared_width=3072,
    dense_width=12_288,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    moe_layers=_AFTER_DENSE,
    sparse=_SPARSE_M3,
    quantization=None,
)
# Except hidden_size, M3's vision tower has the default sizes of `_read_tower`.
_M3 = replace(_M3_TEXT, vision=_read_tower({"vision_config": {"hidden_size": 1280}}, _M3_TEXT, []))
_MXFP8 = QuantizationSpec("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]})
_M31_FLASH = replace(
    _M3,
    sparse=replace(_SPARSE_M3, layers=(True,) * 60),
    quantization=QuantizationSpec(
        "mxfp8",
        {
            "quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic",
            "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized",
            "group_size": 16, "kv_cache_quant_algo": "FP8", "attention_quant_algo": "FP8",
            "index_k_quant_type": "nvfp4",
        },
    ),
)  # fmt: skip
_FAMILY = ModelFamily(
    architecture=VISION_ARCHITECTURE,
    model_types=(VISION_TYPE,),
    package="negamax.models.minimax_m3",
    spec=MiniMaxM3Spec,
    read_spec=read_vision,
    own_config=text_config,
    chat=MINIMAX_M3_FAMILY,
    sampling=minimax_m2.FAMILY.sampling,
    bundled={
        "minimax-m3": _M3,
        "minimax-m3-mxfp8": replace(_M3, quantization=_MXFP8),
        "minimax-m3.1-flash": _M31_FLASH,
    },
    embedded="nano-m3",
)
_TEXT_FAMILIES = (
    replace(
        _FAMILY,
        architecture=name,
        model_types=TEXT_TYPES,
        read_spec=partial(read_text, architecture=name),
        own_config=dict,
        bundled={},
    )
    for name in TEXT_ARCHITECTURES
)
FAMILIES = (_FAMILY, *_TEXT_FAMILIES)
