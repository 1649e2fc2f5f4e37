"""Block drafts (DSpark, DFlash): the spec, the reader of config.json, and the published draft.

A field with the prefix `dspark_` replaces the field of the same name without the prefix. If one
config.json describes draft and target, fields without the prefix describe the target. In
config.json, layer number L selects the output of target layer L, counted from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from negamax.base.errors import ConfigError
from negamax.config import fields
from negamax.config.fields import refuse
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.config.quantization import QuantizationSpec
from negamax.models.drafts import NO_TOKENS, DraftFamily, DraftSpec, read_layers
from negamax.models.minimax_m2.config import PUBLISHED

DSPARK, DFLASH = "DSparkMiniMaxDraftModel", "DFlashDraftModel"
_DSPARK_NAMES = (DSPARK, "Qwen3DSparkModel", "DSparkDraftModel")
_PREFIX = "dspark_"
_NESTED = ("dflash_config", "dspark_config")
_SLIDING, _FULL = "sliding_attention", "full_attention"

_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hybrid_context_fusion": False,
    "sparse_attention_config": None,
    "markov_head_type": "vanilla",
    "qk_norm_type": "per_head",
    "use_qk_norm": True,
    "use_dense_ffn": True,
    "attention_mode": "gqa",
}
_PER_LAYER = {"moe_layer_freq": 0}
_OF_MINIMAX = {"use_gemma_norm": True, "swiglu_beta": 1.0}
_OF_DFLASH = {
    "projector_type": "dflash",
    "markov_rank": 0,
    "enable_confidence_head": False,
    "selector_rank": None,  # only DFlash2 sets this field
}
# fields that describe the target if one config.json describes both draft and target
_OF_TARGET = {
    "num_hidden_layers", "intermediate_size", "dense_intermediate_size", "layer_types",
    "sliding_window", "use_sliding_window", "sparse_attention_config", *_PER_LAYER,
}  # fmt: skip
# `_SPELLINGS`: each row lists spellings of a config.json field, of which this module uses the first
_SPELLINGS = (
    ("mask_token_id", "noise_token_id"),
    ("intermediate_size", "dense_intermediate_size", "ffn_hidden_size"),
    ("num_hidden_layers", "num_layers"),
)
_READ = {
    "block_size", "causal", "confidence_head_with_markov", "draft_vocab_size",
    "enable_confidence_head", "hidden_act", "layer_types", "markov_rank", "num_target_layers",
    "sliding_window", "swa_window_size", "swiglu_alpha", "swiglu_limit", "target_hidden_size",
    "target_layer_ids", "text_config", "tie_word_embeddings", "use_sliding_window", "use_swa",
    *_NESTED, *(name for names in _SPELLINGS for name in names),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BlockDraftSpec(DraftSpec):
    """A decoder that reads the context from its KV cache and runs all tokens of a block at once."""

    own_head: bool = False
    block_size: int  # tokens per block: the last known token, then mask tokens
    mask_token_id: int
    samples_anchor: bool  # Whether block token j proposes the token at position j + 1, not j.
    markov_rank: int = 0  # Rank of matrices that map the previous token to logit biases; 0: none.
    confidence_width: int = 0  # Input width of the head that estimates draft acceptance; 0: none.
    windows: tuple[int, ...]  # Sliding window of each layer, in tokens; 0: full attention.
    is_causal: bool = False  # Whether tokens of a block do not attend to later tokens.
    intermediate_size: int
    swiglu: tuple[float, float | None, float] = (1.0, None, 0.0)  # `SwiGlu`: alpha, limit, beta.
    is_gemma: bool = False  # Whether norms multiply by 1 + w.

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("intermediate_size")
        if not 2 <= self.block_size <= 16:
            refuse("block_size", self.block_size, "2 to 16")
        if not 0 <= self.mask_token_id < self.vocab_size:
            refuse("mask_token_id", self.mask_token_id, f"0 to {self.vocab_size - 1}")
        if len(self.windows) != self.num_layers:
            refuse("layer_types", self.windows, f"{self.num_layers} entries, one per layer")
        for tokens in self.windows:
            if 0 < tokens < self.block_size:
                refuse("sliding_window", tokens, f"block_size ({self.block_size}) or more")
        if self.is_rotated_back:
            raise ConfigError(
                "block drafts do not support a model with rotated weights (QuaRot)",
                hint="use a draft of method eagle3",
            )

    @property
    def most_tokens(self) -> int:
        return self.block_size if self.samples_anchor else self.block_size - 1

    def kv_caches(self) -> KvCacheSpecs:
        """Return the KV caches of the context. Keys and values of block tokens are not cached."""
        return [
            [
                KvCacheSpec(name, self.num_kv_heads, self.head_dim, most_read_tokens=tokens or None)
                for name in ("k", "v")
            ]
            for tokens in self.windows
        ]

    def mlp_widths(self) -> Mapping[str, int]:
        return {
            "draft's intermediate_size": self.intermediate_size,
            "input width of the draft's fc": self.num_aux * self.target_hidden_size,
        }


def read_spec(config: Mapping[str, Any], *, architecture: str) -> BlockDraftSpec:
    """Read the spec from a parsed config.json. Raises `ConfigError` for an invalid field."""
    family = FAMILIES[architecture]
    named = config.get("architectures")
    is_own = isinstance(named, list) and len(named) == 1 and named[0] in family.architectures
    flat = _flatten(config, is_own=is_own)
    if not is_own and f"{_PREFIX}block_size" not in _text(config):
        refuse("architectures", named, " or ".join(f"[{n!r}]" for n in family.architectures))
    is_minimax = named == [DSPARK] or not is_own
    notes: list[str] = []
    common = fields.read_common(
        flat,
        default_theta=5_000_000.0 if is_minimax else 10_000.0,
        rotates_fully=not is_minimax,
        notes=notes,
    )
    fixed = _FIXED | (_OF_MINIMAX if is_minimax else {})
    fields.check_fixed(flat, fixed | (_OF_DFLASH if architecture == DFLASH else {}))
    activations = ("swigluoai", "silu") if is_minimax else ("silu",)  # MiniMax's files use both
    if flat.get("hidden_act", "silu") not in activations:
        refuse("hidden_act", flat["hidden_act"], " or ".join(map(repr, activations)))
    fields.check_fixed(flat, {"draft_vocab_size": common["vocab_size"]})
    fields.check_per_layer(flat, _PER_LAYER, num_layers=common["num_layers"])
    if is_own:
        fields.note_unknown(flat, {*_READ, *fixed, *_OF_DFLASH, *_PER_LAYER}, notes=notes)

    outputs = read_layers("target_layer_ids", flat.get("target_layer_ids"))
    layers = tuple(number + 1 for number in outputs)  # output i is input i + 1
    samples_anchor = architecture == DSPARK
    block_size = fields.read_size(flat, "block_size")
    markov_rank = fields.read_size(flat, "markov_rank") if samples_anchor else 0
    minimax: dict[str, Any] = {}
    if is_minimax:
        names = ("swiglu_alpha", "swiglu_limit")
        alpha, limit = (fields.read_required_number(flat, name) for name in names)
        minimax = {"swiglu": (alpha, limit, 1.0), "is_gemma": True}
    return BlockDraftSpec(
        architecture=architecture,
        **common | NO_TOKENS,
        target_hidden_size=fields.read_optional_size(
            flat, "target_hidden_size", common["hidden_size"]
        ),
        aux_layers=layers,
        num_aux=len(layers),
        target_num_layers=fields.read_optional_size(flat, "num_target_layers", None),
        speculative_tokens=block_size if samples_anchor else block_size - 1,
        block_size=block_size,
        mask_token_id=fields.read_size(flat, "mask_token_id", least=0),
        samples_anchor=samples_anchor,
        markov_rank=markov_rank,
        confidence_width=_read_confidence_width(flat, common["hidden_size"], markov_rank),
        windows=_read_windows(flat, common["num_layers"]),
        is_causal=fields.read_switch(flat, "causal"),
        intermediate_size=fields.read_size(flat, "intermediate_size"),
        notes=tuple(notes),
        **minimax,
    )


def holds_dspark(config: Mapping[str, Any]) -> bool:
    """Return whether a target's config.json also describes a DSpark draft in the same files."""
    return f"{_PREFIX}block_size" in _text(config)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config") or {}
    if not isinstance(nested, Mapping):
        refuse("text_config", nested, "an object or null")
    return {**config, **nested}


def _flatten(config: Mapping[str, Any], *, is_own: bool) -> dict[str, Any]:
    """Merge nested objects into the top level, and add the main spelling of each field.

    If `is_own` is false, `config` is the target's, and the target's layer sizes are ignored.
    """
    flat = {name: value for name, value in _text(config).items() if value is not None}
    own = {
        name.removeprefix(_PREFIX): value
        for name, value in flat.items()
        if name.startswith(_PREFIX) and name not in _NESTED
    }
    if unknown := fields.list_unknown(own, {*_READ, *_FIXED, *_OF_MINIMAX}):
        name = f"{_PREFIX}{unknown[0]}"
        refuse(name, flat[name], "configs without it; update Negamax, or serve without drafts")
    for name in _NESTED:
        nested = flat.get(name) or {}
        if not isinstance(nested, Mapping):
            refuse(name, nested, "an object or null")
        flat, own = (fields.merge_fields(each, nested, inner=name) for each in (flat, own))
    if not is_own:
        flat = {name: value for name, value in flat.items() if name not in _OF_TARGET}
    flat = {name: value for name, value in flat.items() if not name.startswith(_PREFIX)} | own
    for name, *others in _SPELLINGS:
        for other in others:
            if other in own or (other in flat and name not in own):
                flat = {**flat, name: flat[other]}
    return flat


def _read_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer in tokens, or 0 for full attention."""
    types = config.get("layer_types")
    slides = any(fields.read_switch(config, name) for name in ("use_swa", "use_sliding_window"))
    slides |= config.get("swa_window_size") is not None and config.get("use_swa") is None
    if types is None:
        types = [_SLIDING if slides else _FULL] * num_layers
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        refuse("layer_types", types, f"{num_layers} entries, one per layer")
    for layer, kind in enumerate(types):
        if kind not in (_SLIDING, _FULL):
            refuse(f"layer_types[{layer}]", kind, f"{_SLIDING!r} or {_FULL!r}")
    if _SLIDING not in types:
        return (0,) * num_layers
    name = "swa_window_size" if config.get("swa_window_size") is not None else "sliding_window"
    tokens = fields.read_size(config, name)
    return tuple(tokens if kind == _SLIDING else 0 for kind in types)


def _read_confidence_width(config: Mapping[str, Any], hidden_size: int, markov_rank: int) -> int:
    name = "confidence_head_with_markov"
    with_markov = fields.read_switch({name: True, **config}, name)
    if not fields.read_switch(config, "enable_confidence_head"):
        return 0
    return hidden_size + markov_rank if with_markov else hidden_size


# the draft model of MiniMax-M3.1-Flash
_M31 = BlockDraftSpec(
    **PUBLISHED | NO_TOKENS,
    architecture=DSPARK,
    hidden_size=6144,
    target_hidden_size=6144,
    num_layers=5,
    num_heads=64,
    num_kv_heads=4,
    max_position_embeddings=1_048_576,
    quantization=QuantizationSpec("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    aux_layers=(4, 18, 32, 46, 60),
    num_aux=5,
    speculative_tokens=7,
    block_size=7,
    mask_token_id=200_058,
    samples_anchor=True,
    markov_rank=256,
    confidence_width=6144 + 256,
    windows=(4096,) * 5,
    intermediate_size=12_288,
    swiglu=(1.702, 7.0, 1.0),
    is_gemma=True,
)
_COMMON: dict[str, Any] = {
    "model_types": ("qwen3", "minimax_m3"),
    "package": "negamax.models.dspark",
    "spec": BlockDraftSpec,
}
FAMILIES = {
    DSPARK: DraftFamily(
        method="dspark",
        architecture=DSPARK,
        architectures=_DSPARK_NAMES,
        read_spec=partial(read_spec, architecture=DSPARK),
        bundled={"minimax-m3.1-dspark": _M31},
        **_COMMON,
    ),
    DFLASH: DraftFamily(
        method="dflash",
        architecture=DFLASH,
        architectures=(DFLASH,),
        read_spec=partial(read_spec, architecture=DFLASH),
        **_COMMON,
    ),
}
