"""Place experts at start by the value of `--init-expert-location`. The option has SGLang's name and
JSON fields, and also accepts the file of an expert recording of this server.
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
_MAX_BYTES = 64 * 2**20  # Size limit of the JSON file.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # How often an expert was selected.
_Table = Annotated[list[list[_Count]], msgspec.Meta(min_length=1)]  # One list per layer.


class _Location(msgspec.Struct, frozen=True):
    """The fields of the JSON value of --init-expert-location that are not ignored."""

    logical_count: _Table | None = None  # Number of selections by layer and expert.
    physical_to_logical_map: _Table | None = None  # Expert index by layer and slot.


def place_experts(layout: ParallelLayout, spec: ModelSpec, location: str) -> ParallelLayout:
    """Place experts by `location`, which is IN_ORDER, JSON or a JSON file. Raises `ConfigError`."""
    if location == IN_ORDER:
        return layout
    sizes = spec.expert_sizes()
    if sizes is None or layout.ep == 1:
        raise ConfigError(
            f"{_FLAG} places whole experts, but "
            + ("the model has no experts" if sizes is None else "ranks hold parts of experts"),
            hint="omit the option" if sizes is None else "add --enable-expert-parallel",
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
            f"{_FLAG} is {location}: pickle files are refused, because a pickle can run any code",
            hint="write its logical_count or physical_to_logical_map as JSON, with a list for "
            "each layer (docs/parallelism.md)",
        )
    try:
        data = location.encode()
        if is_file:
            path = Path(location)
            if (size := path.stat().st_size) > _MAX_BYTES:
                raise ConfigError(f"{_FLAG}: {path} has {size} bytes; allowed: {_MAX_BYTES}")
            data = path.read_bytes()
        return msgspec.json.decode(data, type=_Location)
    except OSError as error:
        raise ConfigError(
            f"{_FLAG}: the file {location!r} cannot be read: {error.strerror}",
            hint=f"use {IN_ORDER!r}, or the path of a JSON file",
        ) from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{_FLAG}: {shown[:200]} is invalid: {error}",
            hint="give one list of whole numbers for each layer",
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
            f"{_FLAG}: {name} has {len(rows)} layers, but the model has {spec.num_layers}",
            hint="use a recording of this model that also lists layers without experts",
        )
    length = num_experts + redundant * of_slots
    for layer, row in enumerate(rows):
        if len(row) == length:
            continue
        copies = f" and {redundant} copies" if of_slots else ""
        hint, further = "use a recording of this model", len(row) - num_experts
        if of_slots and further > 0:
            hint = f"""use --eplb-config '{{"num_redundant_experts": {further}}}'"""
        raise ConfigError(
            f"{_FLAG}: {name} has {len(row)} numbers in layer {layer}; expected: {num_experts} "
            f"experts{copies}",
            hint=hint,
        )


def _check_slots(
    layer: int, slots: Sequence[int], layout: ParallelLayout, *, num_experts: int
) -> None:
    hint = "assign every expert to a slot, but not to two slots of the same rank"
    where = f"{_FLAG}: in layer {layer} of physical_to_logical_map"
    if unknown := [expert for expert in slots if expert >= num_experts]:
        most = num_experts - 1
        raise ConfigError(f"{where} a slot has expert {unknown[0]}; allowed: 0 to {most}")
    if missing := sorted(set(range(num_experts)) - set(slots)):
        raise ConfigError(f"{where} expert {missing[0]} has no slot", hint=hint)
    per_rank = len(slots) // layout.ep
    for rank in range(layout.ep):
        ((expert, count),) = Counter(slots[rank * per_rank :][:per_rank]).most_common(1)
        if count > 1:
            raise ConfigError(
                f"{where} rank {rank} of {layout.ep} has expert {expert} {count} times", hint=hint
            )
