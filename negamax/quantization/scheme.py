"""`Scheme`: the format of each module of a checkpoint; `WeightFormat`: what a rank makes of it.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from negamax.config import fields
from negamax.config.quantization import QuantizationSpec
from negamax.kernels.formats import PLAIN, TensorFormat

if TYPE_CHECKING:
    import torch


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


def is_within(module: str, names: Sequence[str]) -> bool:
    """Whether `module` lies in one of `names`: "gate" is in "mlp.gate" and not in "mlp.gate_up"."""
    return any(f".{name}." in f".{module}." for name in names)


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns` is the name of `module`, or begins with "re:" and matches it."""
    return any(
        re.match(pattern[3:], module) if pattern.startswith("re:") else pattern == module
        for pattern in patterns
    )


def refuse(spec: QuantizationSpec, name: str, value: Any, allowed: str) -> NoReturn:
    """Errors: `ConfigError`, always."""
    where = "quantization_config" if spec.source == "config.json" else spec.source
    fields.refuse(f"{where}.{name}", value, allowed)
