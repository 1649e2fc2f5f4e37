"""The sizes and constants that every model has: the frozen `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from negamax.config.fields import MAX_SIZE, refuse
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.config.quantization import QuantizationSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes and constants of one model, as far as every model has them; a family adds its own.

    Errors: `ConfigError` for sizes that cannot belong together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    dtype: str  # of the unquantised weights: bfloat16, float16 or float32
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationSpec | None
    # for the log: what was ignored or assumed
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_position_embeddings",
        ):  # fmt: skip
            self.check_size(name)
        if self.num_heads % self.num_kv_heads:
            refuse(
                "num_key_value_heads",
                self.num_kv_heads,
                f"a divisor of num_attention_heads ({self.num_heads})",
            )
        bos = () if self.bos_token_id is None else (self.bos_token_id,)
        for token_id in (*self.eos_token_ids, *bos):
            if not 0 <= token_id < self.vocab_size:
                refuse(
                    "bos_token_id / eos_token_id",
                    token_id,
                    f"0 to vocab_size - 1 ({self.vocab_size - 1})",
                )

    # whether ranks with copies of a KV head may hold some blocks of its cache each
    can_share_out_caches: ClassVar[bool] = False

    def check_size(self, name: str) -> None:
        """Errors: `ConfigError` where field `name` is no size."""
        value = getattr(self, name)
        if not 1 <= value <= MAX_SIZE:
            refuse(name, value, f"1 to {MAX_SIZE}")

    def first_layers(self, num_layers: int) -> Self:
        """The model of its first `num_layers` layers."""
        return replace(self, num_layers=num_layers)

    def with_sharded_index(self) -> Self:
        """The model as ranks run it that hold a shard of the index keys each, where it has any."""
        return self

    def kv_caches(self) -> KvCacheSpecs:
        """The caches of each layer. Here: keys and values of full attention in all of them."""
        return [
            [KvCacheSpec(name, self.num_kv_heads, self.head_dim) for name in ("k", "v")]
        ] * self.num_layers

    def mlp_widths(self) -> Mapping[str, int]:
        """What tensor parallelism cuts beside heads, vocabulary and experts: widths of MLPs, by
        their names in messages.
        """
        return {}

    def expert_sizes(self) -> tuple[int, int] | None:
        """How many experts a layer has, and their width; None in a model without."""
        return None
