"""Tensor names of MiniMax's models, shapes that the models share, and the spellings in checkpoints.

Weight slots have the names of MiniMax's own checkpoints without the prefix `language_model.`, such
as `model.layers.0.block_sparse_moe.experts.0.w1.weight`. `SPELLINGS` contains the rules for
converted checkpoints, which use other names or store several matrices as one tensor.
"""

import re
from collections.abc import Iterable, Iterator

from negamax.config.model_spec import ModelSpec, MoeSpec
from negamax.formats.tensor_format import Axis
from negamax.layers.names import AttentionNames, DecoderNames, MoeNames
from negamax.models.family import INT8_CACHE, Placement, Spellings, WeightSpec, mlp_weights
from negamax.models.family import layer_of as layer_of

# Names of the vision tower and its projector.
VISION_MODULES = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
_OF_VISION = "|".join(VISION_MODULES)

DECODER = DecoderNames(
    embedding="model.embed_tokens.weight", norm="model.norm.weight", head="lm_head.weight"
)


def attention(layer: int, *, root: str = "model.") -> AttentionNames:
    """Return the tensor names of a layer's attention, without the names of a sparse indexer."""
    prefix = f"{root}layers.{layer}.self_attn"
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    weights = (f"{prefix}.{part}.weight" for part in parts)
    return AttentionNames(*weights, k_scale=f"{prefix}.k_scale", v_scale=f"{prefix}.v_scale")


def moe(layer: int) -> MoeNames:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return MoeNames(
        router=f"{prefix}.gate.weight",
        router_bias=f"{prefix}.e_score_correction_bias",
        gate=f"{prefix}.experts.*.w1.weight",
        up=f"{prefix}.experts.*.w3.weight",
        down=f"{prefix}.experts.*.w2.weight",
    )


def norms(layer: int, *, root: str = "model.") -> tuple[str, str]:
    """Return the names of a layer's norms before the attention and before the MLP or experts."""
    prefix = f"{root}layers.{layer}"
    return f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"


def attention_weights(
    spec: ModelSpec, layer: int, *, norms_heads: bool, root: str = "model."
) -> Iterator[WeightSpec]:
    """List the attention tensors. With `norms_heads`, each query or key head has a norm."""
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
    q_rows, kv_rows = heads * spec.head_dim, kv_heads * spec.head_dim
    own = attention(layer, root=root)
    yield WeightSpec(own.q, (q_rows, hidden), parts=heads, splits=Axis.ROWS, is_query=True)
    yield WeightSpec(own.k, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
    yield WeightSpec(own.v, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
    yield WeightSpec(own.out, (hidden, q_rows), parts=heads, splits=Axis.COLUMNS)
    if norms_heads:
        yield WeightSpec(own.q_norm, (spec.head_dim,), parts=1, dtype="float32")
        yield WeightSpec(own.k_norm, (spec.head_dim,), parts=1, dtype="float32")
    else:
        yield WeightSpec(own.q_norm, (q_rows,), parts=heads, dtype="float32", is_query=True)
        yield WeightSpec(own.k_norm, (kv_rows,), parts=kv_heads, dtype="float32")


def moe_weights(names: MoeNames, spec: MoeSpec) -> Iterator[WeightSpec]:
    """List the tensors of a layer's router and routed experts."""
    yield WeightSpec(names.router, (spec.num_experts, spec.hidden_size), parts=1, dtype="float32")
    yield WeightSpec(names.router_bias, (spec.num_experts,), parts=1, dtype="float32")
    experts = {"count": spec.num_experts, "used": spec.experts_per_token}
    yield from mlp_weights(names, spec.hidden_size, spec.expert_width, **experts)


_MTP = "multi-token prediction, not used"
# Tensors of multi-token prediction layers, which may follow the model's own layers.
_MTP_OWN = re.compile(r"^model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.")
_OF_EXPERTS = "gate|router|experts|shared_experts|e_score_correction_bias"
SPELLINGS = Spellings(
    aliases=(
        # This rule replaces module prefixes of other architectures.
        (
            r"^(?:model\.language_model\.|language_model\.)?(?:model\.)?"
            r"(?=(?:layers|embed_tokens|norm)\.)",
            "model.",
        ),
        (r"^(?:model|language_model)\.(?=lm_head\.)", ""),
        (rf"^model\.(?=(?:{_OF_VISION})\.)", ""),
        (rf"^(model\.layers\.\d+\.)mlp\.(?=(?:{_OF_EXPERTS})\b)", r"\1block_sparse_moe."),
        # transformers 5.17 to 5.21 save each `mlp` of MiniMax-M3 under the name of its experts.
        (
            r"(\.layers\.\d+\.)block_sparse_moe\.(?=(?:(?:gate|up|gate_up|down)_proj|fc[12])\.)",
            r"\1mlp.",
        ),
        (r"(\.block_sparse_moe\.)gate\.(e_score_correction_bias)$", r"\1\2"),
        # names in neuronx-distributed-inference
        (r"(\.block_sparse_moe\.)router\.linear_router\.", r"\1gate."),
        (r"(\.block_sparse_moe\.)router\.(e_score_correction_bias)$", r"\1\2"),
        (r"(\.block_sparse_moe\.)expert_mlps\.mlp_op\.", r"\1experts."),
        (r"(\.experts\.\d+\.)gate_proj\.", r"\1w1."),
        (r"(\.experts\.\d+\.)up_proj\.", r"\1w3."),
        (r"(\.experts\.\d+\.)down_proj\.", r"\1w2."),
        # scales of an FP8 cache of keys and values
        (r"(\.self_attn\.)(?:attn|[kv]_proj|qkv_proj|qkqkv_proj)\.([kv]_scale)$", r"\1\2"),
        (r"(\.self_attn\.)([kv])(?:_cache\.scale|_proj\.output_scale)$", r"\1\2_scale"),
        # the indexer of block-sparse attention in transformers
        (r"(\.self_attn\.)indexer\.([qk]_(?:proj|norm)\.)", r"\1index_\2"),
        # Some files store stacked experts as parameters of one module, such as "w13_weight_scale".
        # transformers saves stacked experts as "gate_up_proj" and "gate_up_proj_scale_inv".
        (r"(\.experts\.(?:w13|gate_up_proj|w2|down_proj))$", r"\1.weight"),
        (r"(\.experts\.(?:gate_up_proj|down_proj))_(scale(?:_inv)?)$", r"\1.weight_\2"),
        (r"(\.experts\.(?:w13|gate_up_proj|w2|down_proj))_", r"\1."),
    ),
    fused=(
        (r"(\.self_attn\.)(?:attn\.)?kv_scale$", (r"\1k_scale", r"\1v_scale")),
        (r"(\.self_attn\.)qkv_proj\.", (r"\1q_proj.", r"\1k_proj.", r"\1v_proj.")),
        (r"(\.(?:mlp|shared_experts)\.)gate_up_proj\.", (r"\1gate_proj.", r"\1up_proj.")),
        (r"(\.experts\.\d+\.)(?:w13|gate_up_proj)\.", (r"\1w1.", r"\1w3.")),
        (r"(\.experts\.)(?:w13|gate_up_proj)\.", (r"\1*.w1.", r"\1*.w3.")),
        (r"(\.experts\.)(?:w2|down_proj)\.", (r"\1*.w2.",)),
    ),
    skipped=(
        (r"(^|[._])mtp([._]|$)", _MTP),
        (r"(^|\.)dspark\.", "the DSpark draft, which method dspark of --speculative-config reads"),
        (
            r"\.(k_scale|v_scale|kv_scale|[kv]_cache\.scale|[kv]_proj\.output_scale)$",
            "KV-cache scales of layers that the model does not have",
        ),
        (
            r"\.(q_scale|q\.scale|q_proj\.output_scale|prob_scale|prob_output_scale)$",
            "scales of queries and probabilities, which are not quantized",
        ),
        (r"\.[qkv]_zero_point$", "zero points of queries, keys and values, which FP8 does not use"),
        (r"\.[kv]_proj\.kv_cache_(scale|offset)$", INT8_CACHE),
        (
            rf"^(?:model\.)?(?:{_OF_VISION})\.",
            "vision tensors, because the model is served without images",
        ),
        (r"\.rotary_emb\.inv_freq$", "rotary frequencies, computed from config.json"),
    ),
)


def place(names: Iterable[str], *, num_layers: int) -> dict[str, Placement]:
    """Return the placement of each checkpoint tensor. Tensors of MTP layers are skipped."""
    slots = {name: SPELLINGS.respell(name) for name in names}
    own = map(_MTP_OWN.match, slots.values())
    mtp = {layer for match in own if match and (layer := int(match[1])) >= num_layers}
    reasons = {name: _MTP if layer_of(slot) in mtp else None for name, slot in slots.items()}
    return {name: SPELLINGS.place(name, slot, reasons[name]) for name, slot in slots.items()}
