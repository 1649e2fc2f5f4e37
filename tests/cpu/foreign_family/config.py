from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.config import fields
from negamax.config.kv_cache import KvCacheSpec, KvCacheSpecs
from negamax.config.model_spec import ModelSpec
from negamax.models.family import ModelFamily

INDEX_BLOCK = 4  # tokens


@dataclass(frozen=True, kw_only=True)
class ForeignSpec(ModelSpec):
    mlp_width: int
    expert_width: int
    num_experts: int
    experts_per_token: int
    index_width: int
    index_top_k: int

    def kv_caches(self) -> KvCacheSpecs:
        k, v = (KvCacheSpec(name, self.num_kv_heads, self.head_dim) for name in ("k", "v"))
        index = KvCacheSpec(
            "index", 1, self.index_width, dtype="float32", block_tokens=INDEX_BLOCK, replicated=True
        )
        return [(k, v), (k, v, index)]

    def mlp_widths(self) -> Mapping[str, int]:
        return {"MLP": self.mlp_width, "experts' width": self.expert_width}


def read_spec(config: Mapping[str, Any]) -> ForeignSpec:
    notes: list[str] = []
    common = fields.read_common(config, default_theta=1e4, notes=notes)
    own = (
        "mlp_width", "expert_width", "num_experts", "experts_per_token", "index_width",
        "index_top_k",
    )  # fmt: skip
    fields.check_fixed(config, {"num_hidden_layers": 2})
    fields.note_unknown(config, {*own}, notes=notes)
    return ForeignSpec(
        architecture=FAMILY.architecture,
        **common,
        **{name: fields.read_size(config, name) for name in own},
        notes=tuple(notes),
    )


FAMILY = ModelFamily(
    architecture="ForeignForCausalLM", model_types=("foreign",), package="foreign_family",
    spec=ForeignSpec, read_spec=read_spec,
)  # fmt: skip
