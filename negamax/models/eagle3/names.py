"""Tensors of EAGLE3 drafts, as SpecForge, TorchSpec, vLLM and its speculators spell them."""

import re
from collections.abc import Iterable, Iterator

from negamax.formats.tensor_format import Axis
from negamax.layers.names import MlpNames
from negamax.models.eagle3.config import Eagle3Spec
from negamax.models.family import Placement, WeightSpec

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FC, FC_INPUT_NORM = "fc.weight", "input_norm.weight"
NORM, D2T, T2D = "norm.weight", "d2t", "t2d"


def fc_norm(number: int) -> str:
    """Name the norm of one stream."""
    return f"fc_norm.{number}.weight"


def norms(layer: int) -> tuple[str, str, str]:
    """Name the norms before attention and MLP, and of the first layer's hidden state."""
    names = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    before, behind, hidden = (f"layers.{layer}.{name}.weight" for name in names)
    return before, behind, hidden


def projection(layer: int, part: str) -> str:
    """Name a projection (q, k, v, o) of a layer's attention, without suffix."""
    return f"layers.{layer}.self_attn.{part}_proj"


def mlp(layer: int) -> MlpNames:
    """Name the MLP of a layer."""
    gate, up, down = (f"layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    return MlpNames(gate, up, down)


_LAYER = re.compile(r"^layers\.(\d+)\.")
# Other spellings: (pattern, replacement), applied in order.
_ALIASES = (
    (re.compile(r"^(?:draft_model|eagle_module)\."), ""),
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(?=\d+\.)"), "layers."),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
# Several matrices in one tensor: (pattern, the slots in their order).
_FUSED = (
    (re.compile(r"(\.self_attn\.)qkv_proj\."), (r"\1q_proj.", r"\1k_proj.", r"\1v_proj.")),
    (re.compile(r"(\.mlp\.)gate_up_proj\."), (r"\1gate_proj.", r"\1up_proj.")),
)
_SKIPPED = (
    (re.compile(r"^verifier_(?:norm|lm_head)\.weight$"), "the verifier's own, for training"),
    (re.compile(r"(?:^|\.)rotary_emb\.inv_freq$"), "rotary frequencies, computed from config.json"),
)


def respell(name: str) -> str:
    """Return the slot of a tensor that is stored separately."""
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


def place(names: Iterable[str], *, num_layers: int) -> dict[str, Placement]:
    return {name: _place(respell(name)) for name in names}


def _place(slot: str) -> Placement:
    reason = next((reason for pattern, reason in _SKIPPED if pattern.search(slot)), None)
    for pattern, slots in _FUSED:
        if pattern.search(slot):
            return Placement(tuple(pattern.sub(part, slot) for part in slots), reason)
    return Placement((slot,), reason)


def layer_of(slot: str) -> int | None:
    match = _LAYER.match(slot)
    return int(match[1]) if match else None


def weights(spec: Eagle3Spec) -> Iterator[WeightSpec]:
    """List the draft's own tensors (see `WeightNames`)."""
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
    q_rows, kv_rows = heads * spec.head_dim, kv_heads * spec.head_dim
    streams = spec.num_aux * spec.target_hidden_size
    if spec.own_embedding:
        yield WeightSpec(EMBEDDING, (spec.vocab_size, hidden), parts=1, is_table=True)
    yield WeightSpec(FC, (hidden, streams), splits=Axis.COLUMNS)
    if spec.norm_before_fc:
        yield WeightSpec(FC_INPUT_NORM, (streams,), parts=1)
    for number in range(spec.num_aux if spec.fc_norm else 0):
        yield WeightSpec(fc_norm(number), (spec.target_hidden_size,), parts=1)
    for layer in range(spec.num_layers):
        inputs = hidden if layer else 2 * hidden
        parts = {"q": (q_rows, heads), "k": (kv_rows, kv_heads), "v": (kv_rows, kv_heads)}
        for part, (rows, shares) in parts.items():
            name = projection(layer, part)
            yield WeightSpec(f"{name}.weight", (rows, inputs), parts=shares, splits=Axis.ROWS)
            if spec.attention_bias:
                yield WeightSpec(f"{name}.bias", (rows,), parts=shares)
        out = projection(layer, "o")
        yield WeightSpec(f"{out}.weight", (hidden, q_rows), parts=heads, splits=Axis.COLUMNS)
        if spec.attention_bias:
            yield WeightSpec(f"{out}.bias", (hidden,), parts=1)
        own, width = mlp(layer), spec.intermediate_size
        for name in (own.gate, own.up):
            yield WeightSpec(name, (width, hidden), splits=Axis.ROWS)
        yield WeightSpec(own.down, (hidden, width), splits=Axis.COLUMNS)
        for name in norms(layer)[: 2 if layer else 3]:
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(NORM, (hidden,), parts=1)
    if spec.own_head:
        yield WeightSpec(HEAD, (spec.draft_vocab_size, hidden), splits=Axis.ROWS)
    if spec.is_pruned:
        yield WeightSpec(D2T, (spec.draft_vocab_size,), parts=1, dtype="int64")
