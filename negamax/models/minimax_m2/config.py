"""MiniMax-M2 (also M2.1, M2.5, M2.7): the spec, its reader, and the published models.

The reader accepts the config.json of MiniMax and of transformers. Fields that do not affect
inference are ignored. Unknown fields are added to `ModelSpec.notes` for the log.
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

# Fields that would change the computation, each with its only supported value besides null.
FIXED: dict[str, Any] = {
    "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    "attention_output_gate": False, "attention_bias": False, "qkv_bias": False, "mlp_bias": False,
    "postnorm": False, "sliding_window": None, "use_sliding_window": False,
    "compression_config": None,
    "final_logit_softcapping": None, "attn_logit_softcapping": None,
}  # fmt: skip
_FIXED: dict[str, Any] = {
    **FIXED, "hidden_act": "silu", "qk_norm_type": "per_layer", "use_gemma_norm": False,
    "routed_scaling_factor": 1.0, "shared_intermediate_size": 0, "n_shared_experts": 0,
    "first_k_dense_replace": 0, "swiglu_limit": None, "sparse_attention_config": None,
    "vision_config": None, "layernorm_full_attention_alpha": 1.0,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 1.0,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 1.0, "layernorm_mlp_beta": 1.0,
}  # fmt: skip
# `_PER_LAYER`: only supported value of each field that has one value per layer or for all layers
_PER_LAYER = {"attn_type_list": 1, "layer_types": "full_attention", "moe_layer_freq": 1}

_READ = {"intermediate_size", "num_experts_per_tok", "num_local_experts"}
_IGNORED = {"mlp_intermediate_size", "mtp_transformer_layers", "shared_moe_mode"}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Spec(MoeSpec):
    """Every layer has full attention and a mixture of experts."""

    supports_dcp: ClassVar[bool] = True


def read_spec(config: Mapping[str, Any]) -> MiniMaxM2Spec:
    """Read the spec from a parsed config.json. Raises `ConfigError` with the bad field's name."""
    notes: list[str] = []
    common = fields.read_common(config, default_theta=5_000_000.0, notes=notes)
    fields.check_fixed(config, _FIXED)
    fields.check_per_layer(config, _PER_LAYER, num_layers=common["num_layers"])
    fields.note_unknown(config, {*_READ, *_IGNORED, *_FIXED, *_PER_LAYER}, notes=notes)
    return MiniMaxM2Spec(
        architecture=ARCHITECTURE, **common, **read_experts(config), notes=tuple(notes)
    )


def read_experts(config: Mapping[str, Any]) -> dict[str, int]:
    """Read the sizes of the routed experts, as fields of `MoeSpec`. Raises `ConfigError`."""
    names = {
        "expert_width": "intermediate_size",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    return {name: fields.read_size(config, key) for name, key in names.items()}


# fields whose values are equal in all published M2 models
PUBLISHED: dict[str, Any] = {
    "vocab_size": 200_064, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5_000_000.0,
    "rms_norm_eps": 1e-6, "dtype": "bfloat16", "bos_token_id": 200_034, "eos_token_ids": (200_020,),
}  # fmt: skip
_M2 = MiniMaxM2Spec(
    **PUBLISHED,
    architecture=ARCHITECTURE,
    hidden_size=3072,
    num_layers=62,
    num_heads=48,
    num_kv_heads=8,
    max_position_embeddings=196_608,
    expert_width=1536,
    num_experts=256,
    experts_per_token=8,
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
FAMILY = ModelFamily(
    architecture=ARCHITECTURE,
    model_types=("minimax_m2",),
    package="negamax.models.minimax_m2",
    spec=MiniMaxM2Spec,
    read_spec=read_spec,
    chat=MINIMAX_M2_FAMILY,
    sampling={"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    bundled={
        "minimax-m2": _M2,
        "minimax-m2.1": _M2,
        "minimax-m2.5": _M2,
        "minimax-m2.7": replace(_M2, max_position_embeddings=204_800),
    },
)
FAMILIES = (FAMILY,)
