"""`--init-expert-location`: place experts at start, by recorded counts or as given. The option and
its JSON have SGLang's names; a dump of the server's own record is accepted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from negamax.base.errors import ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.options.eplb import IN_ORDER
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.expert_placement import best_placement

_FLAG = "--init-expert-location"
_MAX_BYTES = 64 * 2**20  # largest file
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # count of selections
_Table = Annotated[list[list[_Count]], msgspec.Meta(min_length=1)]  # by layer


class _Location(msgspec.Struct, frozen=True):
    """The JSON; other fields are ignored."""

    logical_count: _Table | None = None  # selections by expert
    physical_to_logical_map: _Table | None = None  # by slot: the expert in it


def place_experts(layout: ParallelLayout, spec: ModelSpec, location: str) -> ParallelLayout:
    """Place experts by `location`: IN_ORDER, a JSON file, or JSON. Errors: `ConfigError`."""
    if location == IN_ORDER:
        return layout
    sizes = spec.expert_sizes()
    if sizes is None or layout.ep == 1:
        raise ConfigError(
            f"{_FLAG} places whole experts, but "
            + ("the model has none" if sizes is None else "each rank has a part of every expert"),
            hint="leave it out" if sizes is None else "add --enable-expert-parallel",
        )
    found, num_experts = _read(location), sizes[0]
    if found.physical_to_logical_map is not None:
        rows = found.physical_to_logical_map
        _check_shape("physical_to_logical_map", rows, spec, layout, num_experts=num_experts)
        for layer, slots in enumerate(rows):
            _check_slots(layer, slots, layout, num_experts=num_experts)
    elif found.logical_count is not None:
        _check_shape("logical_count", found.logical_count, spec, layout, num_experts=num_experts)
        rows = [
            best_placement(counts, layout.expert_slots(num_experts, layer), layout.ep)
            for layer, counts in enumerate(found.logical_count)
        ]
    else:
        raise ConfigError(
            f"{_FLAG} has neither logical_count nor physical_to_logical_map",
            hint="use the answer of POST /dump_expert_distribution_record",
        )
    return replace(layout, expert_placement=tuple(map(tuple, rows)))


def _read(location: str) -> _Location:
    is_file = not location.lstrip().startswith("{")
    shown = location if is_file else "the JSON"
    if is_file and location.endswith((".pt", ".pth", ".pkl")):
        raise ConfigError(
            f"{_FLAG} is {location}: a pickle can run any code, so none is read",
            hint="write its logical_count or physical_to_logical_map as JSON, lists by layer "
            "(docs/parallelism.md)",
        )
    try:
        data = location.encode()
        if is_file:
            path = Path(location)
            if (size := path.stat().st_size) > _MAX_BYTES:
                raise ConfigError(f"{_FLAG} is {path}, of {size} bytes; allowed: {_MAX_BYTES}")
            data = path.read_bytes()
        return msgspec.json.decode(data, type=_Location)
    except OSError as error:
        raise ConfigError(
            f"{_FLAG} is {location!r}, which cannot be read: {error.strerror}",
            hint=f"use {IN_ORDER!r}, or the path of a JSON file",
        ) from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{_FLAG}: {shown[:200]} is invalid: {error}",
            hint="give lists of whole numbers, one for each layer",
        ) from error


def _check_shape(
    name: str,
    rows: Sequence[Sequence[int]],
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    num_experts: int,
) -> None:
    of_slots, redundant = name == "physical_to_logical_map", layout.redundant_experts
    if len(rows) != spec.num_layers:
        raise ConfigError(
            f"{_FLAG}: {name} has {len(rows)} layers, the model has {spec.num_layers}",
            hint="use a record of this model, with its layers without experts",
        )
    length = num_experts + redundant * of_slots
    for layer, row in enumerate(rows):
        if len(row) == length:
            continue
        copies = f" and {redundant} copies" if of_slots else ""
        hint = None
        if of_slots and len(row) > num_experts:
            further = len(row) - num_experts
            hint = f"""use --eplb-config '{{"num_redundant_experts": {further}}}'"""
        raise ConfigError(
            f"{_FLAG}: {name} has {len(row)} numbers in layer {layer}; expected: {num_experts} "
            f"experts{copies}",
            hint=hint or "use a record of this model",
        )


def _check_slots(
    layer: int, slots: Sequence[int], layout: ParallelLayout, *, num_experts: int
) -> None:
    hint = "a rank holds an expert once, and every expert is on some rank"
    where = f"{_FLAG}: in layer {layer} of physical_to_logical_map"
    if unknown := [expert for expert in slots if expert >= num_experts]:
        raise ConfigError(f"{where} is expert {unknown[0]}; allowed: 0 to {num_experts - 1}")
    if missing := sorted(set(range(num_experts)) - set(slots)):
        raise ConfigError(f"{where} expert {missing[0]} has no slot", hint=hint)
    per_rank = len(slots) // layout.ep
    for rank in range(layout.ep):
        ((expert, count),) = Counter(slots[rank * per_rank :][:per_rank]).most_common(1)
        if count > 1:
            raise ConfigError(
                f"{where} rank {rank} of {layout.ep} has expert {expert} {count} times", hint=hint
            )
