"""The parts of a model family: `ModelFamily`, its modules `names` and `init`. Imports no torch."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from negamax.config.model_spec import ModelSpec
from negamax.formats.tensor_format import Axis
from negamax.layers.names import MlpNames, MoeNames
from negamax.text.chat_family import ChatFamily

# A reason to skip tensors.
INT8_CACHE = "scales of keys and values in int8, which are cached in another dtype"


_Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ModelFamily:
    """An architecture and its folder, the `package`.

    The modules `names`, `init` and `model` of the package are imported on first use: only `model`
    imports torch.
    """

    architecture: str  # in `architectures` of config.json
    model_types: tuple[str, ...]  # any of them in config.json
    package: str
    spec: type[ModelSpec]
    read_spec: Callable[[Mapping[str, Any]], ModelSpec]  # from a parsed config.json
    chat: ChatFamily | None = None  # None: it does not chat
    # fields of `SamplingDefaults`, for checkpoints without a generation_config.json
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # returns the config.json of the part of a checkpoint that is read
    own_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # specs of published models by short names, for models without a checkpoint
    bundled: Mapping[str, ModelSpec] = field(default_factory=dict)
    embedded: str = "nano"  # the embedded checkpoint that lends its tokenizer


@dataclass(frozen=True)
class Placement:
    """The slots of a checkpoint tensor; with a `skip_reason`, none if the slots do not exist.

    Several `slots` are joined along the rows of their matrices, in this order. A * in their names
    stands for the numbers of experts, which are stacked in the first dimension.
    """

    slots: tuple[str, ...]
    skip_reason: str | None = None


class Spellings:
    """Tensor names in checkpoints. All `aliases` apply, in order; of the others the first does."""

    def __init__(
        self, aliases: _Pairs, fused: Sequence[tuple[str, tuple[str, ...]]], skipped: _Pairs
    ) -> None:
        """Pairs of a pattern and its replacement, the joined slots, or the reason to skip it."""
        self._aliases = [(re.compile(pattern), text) for pattern, text in aliases]
        self._fused = [(re.compile(pattern), slots) for pattern, slots in fused]
        self._skipped = [(re.compile(pattern), reason) for pattern, reason in skipped]

    def respell(self, name: str) -> str:
        """Return the slot of a tensor that is stored separately."""
        for pattern, replacement in self._aliases:
            name = pattern.sub(replacement, name)
        return name

    def place(self, name: str, slot: str, skip_reason: str | None = None) -> Placement:
        """Place the tensor `name`, respelled as `slot`."""
        reasons = (reason for pattern, reason in self._skipped if pattern.search(name))
        reason = next(reasons, skip_reason)
        for pattern, slots in self._fused:
            if pattern.search(slot):
                return Placement(tuple(pattern.sub(part, slot) for part in slots), reason)
        return Placement((slot,), reason)


_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


def layer_of(slot: str) -> int | None:
    """Return the layer number in a slot's name; None outside the layers."""
    match = _LAYER.match(slot)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of every checkpoint, or `count` alike: one per expert, numbered at * in `name`."""

    name: str
    shape: tuple[int, ...]
    count: int = 1
    used: int | None = None  # by one token, of `count`; None: all
    joins_experts: bool = False  # split like experts where ranks hold all experts
    parts: int | None = None  # largest number of shards, other ranks hold copies; None: any
    is_query: bool = False  # ranks that split a KV cache have the parts of all of them
    splits: Axis | None = None  # what is sharded of a matrix: rows or columns
    dtype: str | None = None  # in memory; None: as stored, or the compute dtype
    is_table: bool = False  # its rows are looked up, not multiplied
    is_head: bool = False  # always held in the compute dtype
    is_vision: bool = False  # of the vision tower: stored plain, whole on each rank that embeds

    def names(self) -> Iterator[str]:
        """Yield the name of each of the `count`."""
        return (self.name.replace("*", str(number)) for number in range(self.count))

    @property
    def num_elements(self) -> int:
        """Elements of all `count` together."""
        return self.count * math.prod(self.shape)


def mlp_weights(
    names: MlpNames | MoeNames, hidden: int, width: int, **fields: Any
) -> Iterator[WeightSpec]:
    """List the matrices of an MLP or of experts; `fields` are those of `WeightSpec`."""
    for name in (names.gate, names.up):
        yield WeightSpec(name, (width, hidden), splits=Axis.ROWS, **fields)
    yield WeightSpec(names.down, (hidden, width), splits=Axis.COLUMNS, **fields)


@dataclass(frozen=True)
class Initializer:
    """Distribution of synthetic values: normal; `unit_rows`: rows of length 1."""

    std: float
    mean: float = 0.0
    unit_rows: bool = False


class WeightNames(Protocol):
    """The module `names` of a family."""

    def place(self, names: Iterable[str], *, num_layers: int) -> Mapping[str, Placement]:
        """Place checkpoint tensors in a model of `num_layers` layers; slots need not exist."""

    def layer_of(self, slot: str) -> int | None:
        """Return the layer number in a slot's name; None outside the layers."""

    def weights(self, spec: ModelSpec) -> Iterable[WeightSpec]:
        """List all tensors of a model, by the names of their slots."""


class Init(Protocol):
    """The module `init` of a family."""

    def draw(self, name: str, spec: ModelSpec) -> Initializer:
        """Choose the distribution of slot `name`."""
