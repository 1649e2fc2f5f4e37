"""Tensor names of EAGLE3 drafts in files of SpecForge, TorchSpec, vLLM and speculators."""

from collections.abc import Iterable, Iterator

from negamax.formats.tensor_format import Axis
from negamax.layers.names import MlpNames
from negamax.models.drafts import EMBEDDING, FUSED, HEAD, SKIPPED
from negamax.models.eagle3.config import Eagle3Spec
from negamax.models.family import Placement, Spellings, WeightSpec, mlp_names, mlp_weights
from negamax.models.family import layer_of as layer_of

FC, FC_INPUT_NORM = "fc.weight", "input_norm.weight"
NORM, D2T, T2D = "norm.weight", "d2t", "t2d"


def fc_norm(number: int) -> str:
    """Return the tensor name of the norm of residual stream `number`."""
    return f"fc_norm.{number}.weight"


def norms(layer: int) -> tuple[str, str, str]:
    """Return the names of three norms: before attention, before MLP, and of the hidden state."""
    names = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    before, after, hidden = (f"layers.{layer}.{name}.weight" for name in names)
    return before, after, hidden


def projection(layer: int, part: str) -> str:
    """Return the name of an attention projection (q, k, v or o) without its suffix."""
    return f"layers.{layer}.self_attn.{part}_proj"


def mlp(layer: int) -> MlpNames:
    return mlp_names(f"layers.{layer}.mlp")


_SPELLINGS = Spellings(
    aliases=(
        (r"^(?:draft_model|eagle_module)\.", ""),
        (r"^model\.", ""),
        (r"^midlayer\.(?=\d+\.)", "layers."),
        (r"^midlayer\.", "layers.0."),
        (r"^aux_norm_low\.", "fc_norm.0."),
        (r"^aux_norm_mid\.", "fc_norm.1."),
        (r"^aux_norm_high\.", "fc_norm.2."),
    ),
    fused=FUSED,
    skipped=(
        (r"^verifier_(?:norm|lm_head)\.weight$", "tensors of the verifier, used only in training"),
        *SKIPPED,
    ),
)


def place(names: Iterable[str], *, num_layers: int) -> dict[str, Placement]:
    return {
        name: _SPELLINGS.place(slot, slot) for name in names for slot in [_SPELLINGS.respell(name)]
    }


def weights(spec: Eagle3Spec) -> Iterator[WeightSpec]:
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
        yield from mlp_weights(mlp(layer), hidden, spec.intermediate_size)
        for name in norms(layer)[: 2 if layer else 3]:
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(NORM, (hidden,), parts=1)
    if spec.own_head:
        yield WeightSpec(HEAD, (spec.draft_vocab_size, hidden), splits=Axis.ROWS)
    if spec.is_pruned:
        yield WeightSpec(D2T, (spec.draft_vocab_size,), parts=1, dtype="int64")
