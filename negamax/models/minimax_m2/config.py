"""MiniMax-M2 (also M2.1, M2.5, M2.7): the spec, its reader, and the published models.

MiniMax's own config.json and that of transformers are read. Fields without influence on inference
are ignored; unknown ones are listed in `ModelSpec.notes` for the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from negamax.config import fields
from negamax.config.model_spec import MoeSpec
from negamax.config.quantization import QuantizationSpec
from negamax.models.family import ModelFamily
from negamax.models.minimax_m2.chat import MINIMAX_M2_FAMILY

ARCHITECTURE = "MiniMaxM2ForCausalLM"

# Fields that change the computation and have one supported value: MiniMax's, or "off".
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
# The same, where the supported value is null.
_NULL_ONLY = (
    "sliding_window",
    "swiglu_limit",
    "sparse_attention_config",
    "compression_config",
    "vision_config",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
# Lists with an entry per layer (or one value for all), which must be this value.
_PER_LAYER: dict[str, Any] = {
    "attn_type_list": 1,
    "layer_types": "full_attention",
    "moe_layer_freq": 1,
}

_READ = {"intermediate_size", "num_experts_per_tok", "num_local_experts"}
_IGNORED = {"mlp_intermediate_size", "mtp_transformer_layers", "shared_moe_mode"}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Spec(MoeSpec):
    """Every layer has full attention and a mixture of experts."""

    supports_dcp: ClassVar[bool] = True


def read_spec(config: Mapping[str, Any]) -> MiniMaxM2Spec:
    """Read the spec from a parsed config.json. Errors: `ConfigError` naming the field."""
    notes: list[str] = []
    common = fields.read_common(config, default_theta=5_000_000.0, notes=notes)
    fields.check_fixed(config, _FIXED | dict.fromkeys(_NULL_ONLY))
    fields.check_per_layer(config, _PER_LAYER, num_layers=common["num_layers"])
    known = {*_READ, *_IGNORED, *_FIXED, *_NULL_ONLY, *_PER_LAYER}
    fields.note_unknown(config, known, notes=notes)
    return MiniMaxM2Spec(
        architecture=ARCHITECTURE,
        **common,
        expert_width=fields.read_size(config, "intermediate_size"),
        num_experts=fields.read_size(config, "num_local_experts"),
        experts_per_token=fields.read_size(config, "num_experts_per_tok"),
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
    expert_width=1536,
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
FAMILIES = (FAMILY,)
