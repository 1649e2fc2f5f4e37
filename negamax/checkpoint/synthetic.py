"""Synthetic weights: random weights for a model of any size, without a checkpoint.

A model's family defines the distribution of each tensor (`models/<family>/init.py`). Experts of a
layer are drawn together, a few hundred MB at a time, and other tensors one by one. The values
depend only on the seed and the tensor's name. A rank draws whole tensors and keeps its part, so the
model is the same for every tensor-parallel size. A CPU and a GPU draw different weights.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.base.progress import ShowProgress
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_MAX, PLAIN
from negamax.formats.readable import reads_e4m3_blocks
from negamax.formats.tensor_format import Role, StoredTensor
from negamax.kernels.quantize.stored import known_entries
from negamax.kernels.weight_only.draw import draw
from negamax.layers.weights import WeightSlot
from negamax.models.registry import import_init

# Constants of random E4M3 weights with block scales. `weight_only/draw.py` draws other formats.
VALUE_STD = 90.0  # Standard deviation of random E4M3 values; the E4M3 maximum is 448.
SCALE_SPREAD = 0.1  # Standard deviation of random scales, relative to their mean.
# Maximum elements per draw. `DRAW_ELEMENTS` affects the weights, because each draw has a new seed.
DRAW_ELEMENTS = 2**27

_EXPERT = re.compile(r"\.experts\.\d+\.")


def fill_synthetic(
    weight_slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    seed: int,
    *,
    device: torch.device | None = None,
    progress: ShowProgress | None = None,
) -> None:
    """Fill the `weight_slots` that this rank needs with weights drawn on `device` (None: the CPU).

    The caller prepares the weights for their kernels afterwards. `progress` is called after each
    draw with the number of elements drawn so far and the total.
    """
    wanted = [
        draw for draw in _list_draws(weight_slots.values()) if any(slot.needed for slot in draw[2])
    ]
    sizes = [sum(math.prod(slot.shape) for slot in slots) for _, _, slots in wanted]
    done, init = 0, import_init(spec)
    generator = torch.Generator(device or "cpu")
    for (name, number, slots), size in zip(wanted, sizes, strict=True):
        digest = hashlib.sha256(f"{seed}:{name}:{number}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        stored = slots[0].stored
        if stored is None:
            own = init.draw(name, spec)
            tensors = _draw_normal(
                slots, torch.float32, mean=own.mean, std=own.std, generator=generator
            )
            tensors = F.normalize(tensors, dim=-1) if own.unit_rows else tensors
        else:
            weight = name.removesuffix(stored.name) + PLAIN.values.name
            std = init.draw(weight, spec).std
            tensors = _draw_stored(slots, stored, std=std, generator=generator)
        for slot, tensor in zip(slots, tensors, strict=True):
            if slot.needed:
                slot.write(tensor)
        done += size
        if progress:
            progress(done, sum(sizes))


def _list_draws(slots: Iterable[WeightSlot]) -> Iterator[tuple[str, int, list[WeightSlot]]]:
    """Yield each draw: the name that the slots share, the draw's number, and the slots."""
    groups: dict[str, list[WeightSlot]] = {}
    for slot in slots:
        if not slot.optional:
            groups.setdefault(_EXPERT.sub(".experts.*.", slot.name), []).append(slot)
    for name, members in groups.items():
        size = max(1, DRAW_ELEMENTS // math.prod(members[0].shape))
        for number, first in enumerate(range(0, len(members), size)):
            yield name, number, members[first : first + size]


def _draw_stored(
    slots: Sequence[WeightSlot], stored: StoredTensor, *, std: float, generator: torch.Generator
) -> Tensor:
    """For matrices with standard deviation `std`, draw the tensor `stored` (values or scales)."""
    source = slots[0].source
    if stored.known is not None:
        known = known_entries(stored, slots[0].matrix_shape)
        return known.expand(len(slots), *known.shape)
    if not reads_e4m3_blocks(source):
        shape = (len(slots), *slots[0].shape)
        return draw(source, stored, shape, std=std, generator=generator)
    if stored.role is Role.SCALE:
        spread = _draw_normal(slots, torch.float32, mean=1.0, std=SCALE_SPREAD, generator=generator)
        return spread.clamp_(0.5, 1.5).mul_(std / VALUE_STD)
    noise = _draw_normal(slots, torch.bfloat16, mean=0.0, std=VALUE_STD, generator=generator)
    return noise.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _draw_normal(
    slots: Sequence[WeightSlot],
    dtype: torch.dtype,
    *,
    mean: float,
    std: float,
    generator: torch.Generator,
) -> Tensor:
    values = torch.empty(len(slots), *slots[0].shape, dtype=dtype, device=generator.device)
    return values.normal_(mean, std, generator=generator)
