"""What a model is: the frozen `ModelSpec`, read from a checkpoint's config.json field by field, and
the bundled specs.

Nothing is guessed: a field whose value changes the computation is either supported, or refused by
name with the value found and the values allowed. Fields that cannot matter for inference are
ignored; names never heard of are listed in `ModelSpec.notes` for the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from negamax.base.errors import ConfigError
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs

MINIMAX_M2 = "MiniMaxM2ForCausalLM"
FP8_BLOCK = (128, 128)  # rows, columns of a weight that share one scale

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_SIZE = 2**31 - 1

# Sizes: always present in a real config, so a missing one is an error and not a default.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "intermediate_size": "intermediate_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}

# Fields that change the computation and have exactly one supported value (MiniMax's, or "the
# feature is off").
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "tie_word_embeddings": False,
    "shared_intermediate_size": 0,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "use_gemma_norm": False,
    "attention_output_gate": False,
    "postnorm": False,
    "layernorm_full_attention_alpha": 1.0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 1.0,
    "layernorm_mlp_beta": 1.0,
}
# The same, where the one supported value is null.
_NULL_ONLY = (
    "sliding_window",
    "swiglu_limit",
    "sparse_attention_config",
    "compression_config",
    "vision_config",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
# Lists with one entry per layer (or one value for all), each of which must be this value.
_PER_LAYER: dict[str, Any] = {
    "attn_type_list": 1,
    "layer_types": "full_attention",
    "moe_layer_freq": 1,
}

# Read elsewhere in this module, or without any influence on inference.
_READ = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "model_type", "partial_rotary_factor",
    "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "rotary_dim", "torch_dtype",
}  # fmt: skip
_IGNORED = {
    "_name_or_path", "attention_dropout", "auto_map", "chunk_size_feed_forward", "id2label",
    "initializer_range",
    "is_encoder_decoder", "label2id", "mlp_intermediate_size", "mtp_transformer_layers",
    "num_mtp_modules",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id",
    "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "shared_moe_mode",
    "transformers_version", "use_cache", "use_mtp",
}  # fmt: skip


@dataclass(frozen=True)
class QuantizationSpec:
    """How the checkpoint stores its linear weights. Only "fp8" exists now: e4m3, one fp32
    multiplier per block.
    """

    method: str
    weight_block_size: tuple[int, int]  # rows, columns
    # parts of module names that are stored unquantised
    modules_to_not_convert: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and constants of one model. Errors: `ConfigError` for sizes that cannot belong
    together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of each head that rotate
    rope_theta: float
    max_position_embeddings: int  # tokens
    intermediate_size: int  # of one expert
    num_experts: int
    experts_per_token: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str  # of the unquantised weights: bfloat16, float16 or float32
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationSpec | None
    # for the log: what was ignored or assumed
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in _SIZES.values():
            value = getattr(self, name)
            if not 1 <= value <= _MAX_SIZE:
                _refuse(name, value, f"1 to {_MAX_SIZE}")
        if self.num_heads % self.num_kv_heads:
            _refuse(
                "num_key_value_heads",
                self.num_kv_heads,
                f"a divisor of num_attention_heads ({self.num_heads})",
            )
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            _refuse(
                "rotary_dim",
                self.rotary_dim,
                f"an even number from 2 to head_dim ({self.head_dim})",
            )
        if self.experts_per_token > self.num_experts:
            _refuse(
                "num_experts_per_tok",
                self.experts_per_token,
                f"at most num_local_experts ({self.num_experts})",
            )
        if not 0.0 < self.rms_norm_eps < 1.0:
            _refuse("rms_norm_eps", self.rms_norm_eps, "above 0 and below 1")
        if not 1.0 < self.rope_theta < float("inf"):
            _refuse("rope_theta", self.rope_theta, "a finite number above 1")
        for token_id in (
            *self.eos_token_ids,
            *(() if self.bos_token_id is None else (self.bos_token_id,)),
        ):
            if not 0 <= token_id < self.vocab_size:
                _refuse(
                    "bos_token_id / eos_token_id",
                    token_id,
                    f"0 to vocab_size - 1 ({self.vocab_size - 1})",
                )

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model (228,689,764,864 for MiniMax-M2)."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size) + q_size + kv_size
        router = self.num_experts * self.hidden_size + self.num_experts
        experts = 3 * self.num_experts * self.hidden_size * self.intermediate_size
        layer = attention + router + experts + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + 2 * self.vocab_size * self.hidden_size

    def kv_caches(self) -> KvCacheSpecs:
        """The caches of each layer."""
        return [
            [KvCacheSpec(name, self.num_kv_heads, self.head_dim) for name in ("k", "v")]
        ] * self.num_layers

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a parsed config.json, as MiniMax publishes it or as transformers 5 writes it.

        Errors: `ConfigError` with the field, the value found and the values allowed.
        """
        _check_architecture(config)
        sizes = {name: _integer(config, key) for key, name in _SIZES.items()}
        _check_fixed(config, num_layers=sizes["num_layers"])
        notes: list[str] = []
        rope_theta, rotary_dim = _rope(config, head_dim=sizes["head_dim"], notes=notes)
        known = _READ | _IGNORED | set(_SIZES) | set(_FIXED) | set(_NULL_ONLY) | set(_PER_LAYER)
        unknown = sorted(str(key) for key in config if key not in known)
        if unknown:
            notes.append(
                f"config.json fields that this version does not know and ignores: "
                f"{', '.join(unknown)}"
            )
        return cls(
            architecture=MINIMAX_M2,
            **sizes,
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            rms_norm_eps=_number(config.get("rms_norm_eps", 1e-6), name="rms_norm_eps"),
            tie_word_embeddings=False,
            dtype=_dtype(config, notes=notes),
            bos_token_id=_optional_token(config.get("bos_token_id"), name="bos_token_id"),
            eos_token_ids=token_ids(config.get("eos_token_id"), name="eos_token_id"),
            quantization=_quantization(config.get("quantization_config")),
            notes=tuple(notes),
        )


def token_ids(value: object, *, name: str) -> tuple[int, ...]:
    """`value` of field `name` (null, one id or a list of ids) as a tuple. Errors: `ConfigError`."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        for token_id in ids
    ):
        _refuse(name, value, "a token id, a list of token ids or null")
    return tuple(dict.fromkeys(ids))


def bundled_spec(name: str) -> ModelSpec:
    """The spec of a published MiniMax model by its short `name`, to build it without a checkpoint.

    Errors: `ConfigError` listing the known names.
    """
    spec = _BUNDLED.get(name.lower())
    if spec is None:
        raise ConfigError(f"no bundled model spec is called {name!r}; known: {', '.join(_BUNDLED)}")
    return spec


def is_bundled_spec(name: str) -> bool:
    """Whether `bundled_spec` knows `name`."""
    return name.lower() in _BUNDLED


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is None and model_type is None:
        raise ConfigError(
            "config.json names neither architectures nor model_type; expected those of a MiniMax-M2"
        )
    if architectures is not None and architectures not in ([MINIMAX_M2], (MINIMAX_M2,)):
        _refuse("architectures", architectures, f"[{MINIMAX_M2!r}]")
    if model_type is not None and model_type != "minimax_m2":
        _refuse("model_type", model_type, "'minimax_m2'")


def _check_fixed(config: Mapping[str, Any], *, num_layers: int) -> None:
    for name, only in _FIXED.items():
        value = config.get(name)
        if value is not None and (
            value != only or isinstance(value, bool) != isinstance(only, bool)
        ):
            _refuse(name, value, repr(only))
    for name in _NULL_ONLY:
        if config.get(name) is not None:
            _refuse(name, config[name], "null")
    for name, only in _PER_LAYER.items():
        value = config.get(name)
        if value is None:
            continue
        entries = value if isinstance(value, list | tuple) else [value] * num_layers
        if len(entries) != num_layers:
            _refuse(name, value, f"{num_layers} entries, one per layer")
        for layer, entry in enumerate(entries):
            if entry != only:
                _refuse(f"{name}[{layer}]", entry, repr(only))


def _rope(config: Mapping[str, Any], *, head_dim: int, notes: list[str]) -> tuple[float, int]:
    """theta and rotary_dim, from MiniMax's own fields or from transformers' `rope_parameters`."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            _refuse(name, given, "an object or null")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            _refuse(f"{name}.rope_type", kind, "'default' (no scaling)")
        surplus = sorted(set(given) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if surplus:
            _refuse(
                f"{name}.{surplus[0]}",
                given[surplus[0]],
                "rope_type, rope_theta and partial_rotary_factor only",
            )
        parameters.update(given)

    theta = _agree(config, parameters, name="rope_theta")
    factor = _agree(config, parameters, name="partial_rotary_factor")
    rope_theta = _number(5_000_000.0 if theta is None else theta, name="rope_theta")
    if config.get("rotary_dim") is not None:
        rotary_dim = _integer(config, "rotary_dim")
        if (
            factor is not None
            and round(head_dim * _number(factor, name="partial_rotary_factor")) != rotary_dim
        ):
            _refuse(
                "rotary_dim",
                rotary_dim,
                f"head_dim * partial_rotary_factor = {head_dim} * {factor}",
            )
        return rope_theta, rotary_dim
    if factor is not None:
        return rope_theta, int(head_dim * _number(factor, name="partial_rotary_factor"))
    notes.append(
        f"config.json has neither rotary_dim nor partial_rotary_factor: all {head_dim} head "
        f"dimensions rotate"
    )
    return rope_theta, head_dim


def _agree(config: Mapping[str, Any], parameters: Mapping[str, Any], *, name: str) -> object:
    """Field `name` from the top level or from `parameters`; refused where both are there and
    differ.
    """
    outer, inner = config.get(name), parameters.get(name)
    if outer is not None and inner is not None and outer != inner:
        _refuse(name, outer, f"the value in rope_parameters ({inner})")
    return inner if outer is None else outer


def _dtype(config: Mapping[str, Any], *, notes: list[str]) -> str:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        notes.append("config.json names no dtype: float32 is assumed")
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        _refuse("dtype", value, ", ".join(_DTYPES))
    return name


def _quantization(config: object) -> QuantizationSpec | None:
    """The native format of the M2 family, or None. Every other one is refused by name."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        _refuse("quantization_config", config, "an object or null")
    for name, allowed in {
        "quant_method": ("fp8",),
        "fmt": (None, "float8_e4m3fn", "e4m3"),
        "activation_scheme": (None, "dynamic"),
        "scale_fmt": (None, "float"),
    }.items():
        value = config.get(name)
        if value not in allowed:
            words = ", ".join(repr(word) for word in allowed if word is not None)
            _refuse(f"quantization_config.{name}", value, f"{words} (others are not supported yet)")
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or tuple(block) != FP8_BLOCK:
        _refuse(
            "quantization_config.weight_block_size",
            block,
            f"{list(FP8_BLOCK)} (others are not supported yet)",
        )
    skipped = config.get("modules_to_not_convert") or ()
    if not isinstance(skipped, list | tuple) or not all(isinstance(name, str) for name in skipped):
        _refuse(
            "quantization_config.modules_to_not_convert", skipped, "a list of module names or null"
        )
    return QuantizationSpec(
        method="fp8", weight_block_size=FP8_BLOCK, modules_to_not_convert=tuple(skipped)
    )


def _integer(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name}; it is needed and has no default")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        _refuse(name, value, f"an integer from 1 to {_MAX_SIZE}")
    return value


def _number(value: object, *, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        _refuse(name, value, "a number")
    return float(value)


def _optional_token(value: object, *, name: str) -> int | None:
    ids = token_ids(value, name=name)
    if len(ids) > 1:
        _refuse(name, value, "one token id or null")
    return ids[0] if ids else None


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    shown = repr(
        list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    )
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    raise ConfigError(f"model config: {name} is {shown}; supported: {allowed}")


_M2 = ModelSpec(
    architecture=MINIMAX_M2,
    vocab_size=200_064,
    hidden_size=3072,
    num_layers=62,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    rotary_dim=64,
    rope_theta=5_000_000.0,
    max_position_embeddings=196_608,
    intermediate_size=1536,
    num_experts=256,
    experts_per_token=8,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    dtype="bfloat16",
    bos_token_id=200_034,
    eos_token_ids=(200_020,),
    quantization=QuantizationSpec(
        method="fp8",
        weight_block_size=FP8_BLOCK,
        modules_to_not_convert=("gate", "e_score_correction_bias", "lm_head"),
    ),
)
_BUNDLED = {
    "minimax-m2": _M2,
    "minimax-m2.1": _M2,
    "minimax-m2.5": _M2,
    "minimax-m2.7": replace(_M2, max_position_embeddings=204_800),
}
BUNDLED_NAMES = tuple(_BUNDLED)
