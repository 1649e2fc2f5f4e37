"""EAGLE3 draft models: the spec, its reader, and the published drafts.

The config.json of SpecForge, TorchSpec, vLLM and its speculators library are read. A draft reads
the residual stream of some layers of its target, the model whose tokens it proposes. A layer is
named by the stream that enters it: layer L's is the stream after L layers.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config import fields
from negamax.config.fields import refuse
from negamax.config.model_spec import ModelSpec
from negamax.models.eagle3 import speculators
from negamax.models.family import ModelFamily

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
_IDS = "eagle_aux_hidden_state_layer_ids"
_OVERRIDE = f"name the layers of its training in --speculative-config, as inputs: {_IDS}"
NUM_AUX = 3  # streams, unless config.json differs

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
    "parallel_drafting": False,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
    "sliding_window": None,
}
_PER_LAYER = {"layer_types": "full_attention"}
_SWITCHES = (
    "fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "attention_bias",
)  # fmt: skip
_READ = {
    "draft_vocab_size", "intermediate_size", "num_aux_hidden_states", "target_hidden_size",
    "target_model_type", "target_num_hidden_layers", "eagle_config", _IDS, *_SWITCHES,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(ModelSpec):
    """A Llama of one or more layers, of which the first reads twice its width."""

    draft_vocab_size: int  # tokens that it can propose
    target_hidden_size: int
    intermediate_size: int
    # layers of the target whose input it reads; (): `default_layers`
    aux_layers: tuple[int, ...] = ()
    num_aux: int = NUM_AUX
    fc_norm: bool = False  # each stream has a norm before fc
    norm_before_fc: bool = False  # all streams together have a norm before fc
    norm_output: bool = False  # the next pass reads the normed hidden state
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden state
    attention_bias: bool = False
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
        for name in ("draft_vocab_size", "target_hidden_size", "intermediate_size", "num_aux"):
            self.check_size(name)
        if self.draft_vocab_size > self.vocab_size:
            refuse("draft_vocab_size", self.draft_vocab_size, f"at most {self.vocab_size}")
        if self.rotary_dim != self.head_dim:
            refuse("rotary_dim", self.rotary_dim, f"head_dim ({self.head_dim})")
        if self.aux_layers and len(self.aux_layers) != self.num_aux:
            refuse(_IDS, self.aux_layers, f"{self.num_aux} layers (num_aux_hidden_states)")

    @property
    def is_pruned(self) -> bool:
        """Whether it can propose only some tokens of the vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    def mlp_widths(self) -> Mapping[str, int]:
        return {
            "draft's intermediate_size": self.intermediate_size,
            "draft_vocab_size": self.draft_vocab_size,
            "input width of the draft's fc": self.num_aux * self.target_hidden_size,
        }

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
        chosen = layers or self.aux_layers or default_layers(target.num_layers)
        is_ascending = list(chosen) == sorted(set(chosen))
        if len(chosen) != self.num_aux or not is_ascending or chosen[-1] > target.num_layers:
            raise ConfigError(
                f"the draft reads layers {list(chosen)}; allowed: {self.num_aux} in ascending "
                f"order, up to {target.num_layers}, the output of the last layer",
                hint=_OVERRIDE,
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

    spec: Eagle3Spec
    folder: str | None  # None: synthetic weights


class IsDraft(ConfigError):
    """The model to serve is a draft; `verifier` is its target, if its files name it."""

    def __init__(self, name: str, verifier: str | None) -> None:
        model = verifier or "that model"
        super().__init__(
            f"{name} is a draft model: it proposes tokens for another model",
            hint=f"serve {model}, and name this one in --speculative-config",
        )
        self.verifier = verifier


def check_no_draft(config: Mapping[str, Any]) -> None:
    """Refuse the config.json of a draft. Errors: `IsDraft`."""
    if speculators.is_speculators(config):
        raise IsDraft(f"a model of speculators_model_type {config[speculators.MODEL_TYPE]!r}",
                      speculators.use(config).verifier)  # fmt: skip
    names = config.get("architectures")
    if isinstance(names, list | tuple) and any(name in _ARCHITECTURES for name in names):
        raise IsDraft(str(names[0]), None)


@contextmanager
def name_draft_errors(name: str | None) -> Iterator[None]:
    """Name the draft `name` in errors about its files."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else ConfigError
        raise kind(f"draft {name}: {error.message}", hint=error.hint) from None


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers of drafts that name none, as in vLLM. Errors: `ConfigError` for too few."""
    if num_layers < 7:
        raise ConfigError(
            f"the draft names no layers of its target, and the target has {num_layers}; the usual "
            f"ones are for 7 or more",
            hint=_OVERRIDE,
        )
    return 2, num_layers // 2, num_layers - 3


def read_spec(config: Mapping[str, Any]) -> Eagle3Spec:
    """Read the spec from a parsed config.json. Errors: `ConfigError` naming the field."""
    notes: list[str] = []
    use, aux_layers = speculators.Use(), _read_aux_layers
    if speculators.is_speculators(config):
        use, aux_layers = speculators.use(config), _read_input_layers
        notes += use.notes
        config = speculators.flat(config, architecture=ARCHITECTURE)
    config = _flatten(config)
    if config.get("architectures") not in [[name] for name in _ARCHITECTURES]:
        refuse("architectures", config.get("architectures"),
               " or ".join(f"[{name!r}]" for name in _ARCHITECTURES))  # fmt: skip
    if config.get("model_type") not in (None, *FAMILY.model_types):
        refuse("model_type", config["model_type"], " or ".join(map(repr, FAMILY.model_types)))
    common = fields.read_common(config, default_theta=10_000.0, rotates_fully=True, notes=notes)
    fields.check_fixed(config, _FIXED)
    fields.check_per_layer(config, _PER_LAYER, num_layers=common["num_layers"])
    fields.note_unknown(config, {*_READ, *_FIXED, *_PER_LAYER}, notes=notes)
    layers = aux_layers(config.get(_IDS))
    optional = {
        "draft_vocab_size": common["vocab_size"],
        "target_hidden_size": common["hidden_size"],
        "num_aux_hidden_states": len(layers) or NUM_AUX,
    }
    target_type, target_layers = config.get("target_model_type"), "target_num_hidden_layers"
    if not isinstance(target_type, str | None):
        refuse("target_model_type", target_type, "a text or null")
    switches: dict[str, Any] = {name: _read_switch(config, name) for name in _SWITCHES}
    sizes = {
        name: fields.read_size(config, name) if config.get(name) is not None else default
        for name, default in optional.items()
    }
    return Eagle3Spec(
        architecture=ARCHITECTURE,
        **common | {"bos_token_id": None, "eos_token_ids": ()},
        draft_vocab_size=sizes["draft_vocab_size"],
        target_hidden_size=sizes["target_hidden_size"],
        num_aux=sizes["num_aux_hidden_states"],
        intermediate_size=fields.read_size(config, "intermediate_size"),
        aux_layers=layers,
        target_model_type=target_type,
        target_num_layers=fields.read_size(config, target_layers)
        if config.get(target_layers) is not None
        else None,
        speculative_tokens=use.speculative_tokens,
        verifier=use.verifier,
        **switches,
        notes=tuple(notes),
    )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `eagle_config` into the other fields, and add Llama's default sizes."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        refuse("eagle_config", nested, "an object or null")
    flat = fields.merge_fields(config, nested, inner="eagle_config")
    heads = flat.get("num_attention_heads")
    if flat.get("num_key_value_heads") is None:
        flat["num_key_value_heads"] = heads
    if flat.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        flat["head_dim"] = fields.read_size(flat, "hidden_size") // heads
    return flat


def _read_switch(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False):
        refuse(name, value, "true or false")
    return bool(value)


def _read_aux_layers(ids: object) -> tuple[int, ...]:
    """Return the layers named by config.json, as inputs. Errors: `ConfigError`.

    Trainers name a layer by its output and begin with 1; others name its input and begin with 2.
    """
    numbers = _read_input_layers(ids)
    if numbers and numbers[0] not in (1, 2):
        raise ConfigError(
            f"config.json of the draft: {_IDS} is {ids}; supported: lists that begin with 1 "
            f"(outputs of layers) or with 2 (inputs of layers)",
            hint=_OVERRIDE,
        )
    return tuple(number + 2 - numbers[0] for number in numbers)


def _read_input_layers(ids: object) -> tuple[int, ...]:
    """Return the layers named as inputs, as vLLM does; () without. Errors: `ConfigError`."""
    if ids in (None, []):  # exporters fill the list in once the draft is trained
        return ()
    given = ids if isinstance(ids, list | tuple) else ()
    layers = tuple(one for one in given if type(one) is int and one >= 0)
    if not layers or list(given) != sorted(set(layers)):
        refuse(_IDS, ids, "a list of layers, in ascending order, or null")
    return layers


def _make_published(**own: Any) -> Eagle3Spec:
    common: dict[str, Any] = {
        "architecture": ARCHITECTURE, "vocab_size": 200_064, "num_layers": 1, "head_dim": 128,
        "rotary_dim": 128,
        "max_position_embeddings": 196_608, "dtype": "bfloat16", "bos_token_id": None,
        "eos_token_ids": (), "quantization": None, "rope_theta": 5_000_000.0, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return Eagle3Spec(**common | own)


_M2 = _make_published(
    hidden_size=3072,
    target_hidden_size=3072,
    num_heads=24,
    num_kv_heads=8,
    intermediate_size=8192,
    draft_vocab_size=32_000,
)
_M3 = _make_published(
    hidden_size=6144,
    target_hidden_size=6144,
    num_heads=64,
    num_kv_heads=64,
    intermediate_size=18_432,
    draft_vocab_size=200_064,
    fc_norm=True,
    norm_output=True,
    own_embedding=True,
)
FAMILY = ModelFamily(
    architecture=ARCHITECTURE,
    model_types=("llama", "eagle3"),
    package="negamax.models.eagle3",
    spec=Eagle3Spec,
    read_spec=read_spec,
    bundled={
        "minimax-m2.5-eagle3": _M2,
        "minimax-m3-eagle3": _M3,
        "minimax-m3-eagle3-gqa": replace(_M3, num_kv_heads=4),
    },
)
