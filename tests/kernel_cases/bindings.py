"""Bind the arguments of kernels, so that a benchmark calls nothing else.

`bind` runs an op's `apply` once and records its calls of `run`. Repeating these calls runs the
kernel alone.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from negamax.kernels.op import AnyKernel
from tests.kernel_cases import CASES
from tests.kernel_cases.case import Case

Call = Callable[[], Any]


def bind(kernel: AnyKernel, case: Case) -> Call:
    """Return a closure that repeats the `run` calls of the op's `apply` with equal arguments."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return kernel.run(*args, **kwargs)

    CASES[kernel.op].apply(replace(kernel, run=record), case)
    assert calls, f"{kernel.op}: apply does not call run"
    if len(calls) == 1:
        args, kwargs = calls[0]
        return lambda: kernel.run(*args, **kwargs)

    def repeat() -> None:
        for args, kwargs in calls:
            kernel.run(*args, **kwargs)

    return repeat


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **map_tensors(parts, change))
    return value


def copy_case(case: Case) -> Case:
    return replace(case, tensors=map_tensors(case.tensors, lambda tensor: tensor.clone()))


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found
