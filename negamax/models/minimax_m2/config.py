"""MiniMax-M2 (also M2.1, M2.5, M2.7): its spec, read from MiniMax's own config.json or from that of
transformers, and the published models.

Fields that cannot matter for inference are ignored; names never heard of are listed in
`ModelSpec.notes` for the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from negamax.config import fields
from negamax.config.fields import refuse
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.models.family import ModelFamily
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY

ARCHITECTURE = "MiniMaxM2ForCausalLM"

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

# Read in `read_spec`, or without any influence on inference.
_READ = {
    "intermediate_size", "model_type", "num_experts_per_tok", "num_local_experts",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "rotary_dim",
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


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Spec(ModelSpec):
    """Every layer is full attention and a mixture of experts."""

    can_share_out_caches: ClassVar[bool] = True

    rotary_dim: int  # leading dimensions of each head that rotate
    rope_theta: float
    intermediate_size: int  # of one expert
    num_experts: int
    experts_per_token: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("intermediate_size", "num_experts", "experts_per_token"):
            self.check_size(name)
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            refuse(
                "rotary_dim",
                self.rotary_dim,
                f"an even number from 2 to head_dim ({self.head_dim})",
            )
        if self.experts_per_token > self.num_experts:
            refuse(
                "num_experts_per_tok",
                self.experts_per_token,
                f"at most num_local_experts ({self.num_experts})",
            )
        if not 0.0 < self.rms_norm_eps < 1.0:
            refuse("rms_norm_eps", self.rms_norm_eps, "above 0 and below 1")
        if not 1.0 < self.rope_theta < float("inf"):
            refuse("rope_theta", self.rope_theta, "a finite number above 1")

    def expert_sizes(self) -> tuple[int, int]:
        """See `ModelSpec`."""
        return self.num_experts, self.intermediate_size


def read_spec(config: Mapping[str, Any]) -> MiniMaxM2Spec:
    """The spec of a parsed config.json. Errors: `ConfigError` with the field, the value found and
    the values allowed.
    """
    notes: list[str] = []
    common = fields.common(config, notes=notes)
    fields.check_fixed(config, _FIXED | dict.fromkeys(_NULL_ONLY))
    fields.check_per_layer(config, _PER_LAYER, num_layers=common["num_layers"])
    rope_theta, rotary_dim = fields.rope(
        config, head_dim=common["head_dim"], default_theta=5_000_000.0, notes=notes
    )
    known = {*_READ, *_IGNORED, *_FIXED, *_NULL_ONLY, *_PER_LAYER}
    fields.note_unknown(config, known, notes=notes)
    return MiniMaxM2Spec(
        architecture=ARCHITECTURE,
        **common,
        intermediate_size=fields.integer(config, "intermediate_size"),
        num_experts=fields.integer(config, "num_local_experts"),
        experts_per_token=fields.integer(config, "num_experts_per_tok"),
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        rms_norm_eps=fields.number(config.get("rms_norm_eps", 1e-6), name="rms_norm_eps"),
        notes=tuple(notes),
    )


_M2 = MiniMaxM2Spec(
    architecture=ARCHITECTURE,
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
    dtype="bfloat16",
    bos_token_id=200_034,
    eos_token_ids=(200_020,),
    quantization=QuantizationSpec(
        "fp8",
        {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
)
_BUNDLED = {
    "minimax-m2": _M2,
    "minimax-m2.1": _M2,
    "minimax-m2.5": _M2,
    "minimax-m2.7": replace(_M2, max_position_embeddings=204_800),
}
FAMILY = ModelFamily(
    architecture=ARCHITECTURE,
    model_types=("minimax_m2",),
    package="negamax.models.minimax_m2",
    spec=MiniMaxM2Spec,
    read_spec=read_spec,
    chat=MINIMAX_M2_FAMILY,
    sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    bundled=_BUNDLED,
)
