"""Tensor names of block drafts. The files of the draft or of the target contain the tensors."""

import re
from collections.abc import Iterable, Iterator
from functools import partial

from negamax.formats.tensor_format import Axis
from negamax.layers.names import MlpNames
from negamax.models import minimax_names
from negamax.models.drafts import EMBEDDING, FUSED, HEAD, SKIPPED
from negamax.models.dspark.config import BlockDraftSpec
from negamax.models.family import Placement, Spellings, WeightSpec, mlp_names, mlp_weights
from negamax.models.family import layer_of as layer_of

FC, CONTEXT_NORM, NORM = "fc.weight", "hidden_norm.weight", "norm.weight"
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


attention = partial(minimax_names.attention, root="")
norms = partial(minimax_names.norms, root="")


def mlp(layer: int) -> MlpNames:
    return mlp_names(f"layers.{layer}.mlp")


_OWN = re.compile(r"(?:^|\.)dspark\.")  # matches a draft tensor in the target's files
_SPELLINGS = Spellings(
    aliases=(
        (r"^(?:language_model\.)?(?:model\.)?dspark\.", ""),
        (r"^(?:draft_model|model)\.", ""),
        (r"^midlayer\.", "layers.0."),
        (r"^(layers\.\d+\.)(?:decoder_layer|midlayer)\.", r"\1"),
        (r"^final_norm\.", "norm."),
    ),
    fused=FUSED,
    skipped=SKIPPED,
)


def place(names: Iterable[str], *, num_layers: int) -> dict[str, Placement]:
    names = list(names)
    is_shared, placed = any(map(_OWN.search, names)), {}
    for name in names:
        if is_shared and not _OWN.search(name):
            placed[name] = Placement((f"target.{name}",), "tensors of the model")
        else:
            placed[name] = _SPELLINGS.place(name, _SPELLINGS.respell(name))
    return placed


def weights(spec: BlockDraftSpec) -> Iterator[WeightSpec]:
    hidden, streams = spec.hidden_size, spec.num_aux * spec.target_hidden_size
    if spec.own_embedding:
        yield WeightSpec(EMBEDDING, (spec.vocab_size, hidden), is_table=True)
    yield WeightSpec(FC, (hidden, streams), splits=Axis.COLUMNS, is_head=True)
    for name in (CONTEXT_NORM, NORM):
        yield WeightSpec(name, (hidden,), parts=1)
    for layer in range(spec.num_layers):
        yield from minimax_names.attention_weights(spec, layer, norms_heads=True, root="")
        yield from mlp_weights(mlp(layer), hidden, spec.intermediate_size)
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    if spec.markov_rank:
        shape = spec.vocab_size, spec.markov_rank
        yield WeightSpec(MARKOV_IN, shape, parts=1, is_table=True)
        yield WeightSpec(MARKOV_OUT, shape, splits=Axis.ROWS, is_head=True)
    if spec.confidence_width:
        yield WeightSpec(CONFIDENCE, (1, spec.confidence_width), parts=1, dtype="float32")
        yield WeightSpec(CONFIDENCE_BIAS, (1,), parts=1, dtype="float32")
    if spec.own_head:
        yield WeightSpec(HEAD, (spec.vocab_size, hidden), splits=Axis.ROWS, is_head=True)
