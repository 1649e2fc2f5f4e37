"""The interface of a model family, `ModelFamily`, and of its modules `names` and `init`."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from negamax.config.model_spec import ModelSpec
from negamax.formats.tensor_format import Axis
from negamax.layers.names import MlpNames, MoeNames
from negamax.text.chat_family import ChatFamily

# The reason, in log messages, why the loader skips tensors with scales of an int8 KV cache.
INT8_CACHE = "scales of an int8 KV cache; keys and values are cached in another dtype"


_Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ModelFamily:
    """An architecture, and the Python package that implements it.

    The modules `names`, `init` and `model` of the package are imported on first use, because
    `model` imports torch.
    """

    architecture: str  # Name in `architectures` of config.json.
    model_types: tuple[str, ...]  # Allowed values of model_type in config.json.
    package: str
    spec: type[ModelSpec]
    read_spec: Callable[[Mapping[str, Any]], ModelSpec]  # Reads the spec from a parsed config.json.
    chat: ChatFamily | None = None  # None if the family has no chat format.
    # `sampling`: fields of `SamplingDefaults` for checkpoints without generation_config.json.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # returns the config.json of the served model from the config.json of a checkpoint
    own_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # specs of published models by short name, to build models without a checkpoint
    bundled: Mapping[str, ModelSpec] = field(default_factory=dict)
    embedded: str = "nano"  # bundled checkpoint with the tokenizer for models without files


@dataclass(frozen=True)
class Placement:
    """The weight slots that a checkpoint tensor fills.

    If the `slots` do not exist and there is a `skip_reason`, the loader skips the tensor. A tensor
    with several `slots` contains their matrices one after the other, concatenated along the rows. A
    `*` in a slot's name stands for the expert number, which is the first index of the tensor.
    """

    slots: tuple[str, ...]
    skip_reason: str | None = None


class Spellings:
    """Rules for tensor names: all `aliases` apply; of `fused` and of `skipped`, the first match."""

    def __init__(
        self, aliases: _Pairs, fused: Sequence[tuple[str, tuple[str, ...]]], skipped: _Pairs
    ) -> None:
        """`aliases`: pattern, replacement; `fused`: pattern, slots; `skipped`: pattern, reason."""
        self._aliases = [(re.compile(pattern), text) for pattern, text in aliases]
        self._fused = [(re.compile(pattern), slots) for pattern, slots in fused]
        self._skipped = [(re.compile(pattern), reason) for pattern, reason in skipped]

    def respell(self, name: str) -> str:
        """Return the slot name of a tensor by applying all aliases to its name."""
        for pattern, replacement in self._aliases:
            name = pattern.sub(replacement, name)
        return name

    def place(self, name: str, slot: str, skip_reason: str | None = None) -> Placement:
        """Return the placement of tensor `name`, whose slot name is `slot`."""
        reasons = (reason for pattern, reason in self._skipped if pattern.search(name))
        reason = next(reasons, skip_reason)
        for pattern, slots in self._fused:
            if pattern.search(slot):
                return Placement(tuple(pattern.sub(part, slot) for part in slots), reason)
        return Placement((slot,), reason)


_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")


def layer_of(slot: str) -> int | None:
    """Return the layer number in a slot's name, or None if the name has no layer number."""
    match = _LAYER.match(slot)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class WeightSpec:
    """A tensor of a model, or `count` equal tensors. A * in `name` stands for the expert number."""

    name: str
    shape: tuple[int, ...]
    count: int = 1
    used: int | None = None  # How many of the `count` tensors one token uses; None: all.
    joins_experts: bool = False  # Whether the ranks that shard each expert also shard this tensor.
    parts: int | None = None  # Maximum number of shards; more ranks store copies. None: no limit.
    is_query: bool = False  # Whether ranks that shard one KV cache (DCP) store the same rows.
    splits: Axis | None = None  # The axis along which ranks shard the matrix.
    dtype: str | None = None  # Dtype in memory; None: the stored format or the compute dtype.
    is_table: bool = False  # Whether the tensor is an embedding, from which tokens read rows.
    is_head: bool = False  # Whether the tensor is the head, which stays in the compute dtype.
    is_vision: bool = False  # Whether the tensor is in the vision tower, which is unquantized.

    def names(self) -> Iterator[str]:
        """Yield the names of all `count` tensors."""
        return (self.name.replace("*", str(number)) for number in range(self.count))

    @property
    def num_elements(self) -> int:
        """Number of elements of all `count` tensors."""
        return self.count * math.prod(self.shape)


def mlp_names(prefix: str) -> MlpNames:
    """Return the names of an MLP's matrices, which checkpoints call gate, up and down."""
    return MlpNames(*(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")))


def mlp_weights(
    names: MlpNames | MoeNames, hidden: int, width: int, **fields: Any
) -> Iterator[WeightSpec]:
    """List the matrices of an MLP or of experts. `fields` are passed to `WeightSpec`."""
    for name in (names.gate, names.up):
        yield WeightSpec(name, (width, hidden), splits=Axis.ROWS, **fields)
    yield WeightSpec(names.down, (hidden, width), splits=Axis.COLUMNS, **fields)


@dataclass(frozen=True)
class Initializer:
    """A normal distribution of synthetic values. `unit_rows` scales each row to length 1."""

    std: float
    mean: float = 0.0
    unit_rows: bool = False


class WeightNames(Protocol):
    """The module `names` of a family."""

    def place(self, names: Iterable[str], *, num_layers: int) -> Mapping[str, Placement]:
        """Return each checkpoint tensor's placement, possibly in slots that the model lacks."""

    def layer_of(self, slot: str) -> int | None:
        """Return the layer number in a slot's name, or None if the name has no layer number."""

    def weights(self, spec: ModelSpec) -> Iterable[WeightSpec]:
        """List the own tensors of a model or draft, named as their weight slots."""


class Init(Protocol):
    """The module `init` of a family."""

    def draw(self, name: str, spec: ModelSpec) -> Initializer:
        """Choose the distribution of the synthetic values of slot `name`."""
