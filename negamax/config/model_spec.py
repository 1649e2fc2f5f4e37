"""`ModelSpec`: the sizes and constants that every model has."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, Self

from negamax.config.fields import MAX_SIZE, refuse
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.config.quantization import QuantizationSpec
from negamax.config.vision import VisionSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a model. Each family adds fields in a subclass. Raises `ConfigError`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # number of rotated dimensions, which are the first of each head
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int  # Longest sequence of the model, in tokens.
    dtype: str  # Dtype of the unquantized weights: bfloat16, float16 or float32.
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationSpec | None
    vision: VisionSpec | None = None  # None if the model does not read images.
    # `notes`: log messages about fields of config.json that are ignored or assumed.
    notes: tuple[str, ...] = field(default=(), compare=False)

    # whether decode context parallelism can shard the KV caches of the family
    supports_dcp: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            self.check_size(name)
        if self.num_heads % self.num_kv_heads:
            divisor = f"a divisor of num_attention_heads ({self.num_heads})"
            refuse("num_key_value_heads", self.num_kv_heads, divisor)
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            even = f"an even number from 2 to head_dim ({self.head_dim})"
            refuse("rotary_dim", self.rotary_dim, even)
        if not 0.0 < self.rms_norm_eps < 1.0:
            refuse("rms_norm_eps", self.rms_norm_eps, "above 0 and below 1")
        if not 1.0 < self.rope_theta < inf:
            refuse("rope_theta", self.rope_theta, "a finite number above 1")
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for token_id in (*self.eos_token_ids, *bos):
            if not 0 <= token_id < self.vocab_size:
                allowed = f"0 to vocab_size - 1 ({self.vocab_size - 1})"
                refuse("bos_token_id / eos_token_id", token_id, allowed)

    def check_size(self, name: str) -> None:
        """Refuse a value of the field `name` outside 1 to `MAX_SIZE`. Raises `ConfigError`."""
        value = getattr(self, name)
        if not 1 <= value <= MAX_SIZE:
            refuse(name, value, f"1 to {MAX_SIZE}")

    def first_layers(self, num_layers: int) -> Self:
        return replace(self, num_layers=num_layers)

    def shard_index(self) -> Self:
        """Return the spec with sharded index keys, if the family has index keys."""
        return self

    def kv_caches(self) -> KvCacheSpecs:
        """Return the KV caches of each layer, by default for keys and values of full attention."""
        return [
            [KvCacheSpec(name, self.num_kv_heads, self.head_dim) for name in ("k", "v")]
        ] * self.num_layers

    def mlp_widths(self) -> Mapping[str, int]:
        """Return the MLP widths that tensor parallelism splits, by their names in errors."""
        return {}

    def expert_sizes(self) -> tuple[int, int] | None:
        """Return (number of experts per layer, width of an expert), or None for a dense model."""
        return None


@dataclass(frozen=True, kw_only=True)
class MoeSpec(ModelSpec):
    expert_width: int
    num_experts: int
    experts_per_token: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("expert_width", "num_experts", "experts_per_token"):
            self.check_size(name)
        if self.experts_per_token > self.num_experts:
            most = f"at most num_local_experts ({self.num_experts})"
            refuse("num_experts_per_tok", self.experts_per_token, most)

    def expert_sizes(self) -> tuple[int, int]:
        return self.num_experts, self.expert_width
