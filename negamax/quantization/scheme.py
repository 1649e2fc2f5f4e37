"""`Scheme`: the format of each module of a checkpoint; `WeightFormat`: what a rank makes of it.

Imports no torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from negamax.base.errors import ConfigError
from negamax.config import fields
from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import TensorFormat

if TYPE_CHECKING:
    import torch

V = TypeVar("V")


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's description says of its linear layers."""

    formats: tuple[TensorFormat, ...]  # that some of its modules are stored in
    # the format of a module by its name in the checkpoint, "model.layers.0.self_attn.q_proj"
    format_of: Callable[[str], TensorFormat]


@dataclass(frozen=True)
class WeightFormat:
    """How one rank holds its weights: plain ones in `dtype`; matrices as `scheme` stores them where
    a kernel reads that, unless `keep_quantized` is False; others are dequantised at load.
    """

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme | None = None  # None: everything is stored plain
    keep_quantized: bool = True

    def stored(self, name: str) -> TensorFormat:
        """The format in the checkpoint of the matrix that is called `name` where it is stored
        plain.
        """
        if self.scheme is None:
            return PLAIN
        return self.scheme.format_of(name.removesuffix(f".{PLAIN.values.name}"))


def check_fields(
    spec: QuantizationSpec,
    allowed: Mapping[str, Sequence[object]],
    *,
    beside: Sequence[str] | None = None,
) -> None:
    """Errors: `ConfigError` for a field of `spec` whose value is none of those `allowed`, or, with
    `beside`, for one that is neither there nor here.
    """
    for name, value in spec.fields.items():
        if beside is not None and name not in (*allowed, *beside):
            refuse(spec, name, value, "no field of this name")
    for name, values in allowed.items():
        if spec.fields.get(name) not in values:
            words = ", ".join(repr(value) for value in values if value is not None)
            refuse(spec, name, spec.fields.get(name), f"{words} (others are not supported yet)")


def module_list(spec: QuantizationSpec, name: str) -> tuple[str, ...]:
    """Field `name`, a list of module names or null. Errors: `ConfigError`."""
    names = spec.fields.get(name) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(part, str) for part in names):
        refuse(spec, name, names, "a list of module names or null")
    return tuple(names)


def check_kv_cache(spec: QuantizationSpec, name: str) -> None:
    """Field `name`, how keys and values are to be stored: in FP8 with a scale for each layer, which
    the checkpoint may hold, or null. Errors: `ConfigError`.
    """
    said = spec.fields.get(name)
    if said is None:
        return
    if not isinstance(said, Mapping):
        refuse(spec, name, said, "an object that says FP8, or null")
    check_fields(
        QuantizationSpec(spec.method, dict(said), name),
        {
            "num_bits": (8,), "type": ("float",), "strategy": (None, "tensor"),
            "dynamic": (None, False), "symmetric": (None, True), "group_size": (None,),
        },
    )  # fmt: skip


def is_within(module: str, names: Sequence[str]) -> bool:
    """Whether `module` lies in one of `names`, in whichever spelling: "gate" is in "mlp.gate" and
    not in "mlp.gate_up". In a name * stands for any characters, and "re:" begins an expression.
    What is said of matrices in one tensor ("gate_up_proj") holds for each.
    """
    names = _unfused(tuple(names))
    known = _canonical(names)
    parts = canonical(module).split(".")
    ends = range(1, len(parts) + 1)
    if any(".".join(parts[first:end]) in known for end in ends for first in range(end)):
        return True
    expression = _expression(_wildcards(names))
    return expression is not None and any(map(expression.match, spellings(module, expression)))


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns` is the name of `module`, in whichever spelling, or begins with
    "re:" and matches one.
    """
    patterns = _unfused(tuple(patterns))
    if canonical(module) in _canonical(patterns):
        return True
    expression = _expression(tuple(each[3:] for each in patterns if each.startswith("re:")))
    return expression is not None and any(map(expression.match, spellings(module, expression)))


def by_module(table: Mapping[str, V]) -> Callable[[str], V | None]:
    """What `table`, by names of modules in whichever spelling, has for a module, or for the nearest
    that it lies in.
    """
    spelled = {
        canonical(part): value for name, value in table.items() for part in _unfused((name,))
    }

    def find(module: str) -> V | None:
        parts = canonical(module).split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((spelled[name] for name in names if name in spelled), None)

    return find


def spellings(module: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """The names of a module in checkpoints, its own first: tools differ in prefixes, in what they
    call the mixture of experts and, which counts where `pattern` tells experts or their matrices
    apart, in what they call these.
    """
    yield module
    bare = canonical(module)
    names = [bare, _MOE.sub("mlp", bare)]
    if ".experts." in bare and _tells_experts(pattern):
        names += [_MATRIX.sub(lambda match: _MATRICES[match[0]], name) for name in names]
    for name in names:
        yield from (prefix + name for prefix in _PREFIXES)


_FUSED = tuple(
    (re.compile(rf"(?<![a-z0-9_]){name}(?![a-z0-9_])"), parts)
    for name, parts in (
        ("gate_up_proj", ("gate_proj", "up_proj")),
        ("w13", ("w1", "w3")),
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    )
)


@cache
def _unfused(names: tuple[str, ...]) -> tuple[str, ...]:
    """With a name for each matrix where one stands for several."""
    for pattern, parts in _FUSED:
        names = tuple(
            each
            for name in names
            for each in ([pattern.sub(p, name) for p in parts] if pattern.search(name) else [name])
        )
    return names


_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
_PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")
_MLP, _MOE = re.compile(r"(?<![^.])mlp(?![^.])"), re.compile(r"(?<![^.])block_sparse_moe(?![^.])")


_PROJECTION = re.compile(r"(?<=\.)(?:gate|up|down)_proj$")
_INDEXER = re.compile(r"(?<=\.)indexer\.([qk]_)")  # transformers' name in M3
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of experts
_MATRIX, _MATRICES = re.compile(r"(?<=\.)w[123]$"), {w: name for name, w in _PROJECTIONS.items()}


@cache
def _tells_experts(pattern: re.Pattern[str]) -> bool:
    """Whether it names experts or, alone or among others in parentheses, their projections."""
    return re.search(r"experts|(?:gate|up|down)(?:[|\w]*\))*_proj", pattern.pattern) is not None


def canonical(name: str) -> str:
    """One spelling for all of a module."""
    name = _MLP.sub("block_sparse_moe", _PREFIX.sub("", name.strip(".")))
    name = _INDEXER.sub(r"index_\1", name)
    if ".experts." in name:
        name = _PROJECTION.sub(lambda match: _PROJECTIONS[match[0]], name)
    return name


@cache
def _canonical(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(canonical, names))


@cache
def _wildcards(names: tuple[str, ...]) -> tuple[str, ...]:
    """The `names` that are patterns, as regular expressions."""
    return tuple(
        name[3:] if name.startswith("re:") else fnmatch.translate(name)
        for name in names
        if name.startswith("re:") or "*" in name
    )


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    """One expression for all of them. Errors: `ConfigError` for what is none."""
    try:
        return re.compile("|".join(f"(?:{each})" for each in patterns)) if patterns else None
    except re.error as error:
        raise ConfigError(
            f"the checkpoint names modules by {', '.join(patterns)}, which is no regular "
            f"expression: {error}"
        ) from None


def refuse(spec: QuantizationSpec, name: str, value: Any, allowed: str) -> NoReturn:
    """Errors: `ConfigError`, always."""
    where = "quantization_config" if spec.source == "config.json" else spec.source
    fields.refuse(f"{where}.{name}", value, allowed)
