import re
from collections.abc import Iterable, Iterator

from foreign_family.config import ForeignSpec
from negamax.layers.names import AttentionNames, DecoderNames, MlpNames, MoeNames
from negamax.models.family import Placement, WeightSpec, mlp_weights

DECODER = DecoderNames("tokens.table", "last.scale", "vocabulary.matrix")
MLP = MlpNames(*(f"block0.mlp.{part}" for part in ("gate", "up", "down")))
INDEX = "block1.look.index_q", "block1.look.index_k"
MOE = MoeNames(
    router="block1.mix.router",
    router_bias="block1.mix.bias",
    **{part: f"block1.mix.experts.*.{part}" for part in ("gate", "up", "down")},
)


def attention(layer: int) -> AttentionNames:
    parts = ("q", "k", "v", "out", "q_norm", "k_norm", "k_scale", "v_scale")
    return AttentionNames(**{part: f"block{layer}.look.{part}" for part in parts})


def norms(layer: int) -> tuple[str, str]:
    return f"block{layer}.before_look", f"block{layer}.before_think"


def place(names: Iterable[str], *, num_layers: int) -> dict[str, Placement]:
    return {name: Placement((name,)) for name in names}


def layer_of(slot: str) -> int | None:
    match = re.match(r"block(\d+)\.", slot)
    return int(match[1]) if match else None


def weights(spec: ForeignSpec) -> Iterator[WeightSpec]:
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
    q_rows, kv_rows = heads * spec.head_dim, kv_heads * spec.head_dim
    yield WeightSpec(DECODER.embedding, (spec.vocab_size, hidden), is_table=True)
    for layer in range(2):
        names = attention(layer)
        yield WeightSpec(names.q, (q_rows, hidden), parts=heads)
        yield WeightSpec(names.k, (kv_rows, hidden), parts=kv_heads)
        yield WeightSpec(names.v, (kv_rows, hidden), parts=kv_heads)
        yield WeightSpec(names.out, (hidden, q_rows), parts=heads)
        for name in (names.q_norm, names.k_norm):
            yield WeightSpec(name, (spec.head_dim,), parts=1, dtype="float32")
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    for name in INDEX:
        yield WeightSpec(name, (spec.index_width, hidden), parts=1)
    yield from mlp_weights(MLP, hidden, spec.mlp_width)
    yield WeightSpec(MOE.router, (spec.num_experts, hidden), parts=1, dtype="float32")
    yield WeightSpec(MOE.router_bias, (spec.num_experts,), parts=1, dtype="float32")
    experts = {"count": spec.num_experts, "used": spec.experts_per_token}
    yield from mlp_weights(MOE, hidden, spec.expert_width, **experts)
    yield WeightSpec(DECODER.norm, (hidden,), parts=1)
    yield WeightSpec(DECODER.head, (spec.vocab_size, hidden))
