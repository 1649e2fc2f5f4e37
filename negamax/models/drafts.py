"""Define the spec of draft models, and the errors that all families of draft models share.

A draft model proposes tokens for its target model from the residual streams of some target layers.
Layer number L selects the residual stream after L layers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.fields import refuse
from negamax.config.model_spec import ModelSpec
from negamax.models.family import ModelFamily

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYERS_HINT = f"list the layers that the draft was trained on in --speculative-config: {LAYERS_KEY}"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # slots of a draft's own tensors
# rules of `Spellings` for tensors that join several matrices, and for tensors that are not used
FUSED = (
    (r"(\.self_attn\.)qkv_proj\.", (r"\1q_proj.", r"\1k_proj.", r"\1v_proj.")),
    (r"(\.mlp\.)gate_up_proj\.", (r"\1gate_proj.", r"\1up_proj.")),
)
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": ()}  # the target's are used
SKIPPED = ((r"(?:^|\.)rotary_emb\.inv_freq$", "rotary frequencies, computed from config.json"),)


@dataclass(frozen=True, kw_only=True)
class DraftSpec(ModelSpec):
    """A model that proposes tokens for another model, its target."""

    # whether each rank copies the whole embedding of the target, if the draft has no embedding
    copies_embedding: ClassVar[bool] = False

    target_hidden_size: int
    # numbers of the target layers whose inputs the draft reads; empty: use `default_layers`
    aux_layers: tuple[int, ...] = ()
    num_aux: int  # Number of target layers that the draft reads.
    own_embedding: bool = False  # Whether the draft has its own embedding.
    own_head: bool = True
    is_rotated_back: bool = False  # Whether only the target's weights are rotated (QuaRot).
    # `target_*`: properties of the target according to the draft's files.
    target_model_type: str | None = None
    target_num_layers: int | None = None
    speculative_tokens: int | None = None  # Draft tokens per step, from the draft's files.
    verifier: str | None = None  # Name of the target in the draft's files.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_hidden_size", "num_aux"):
            self.check_size(name)

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens in one proposal; None: no limit."""
        return None

    @property
    def is_pruned(self) -> bool:
        """Whether the draft can propose only some tokens of the vocabulary."""
        return False

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the target layers that the draft reads if the draft's files list no layers."""
        raise ConfigError("the draft's files do not list its target layers", hint=LAYERS_HINT)

    def adapt_to(self, target: ModelSpec, layers: tuple[int, ...] | None) -> Self:
        """Return this spec with `layers` of `target`; raise `ConfigError` if sizes do not match."""
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
                f"the draft reads layers {list(chosen)} of the model; allowed: {self.num_aux} "
                f"ascending numbers up to {target.num_layers}, which is the last layer's output",
                hint=LAYERS_HINT,
            )
        return replace(self, aux_layers=chosen)

    def doubts(
        self, target: ModelSpec, *, target_types: Collection[str], max_model_len: int
    ) -> Iterator[str]:
        """Yield a line for each reason why fewer draft tokens may be accepted than expected.

        `target_types` lists every model_type of the target's family.
        """
        made_for = "the draft was made for a model"
        result = "fewer draft tokens may be accepted, and answers do not change"
        if self.target_model_type not in (None, *target_types):
            yield (f"{made_for} of type {self.target_model_type} (target_model_type), and the "
                   f"target is {' or '.join(target_types)}: {result}")  # fmt: skip
        if self.target_num_layers not in (None, target.num_layers):
            yield (f"{made_for} with {self.target_num_layers} layers (target_num_hidden_layers), "
                   f"and the target has {target.num_layers}: {result}")  # fmt: skip
        if self.max_position_embeddings < max_model_len:
            yield (f"the draft was trained for {self.max_position_embeddings} tokens "
                   f"(max_position_embeddings), but sequences may have {max_model_len}: after "
                   f"this limit {result}")  # fmt: skip


@dataclass(frozen=True)
class DraftModel:
    """A draft model and the folder of its weights."""

    spec: DraftSpec
    folder: str | None  # Folder of the draft; None: synthetic weights.


@dataclass(frozen=True, kw_only=True)
class DraftFamily(ModelFamily):
    """A family of draft models."""

    method: str  # Name of the method in --speculative-config.
    architectures: tuple[str, ...]  # All spellings of the architecture in config.json.


def read_layers(
    name: str, ids: Any, *, allowed: str = "a list of layer numbers in ascending order"
) -> tuple[int, ...]:
    """Return `ids`, the layer numbers in field `name`. Raises `ConfigError` for an invalid list."""
    given = ids if isinstance(ids, list | tuple) else ()
    layers = tuple(one for one in given if type(one) is int and one >= 0)
    if not layers or list(given) != sorted(set(layers)):
        refuse(name, ids, allowed)
    return layers


class IsDraft(ConfigError):
    """The served model is a draft. `verifier` is the target's name in the draft's files."""

    def __init__(self, name: str, verifier: str | None) -> None:
        model = verifier or "that model"
        super().__init__(
            f"{name} is a draft model: it proposes tokens for another model",
            hint=f"serve {model}, and set this draft in --speculative-config",
        )
        self.verifier = verifier


@contextmanager
def name_draft_errors(name: str | None) -> Iterator[None]:
    """Prefix errors about a draft's files with the name of the draft."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else ConfigError
        raise kind(f"draft {name}: {error.message}", hint=error.hint) from None
