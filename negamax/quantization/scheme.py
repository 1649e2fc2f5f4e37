"""`Scheme` maps modules to stored formats. `WeightFormat` defines how a rank stores weights.

This module does not import torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from negamax.base.errors import ConfigError
from negamax.base.tables import read_table
from negamax.config import fields
from negamax.config.quantization import QuantizationSpec, compile_pattern
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import TensorFormat

if TYPE_CHECKING:
    import torch

V = TypeVar("V")

_FIELDS = read_table(__file__, "fields.toml")


@dataclass(frozen=True)
class Scheme:
    """The formats of a checkpoint's linear layers."""

    formats: tuple[TensorFormat, ...]  # All formats of the checkpoint except PLAIN.
    format_of: Callable[[str], TensorFormat]  # Maps a module name to the format of its weight.

    @classmethod
    def of(
        cls, formats: Iterable[TensorFormat], format_of: Callable[[str], TensorFormat]
    ) -> Scheme:
        """Build a scheme from `formats`, without duplicates and without PLAIN."""
        found = dict.fromkeys(stored for stored in formats if stored is not PLAIN)
        return cls(tuple(found), format_of)

    @classmethod
    def uniform(
        cls, stored: TensorFormat, plain: Sequence[str], *, experts: TensorFormat | None = None
    ) -> Scheme:
        """Build a scheme in which all modules except those in `plain` have the format `stored`.

        If `experts` is given, routed experts have this format instead.
        """

        def format_of(module: str) -> TensorFormat:
            if is_within(module, plain):
                return PLAIN
            return experts if experts and is_within(module, ("experts",)) else stored

        return cls.of((stored, experts or stored), format_of)


@dataclass(frozen=True)
class WeightFormat:
    """How one rank stores its weights.

    Unquantized weights have `dtype`. With `keep_quantized`, matrices keep the format in `scheme` if
    a kernel reads this format. The loader dequantizes matrices that do not keep their format.
    """

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme | None = None  # None if no weights are quantized
    keep_quantized: bool = True

    def stored(self, name: str) -> TensorFormat:
        """Return the stored format of the matrix that unquantized checkpoints name `name`."""
        if self.scheme is None:
            return PLAIN
        return self.scheme.format_of(name.removesuffix(f".{PLAIN.values.name}"))


def check_fields(
    spec: QuantizationSpec,
    allowed: Mapping[str, Sequence[object]],
    *,
    beside: Sequence[str] | None = None,
) -> None:
    """Raise `ConfigError` if a field of `spec` does not have one of its `allowed` values.

    If `beside` is given, also raise `ConfigError` for fields outside `allowed` and `beside`.
    """
    for name, value in spec.fields.items():
        if beside is not None and name not in (*allowed, *beside):
            refuse(spec, name, value, "configs without this field")
    for name, values in allowed.items():
        if spec.fields.get(name) not in values:
            words = ", ".join(repr(value) for value in values if value is not None)
            refuse(spec, name, spec.fields.get(name), f"{words} (no other value is supported)")


@cache
def read_fields(name: str) -> tuple[dict[str, tuple[object, ...]], tuple[str, ...]]:
    """Return table `name` of fields.toml: supported values by field, and other allowed fields."""
    table = _FIELDS[name]
    values: dict[str, tuple[object, ...]] = {}
    for field, supported in table.get("values", {}).items():
        is_optional = field.endswith("?")
        values[field.removesuffix("?")] = ((None,) if is_optional else ()) + tuple(supported)
    others = tuple(table.get("others", "").split())
    for added in map(read_fields, table.get("with", "").split()):
        values, others = added[0] | values, others + added[1]
    return values, others


def check_table(spec: QuantizationSpec, name: str) -> None:
    """Check the fields of `spec` against table `name` of fields.toml. Raises `ConfigError`."""
    values, others = read_fields(name)
    check_fields(spec, values, beside=others or None)


def read_modules(spec: QuantizationSpec, *names: str) -> tuple[str, ...]:
    """Return the module names in the fields `names` (lists or null). Raises `ConfigError`."""
    modules: list[str] = []
    for name in names:
        found = spec.fields.get(name) or ()
        if not isinstance(found, list | tuple) or not all(isinstance(part, str) for part in found):
            refuse(spec, name, found, "a list of module names or null")
        modules += found
    return tuple(modules)


def check_kv_cache(spec: QuantizationSpec) -> None:
    """Raise `ConfigError` if `kv_cache_scheme` is not an FP8 KV cache with scales."""
    name = "kv_cache_scheme"
    given = spec.fields.get(name)
    if given is None:
        return
    if not isinstance(given, Mapping):
        refuse(spec, name, given, "an FP8 object, or null")
    check_table(QuantizationSpec(spec.method, dict(given), name), "kv_cache")


def is_within(module: str, names: Sequence[str]) -> bool:
    """Return whether `module`, in any spelling, is in `names` or is a submodule of one of them.

    The name "gate" includes the module "mlp.gate" but not "mlp.gate_up". In a name, * matches any
    characters. A name that starts with "re:" is a regular expression. A fused name such as
    "gate_up_proj" selects each of its matrices.
    """
    names = _unfused(tuple(names))
    known = _canonical(names)
    parts = canonicalize(module).split(".")
    ends = range(1, len(parts) + 1)
    if any(".".join(parts[first:end]) in known for end in ends for first in range(end)):
        return True
    return _match_any(module, _wildcards(names))


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Return whether a name or a regular expression ("re:") in `patterns` matches `module`."""
    patterns = _unfused(tuple(patterns))
    if canonicalize(module) in _canonical(patterns):
        return True
    return _match_any(module, tuple(each[3:] for each in patterns if each.startswith("re:")))


def make_lookup(table: Mapping[str, V]) -> Callable[[str], V | None]:
    """Return a function that returns the value in `table` for a module or its nearest parent."""
    spelled = {
        canonicalize(part): value for name, value in table.items() for part in _unfused((name,))
    }

    def find(module: str) -> V | None:
        parts = canonicalize(module).split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((spelled[name] for name in names if name in spelled), None)

    return find


def spellings(module: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield all names that checkpoints use for a module, beginning with `module`.

    Tools differ in prefixes and in the name of the MoE block. If `pattern` mentions experts or MLP
    projections, the names also include the names that tools use for experts' matrices.
    """
    return _spell(module, mentions_experts=_mentions_experts(pattern.pattern))


def _spell(module: str, *, mentions_experts: bool) -> Iterator[str]:
    yield module
    bare = canonicalize(module)
    names = [bare, _MOE.sub("mlp", bare)]
    if ".experts." in bare and mentions_experts:
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
_INDEXER = re.compile(r"(?<=\.)indexer\.([qk]_)")  # Prefix of indexer modules in transformers.
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # module -> expert module
_MATRIX, _MATRICES = re.compile(r"(?<=\.)w[123]$"), {w: name for name, w in _PROJECTIONS.items()}


@cache
def _mentions_experts(pattern: str) -> bool:
    """Return whether `pattern` mentions experts, or projections together with "mlp".

    A pattern with only "down_proj" means dense and shared MLPs, as experts have w1, w2 and w3.
    """
    return re.search(r"experts|mlp.*(?:gate|up|down)(?:[|\w]*\))*_proj", pattern) is not None


def canonicalize(name: str) -> str:
    name = _MLP.sub("block_sparse_moe", _PREFIX.sub("", name.strip(".")))
    name = _INDEXER.sub(r"index_\1", name)
    if ".experts." in name:
        name = _PROJECTION.sub(lambda match: _PROJECTIONS[match[0]], name)
    return name


@cache
def _canonical(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(canonicalize, names))


@cache
def _wildcards(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns among `names` as regular expressions."""
    return tuple(
        name[3:] if name.startswith("re:") else fnmatch.translate(name)
        for name in names
        if name.startswith("re:") or "*" in name
    )


def _match_any(module: str, patterns: tuple[str, ...]) -> bool:
    return any(
        any(map(expression.match, _spell(module, mentions_experts=mentions_experts)))
        for expression, mentions_experts in _expressions(patterns)
    )


@cache
def _expressions(patterns: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], bool], ...]:
    """Join patterns that mention experts into one expression, and all other patterns into another.

    Raises `ConfigError` for an invalid pattern.
    """
    found = []
    for mentions_experts in (False, True):
        alike = [each for each in patterns if _mentions_experts(each) is mentions_experts]
        try:
            if alike:
                joined = "|".join(f"(?:{each})" for each in alike)
                found.append((compile_pattern(joined), mentions_experts))
        except re.error as error:
            raise ConfigError(
                f"the checkpoint selects modules by {', '.join(alike)}, which cannot be "
                f"used as a regular expression: {error}"
            ) from None
    return tuple(found)


def refuse(spec: QuantizationSpec, name: str, value: Any, allowed: str) -> NoReturn:
    where = "quantization_config" if spec.source == "config.json" else spec.source
    fields.refuse(f"{where}.{name}", value, allowed)
