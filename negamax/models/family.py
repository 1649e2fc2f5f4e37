"""What a model family declares: `ModelFamily`, and the types of its modules `names` and `init`.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from negamax.config.model_spec import ModelSpec
from negamax.formats.tensor_format import Axis
from negamax.text.chat_family import ChatFamily

# A reason to skip tensors.
INT8_CACHE = "scales of keys and values in int8, which are cached in another dtype"


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
    chat: ChatFamily | None = None  # how it reads prompts and writes answers; None: not known
    # fields of `SamplingDefaults`, for checkpoints without a generation_config.json
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # config.json of the part of a checkpoint that is read
    own_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # specs of published models by short names, to build them without a checkpoint
    bundled: Mapping[str, ModelSpec] = field(default_factory=dict)
    embedded: str = "nano"  # the embedded checkpoint whose tokenizer these borrow


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint tensor goes: the slots that it fills, or, with a `skip_reason` and no such
    slot, nowhere.

    Several `slots`: their tensors joined along the rows of their matrices, in this order. A * in
    their names stands for the numbers of experts, which are stacked in the first dimension.
    """

    slots: tuple[str, ...]
    skip_reason: str | None = None


@dataclass(frozen=True)
class WeightSpec:
    """A tensor that every checkpoint of a model has; or `count` alike, one per expert, whose number
    is * in the name.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    used: int | None = None  # of `count`, by one token; None: all
    joins_experts: bool = False  # where ranks hold all experts: it is split as they are
    parts: int | None = None  # among which ranks share it at most, others hold copies; None: any
    is_query: bool = False  # ranks that share out a KV cache have the parts of all of them
    splits: Axis | None = None  # what ranks share of a matrix: its rows or its columns
    dtype: str | None = None  # it is held in; None: as stored, or the compute dtype
    is_table: bool = False  # its rows are looked up, not multiplied
    is_head: bool = False  # it is held in the compute dtype, however it is stored

    def names(self) -> Iterator[str]:
        """The name of each of the `count`."""
        return (self.name.replace("*", str(number)) for number in range(self.count))

    @property
    def num_elements(self) -> int:
        """Elements of all `count` together."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Initializer:
    """How synthetic values of a tensor are drawn: normal, with `unit_rows` rows of length 1."""

    std: float
    mean: float = 0.0
    unit_rows: bool = False


class WeightNames(Protocol):
    """The module `names` of a family."""

    def place(self, names: Iterable[str], *, num_layers: int) -> Mapping[str, Placement]:
        """The place of each checkpoint tensor in a model of `num_layers` layers; whether the slot
        exists is for the caller.
        """

    def layer_of(self, slot: str) -> int | None:
        """The layer number in a slot's name, or None for a tensor outside the layers."""

    def weights(self, spec: ModelSpec) -> Iterable[WeightSpec]:
        """All that a model of `spec` consists of, under the names of its slots."""


class Init(Protocol):
    """The module `init` of a family."""

    def draw(self, name: str, spec: ModelSpec) -> Initializer:
        """How the slot `name` is filled without a checkpoint."""
