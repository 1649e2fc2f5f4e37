"""Parts that all families of draft models use: their spec, and errors that name a draft.

A draft reads the residual stream of some layers of its target, the model whose tokens it proposes.
A layer is named by the stream that enters it: layer L's is the stream after L layers.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.models.family import ModelFamily, WeightNames

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS_HINT = f"name the layers of its training in --speculative-config, as inputs: {LAYERS_KEY}"


@dataclass(frozen=True, kw_only=True)
class DraftSpec(ModelSpec):
    """A model that proposes tokens of another one, its target."""

    # whether each rank holds all rows of the target's embedding, if it reads that one
    copies_embedding: ClassVar[bool] = False

    target_hidden_size: int
    # layers of the target whose input it reads; (): `default_layers`
    aux_layers: tuple[int, ...] = ()
    num_aux: int  # streams
    own_embedding: bool = False  # else it is the target's
    own_head: bool = True
    is_rotated_back: bool = False  # its target is rotated; it was trained before that rotation
    # of its target, by its files
    target_model_type: str | None = None
    target_num_layers: int | None = None
    speculative_tokens: int | None = None  # draft length, by its files
    verifier: str | None = None  # its target, by its files

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_hidden_size", "num_aux"):
            self.check_size(name)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that it can propose at once; None: any number."""
        return None

    @property
    def is_pruned(self) -> bool:
        """Whether it can propose only some tokens of the vocabulary."""
        return False

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers that it reads of a target of `num_layers`, if its files name none."""
        raise ConfigError("the draft names no layers of its target", hint=LAYERS_HINT)

    def adapt_to(self, target: ModelSpec, layers: tuple[int, ...] | None) -> Self:
        """Return the draft of `target` that reads `layers` of it. Errors: `ConfigError`."""
        for name, found, wanted in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
        ):
            if found != wanted:
                raise ConfigError(
                    f"the draft's {name} is {found}; the model's is {wanted}",
                    hint="use a draft that was trained for this model",
                )
        chosen = layers or self.aux_layers or self.default_layers(target.num_layers)
        is_ascending = list(chosen) == sorted(set(chosen))
        if len(chosen) != self.num_aux or not is_ascending or chosen[-1] > target.num_layers:
            raise ConfigError(
                f"the draft reads layers {list(chosen)}; allowed: {self.num_aux} in ascending "
                f"order, up to {target.num_layers}, the output of the last layer",
                hint=LAYERS_HINT,
            )
        return replace(self, aux_layers=chosen)

    def doubts(
        self, target: ModelSpec, *, target_types: Collection[str], max_model_len: int
    ) -> Iterator[str]:
        """Yield a line for each reason why fewer draft tokens may be accepted than expected.

        `target_types`: every model_type of models like the target.
        """
        says = "the draft's files say that its model"
        result = "fewer draft tokens may be accepted; answers are the same"
        if self.target_model_type not in (None, *target_types):
            yield (f"{says} is {self.target_model_type} (target_model_type), and this one is "
                   f"{' or '.join(target_types)}: {result}")  # fmt: skip
        if self.target_num_layers not in (None, target.num_layers):
            yield (f"{says} has {self.target_num_layers} layers (target_num_hidden_layers), and "
                   f"this one has {target.num_layers}: {result}")  # fmt: skip
        if self.max_position_embeddings < max_model_len:
            yield (f"the draft was made for {self.max_position_embeddings} tokens "
                   f"(max_position_embeddings), and sequences may have {max_model_len}: after "
                   f"that {result}")  # fmt: skip


@dataclass(frozen=True)
class DraftModel:
    """A draft model and the folder of its weights."""

    spec: DraftSpec
    folder: str | None  # None: synthetic weights


@dataclass(frozen=True, kw_only=True)
class DraftFamily(ModelFamily):
    """A family of draft models; its module `names` is a `DraftNames`."""

    method: str  # of --speculative-config
    architectures: tuple[str, ...]  # every spelling


class DraftNames(WeightNames, Protocol):
    """The module `names` of a draft family."""

    EMBEDDING: str
    HEAD: str

    def list_slots(self, names: Iterable[str]) -> set[str]:
        """Return the slots of the draft that tensors `names` fill."""


class IsDraft(ConfigError):
    """The model to serve is a draft; `verifier` is its target, if its files name it."""

    def __init__(self, name: str, verifier: str | None) -> None:
        model = verifier or "that model"
        super().__init__(
            f"{name} is a draft model: it proposes tokens for another model",
            hint=f"serve {model}, and name this one in --speculative-config",
        )
        self.verifier = verifier


@contextmanager
def name_draft_errors(name: str | None) -> Iterator[None]:
    """Name the draft `name` in errors about its files."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else ConfigError
        raise kind(f"draft {name}: {error.message}", hint=error.hint) from None
