"""EAGLE3 draft models: the spec, its reader, and the published drafts.

The reader accepts the config.json of SpecForge, TorchSpec, vLLM and vLLM's speculators library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from negamax.base.errors import ConfigError
from negamax.config import fields
from negamax.config.fields import read_optional_size, refuse
from negamax.models.drafts import (
    LAYERS_HINT,
    LAYERS_KEY,
    NO_TOKENS,
    DraftFamily,
    DraftSpec,
    IsDraft,
    read_layers,
)
from negamax.models.eagle3 import speculators
from negamax.models.minimax_m2.config import PUBLISHED

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
_IDS = LAYERS_KEY  # Field that lists the target layers that the draft reads.
NUM_AUX = 3  # Default number of target layers that a draft reads.

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
class Eagle3Spec(DraftSpec):
    """A Llama of one or more layers. The input of the first layer has width 2 * hidden_size."""

    copies_embedding: ClassVar[bool] = True

    num_aux: int = NUM_AUX
    draft_vocab_size: int  # number of tokens that the draft can propose
    intermediate_size: int
    fc_norm: bool = False  # Whether each target layer's hidden state has its own norm.
    norm_before_fc: bool = False  # Whether one norm is applied to the concatenated input of fc.
    norm_output: bool = False  # Whether the next draft pass reads the normed hidden state.
    norm_before_residual: bool = False  # Whether the residual starts as the normed hidden state.
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_vocab_size", "intermediate_size"):
            self.check_size(name)
        if self.draft_vocab_size > self.vocab_size:
            refuse("draft_vocab_size", self.draft_vocab_size, f"at most {self.vocab_size}")
        if self.rotary_dim != self.head_dim:
            refuse("rotary_dim", self.rotary_dim, f"head_dim ({self.head_dim})")
        if self.aux_layers and len(self.aux_layers) != self.num_aux:
            refuse(_IDS, self.aux_layers, f"{self.num_aux} layers (num_aux_hidden_states)")

    @property
    def is_pruned(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def mlp_widths(self) -> Mapping[str, int]:
        return {
            "draft's intermediate_size": self.intermediate_size,
            "draft_vocab_size": self.draft_vocab_size,
            "input width of the draft's fc": self.num_aux * self.target_hidden_size,
        }

    def default_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return vLLM's default layers. Raises `ConfigError` if `num_layers` is below 7."""
        if num_layers < 7:
            raise ConfigError(
                f"the draft's files do not list its target layers, and the default layers need a "
                f"target model of 7 or more layers; this target model has {num_layers}",
                hint=LAYERS_HINT,
            )
        return 2, num_layers // 2, num_layers - 3


def check_no_draft(config: Mapping[str, Any]) -> None:
    """Raise `IsDraft` if config.json describes a draft in the format of speculators."""
    if speculators.MODEL_TYPE in config:
        raise IsDraft(f"a model of speculators_model_type {config[speculators.MODEL_TYPE]!r}",
                      speculators.use(config).verifier)  # fmt: skip


def read_spec(config: Mapping[str, Any]) -> Eagle3Spec:
    """Read the spec from a parsed config.json. Raises `ConfigError` for an invalid field."""
    notes: list[str] = []
    use, aux_layers = speculators.Use(), _read_aux_layers
    if speculators.MODEL_TYPE in config:
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
    target_type, read_size = config.get("target_model_type"), partial(read_optional_size, config)
    if not isinstance(target_type, str | None):
        refuse("target_model_type", target_type, "a string or null")
    switches: dict[str, Any] = {name: fields.read_switch(config, name) for name in _SWITCHES}
    return Eagle3Spec(
        architecture=ARCHITECTURE,
        **common | NO_TOKENS,
        draft_vocab_size=read_size("draft_vocab_size", common["vocab_size"]),
        target_hidden_size=read_size("target_hidden_size", common["hidden_size"]),
        num_aux=read_size("num_aux_hidden_states", len(layers) or NUM_AUX),
        intermediate_size=fields.read_size(config, "intermediate_size"),
        aux_layers=layers,
        target_model_type=target_type,
        target_num_layers=read_size("target_num_hidden_layers", None),
        speculative_tokens=use.speculative_tokens,
        verifier=use.verifier,
        **switches,
        notes=tuple(notes),
    )


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `eagle_config` into the top-level fields, and add Llama's default sizes."""
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


def _read_aux_layers(ids: object) -> tuple[int, ...]:
    """Return the numbers of the layers whose inputs the draft reads. Raises `ConfigError`.

    A list that begins with 1 numbers layers by their outputs, as some trainers do. A list that
    begins with 2 numbers layers by their inputs.
    """
    numbers = _read_input_layers(ids)
    if numbers and numbers[0] not in (1, 2):
        raise ConfigError(
            f"config.json of the draft: {_IDS} is {ids}; supported: lists that begin with 1 "
            f"(outputs of layers) or with 2 (inputs of layers)",
            hint=LAYERS_HINT,
        )
    return tuple(number + 2 - numbers[0] for number in numbers)


def _read_input_layers(ids: object) -> tuple[int, ...]:
    """Check and return the layer numbers in config.json; () if it lists none."""
    if ids in (None, []):  # some exporters write an empty list
        return ()
    return read_layers(_IDS, ids, allowed="a list of layer numbers in ascending order, or null")


_COMMON: dict[str, Any] = PUBLISHED | NO_TOKENS
_COMMON |= {"architecture": ARCHITECTURE, "num_layers": 1, "rotary_dim": 128}
_COMMON |= {"max_position_embeddings": 196_608, "quantization": None}
_M2 = Eagle3Spec(
    **_COMMON,
    hidden_size=3072,
    target_hidden_size=3072,
    num_heads=24,
    num_kv_heads=8,
    intermediate_size=8192,
    draft_vocab_size=32_000,
)
_M3 = Eagle3Spec(
    **_COMMON,
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
FAMILY = DraftFamily(
    method="eagle3",
    architecture=ARCHITECTURE,
    architectures=_ARCHITECTURES,
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
