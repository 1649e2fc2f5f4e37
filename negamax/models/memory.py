"""Count the bytes of a model's weights from the family's tensor list, without torch."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from negamax.config.kv_cache import ELEMENT_BYTES
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import Axis, TensorFormat
from negamax.models.drafts import DraftSpec
from negamax.models.family import WeightSpec
from negamax.models.registry import import_names
from negamax.parallel.layout import ParallelLayout, share
from negamax.quantization.detect import detect
from negamax.quantization.scheme import Scheme

_NUMBERED_EXPERT = re.compile(r"experts\W{1,6}\d")  # number of an expert in a module name
_NUMBER = re.compile(r"\.\d+\.")  # number of a layer, or of a block of the vision tower
ONE_RANK = ParallelLayout()
Kept = Callable[[TensorFormat], bool]  # returns whether matrices of a format are kept as stored


def as_stored(stored: TensorFormat) -> bool:
    """Return True, so that matrices of every format are kept as stored."""
    return True


def dequantized(stored: TensorFormat) -> bool:
    """Return False, so that matrices of every format are dequantized."""
    return False


@dataclass(frozen=True)
class WeightKind:
    """Weights of a model that differ only in the number of their layer or vision block."""

    weight: WeightSpec  # The weight of the first of `layers`.
    formats: tuple[TensorFormat, ...]  # Stored formats, one for each expert or one for all experts.
    # `joined`: for each expert, the formats of all its matrices; () for weights outside experts.
    joined: tuple[frozenset[TensorFormat], ...]
    layers: tuple[int | None, ...]  # layer of each weight; None: outside the layers

    def stored(self, layout: ParallelLayout) -> TensorFormat:
        """Return the weights' format on a rank, or `PLAIN` if its experts have several formats."""
        here = range(1) if len(self.formats) == 1 else layout.experts.experts(self.weight.count)
        stored = self.formats[here.start]
        others = frozenset[TensorFormat]().union(*self.joined[here.start : here.stop])
        return stored if all(map(stored.is_held_as, others)) else PLAIN


class ModelWeights:
    """All weights of a model, grouped so that bytes can be counted for many layouts."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        scheme, names = detect(spec.quantization), import_names(spec)
        described = "" if spec.quantization is None else str(spec.quantization.fields)
        differ = _NUMBERED_EXPERT.search(described) is not None
        weights = []
        experts = defaultdict[int | None, list[tuple[TensorFormat, ...]]](list)  # layer -> formats
        for weight in names.weights(spec):
            is_routed, layer = weight.used is not None, names.layer_of(weight.name)
            numbers = range(weight.count if is_routed and differ else 1)
            formats = tuple(_find_stored_format(weight, scheme, number) for number in numbers)
            weights.append((weight, layer, formats))
            if is_routed:
                experts[layer].append(formats)
        joined = {
            layer: tuple(map(frozenset, zip(*each, strict=True))) for layer, each in experts.items()
        }
        found: dict[Hashable, WeightKind] = {}
        layers = defaultdict[Hashable, list[int | None]](list)
        for weight, layer, formats in weights:
            beside = joined[layer] if weight.used is not None else ()
            key = _NUMBER.sub(".", weight.name), weight.shape, formats, beside
            found.setdefault(key, WeightKind(weight, formats, beside, ()))
            layers[key].append(layer)
        self.kinds = [replace(kind, layers=tuple(layers[key])) for key, kind in found.items()]

    def on_rank(
        self, *, dtype: str, kept: Kept = as_stored, layout: ParallelLayout = ONE_RANK
    ) -> Iterator[tuple[WeightKind, int, float]]:
        """Yield (kind of weight, number of its layers, total bytes) for rank `layout.rank`."""
        layers = layout.layers(self.spec.num_layers)
        for kind in self.kinds:
            enters = kind.weight.is_table or kind.weight.is_vision
            outside = layout.is_first_stage if enters else layout.is_last_stage
            count = sum(outside if each is None else each in layers for each in kind.layers)
            if count:
                stored = kind.stored(layout)
                num_bytes = _count_bytes(kind.weight, stored, dtype=dtype, kept=kept, layout=layout)
                yield kind, count, count * num_bytes


def weight_bytes(
    spec: ModelSpec, *, dtype: str, kept: Kept = as_stored, layout: ParallelLayout = ONE_RANK
) -> int:
    """Return the bytes of the weights on rank `layout.rank`, which computes in `dtype`.

    Matrices are kept as stored if `kept` returns True for their format. If ranks split the width of
    experts, shards are padded to whole units of the format.
    """
    held = ModelWeights(spec).on_rank(dtype=dtype, kept=kept, layout=layout)
    return round(sum(num_bytes for _, _, num_bytes in held))


def draft_bytes(
    spec: DraftSpec, *, dtype: str, kept: Kept = as_stored, ranks: int = 1, embeds: bool = True
) -> int:
    """Return a draft's bytes on each of `ranks`, including its rotation and a copied embedding.

    The target's embedding is copied if it is rotated, or if another pipeline stage stores it
    (`embeds` is false). A sharded embedding is copied if the draft needs all rows.
    """
    is_split = ranks > 1 and spec.copies_embedding
    copied = (is_split or not embeds or spec.is_rotated_back) and not spec.own_embedding
    rows = spec.vocab_size // (1 if spec.copies_embedding else ranks)
    table = rows * spec.hidden_size * ELEMENT_BYTES[dtype] if copied else 0
    if spec.is_rotated_back:
        table += spec.target_hidden_size**2 * ELEMENT_BYTES[dtype]
    return table + weight_bytes(spec, dtype=dtype, kept=kept, layout=ParallelLayout(tp=ranks))


def expert_padding(
    spec: ModelSpec, *, kept: Kept = as_stored, layout: ParallelLayout = ONE_RANK
) -> str | None:
    """Describe the padding of sharded experts on a rank, or return None without padding."""
    kinds = (kind for kind in ModelWeights(spec).kinds if kind.weight.used is not None)
    kind = next((each for each in kinds if each.weight.splits), None)
    if kind is None or kind.weight.splits is None:
        return None
    experts, stored, ranks = kind.weight, kind.stored(layout), layout.stage_size
    width = experts.shape[kind.weight.splits.value]

    def room(ep: int) -> tuple[int, int]:
        """Return the padded number of columns of an expert on a rank, and the unit of the split."""
        size = ranks // ep
        unit = stored.split_width(width // size, kept)[1] if kept(stored) else 1
        return share(width, rank=0, size=size, unit=unit).size, unit

    (held, unit), even = room(layout.ep), width * layout.ep // ranks
    if held == even:
        return None
    sizes = (n for n in range(1, ranks + 1) if ranks % n == 0 == experts.count % n)
    fitting = next((n for n in sizes if room(n)[0] == width * n // ranks), None)
    remedy = f" (no padding with --expert-parallel-size {fitting})" if fitting else ""
    return (
        f"{held} columns of each expert instead of {even}, because {stored.name} is split in units "
        f"of {unit}: {held / even - 1:.0%} more bytes and arithmetic in the experts{remedy}"
    )


def read_bytes(spec: ModelSpec, num_tokens: int, *, dtype: str, ranks: int) -> float:
    """Return the weight bytes that each of `ranks` reads for `num_tokens` tokens, without padding.

    The formula assumes that tokens select all experts equally often.
    """
    return sum(
        whole * hit_share(kind.weight, num_tokens) / min(ranks, kind.weight.parts or ranks)
        for kind, _, whole in ModelWeights(spec).on_rank(dtype=dtype)
        if not (kind.weight.is_table or kind.weight.is_vision)
    )


def expected_distinct_experts(spec: ModelSpec, num_tokens: int) -> float | None:
    """Return the expected number of distinct experts per layer, or None if the model is dense."""
    for weight in import_names(spec).weights(spec):
        if weight.used is not None:
            return weight.count * hit_share(weight, num_tokens)
    return None


def hit_share(weight: WeightSpec, num_tokens: float) -> float:
    """Return the expected fraction of `weight.count` tensors that `num_tokens` tokens use."""
    used = weight.count if weight.used is None else weight.used
    return float(1 - (1 - used / weight.count) ** num_tokens)


def _count_bytes(
    weight: WeightSpec, stored: TensorFormat, *, dtype: str, kept: Kept, layout: ParallelLayout
) -> float:
    """Return the bytes of all `count` tensors on one rank."""
    plain, ep = ELEMENT_BYTES[weight.dtype or dtype], layout.ep
    is_routed = weight.used is not None
    copies = (weight.count + layout.redundant_experts) / weight.count if is_routed else 1
    is_expert = is_routed or (weight.joins_experts and ep == 1)
    ranks = layout.experts.size if is_expert else layout.tp
    ranks //= layout.dcp if weight.is_query else 1
    ranks = min(ranks, weight.parts or ranks)
    if stored is PLAIN or not kept(stored):
        return copies * weight.num_elements * plain / ranks
    rows, columns = weight.shape
    if weight.splits is None:
        return weight.num_elements * stored.bytes_per_weight((rows, columns)) / ranks
    held, axis = [rows, columns], weight.splits.value
    if not is_expert:
        held[axis] //= ranks
        if ranks > 1 and held[axis] % stored.unit(weight.splits):  # the shards cut groups
            return weight.num_elements * plain / ranks
    else:
        size = layout.experts.tp
        narrow, unit = stored.split_width(held[axis] // size, kept)
        held[axis] = share(held[axis], rank=0, size=size, unit=unit).size
        stored = narrow if weight.splits is Axis.COLUMNS else stored
    here = copies * weight.count / (ep if is_routed else 1) * math.prod(held)
    return here * stored.bytes_per_weight((held[0], held[1]))


def _find_stored_format(weight: WeightSpec, scheme: Scheme | None, expert: int = 0) -> TensorFormat:
    """Return the stored format of a matrix. The head always has the format `PLAIN`."""
    in_full = weight.dtype or weight.is_table or weight.is_head or weight.is_vision
    if scheme is None or in_full or len(weight.shape) != 2:
        return PLAIN
    return scheme.format_of(weight.name.replace("*", str(expert)).removesuffix(".weight"))
