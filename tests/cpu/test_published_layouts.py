"""Every published checkpoint passes the load plan at its true size and on every split.

No tensor is missing or surplus, and a rank holds the planned bytes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from published_layouts import ITEM_BYTES, PUBLISHED

from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import read_quantization
from negamax.formats.platform import CPU, Platform, nvidia
from negamax.formats.readable import is_kept
from negamax.kernels.registry import resolve
from negamax.layers.weights import WeightSlot
from negamax.models.build import build_empty_slots
from negamax.models.memory import expert_padding, weight_bytes
from negamax.models.minimax_names import SPELLINGS
from negamax.models.registry import bundled_spec
from negamax.parallel.layout import ParallelLayout
from tests.layouts import full

DTYPE = torch.bfloat16
H200 = nvidia((9, 0), name="NVIDIA H200", shared_memory=233472)
SPLITS = {
    "tp1": ParallelLayout(),
    "tp4": ParallelLayout(rank=1, tp=4),
    "tp8": ParallelLayout(rank=3, tp=8),
    "tp8 ep8": ParallelLayout(rank=7, tp=8, ep=8),
    "tp16": ParallelLayout(rank=5, tp=16),
    "tp16 ep2": ParallelLayout(rank=9, tp=16, ep=2),
}
# On the CPU all weights are plain after loading, so two splits suffice for each format.
CHECKED = [(H200, layout) for layout in SPLITS.values()]
CHECKED += [(CPU, SPLITS[name]) for name in ("tp1", "tp16 ep2")]
# The gate checks one split per format, and each split with several formats.
SAMPLED = [(name, (CHECKED[3 * n % len(CHECKED)],)) for n, name in enumerate(PUBLISHED)]
FULL_COUNTS = {"fp8 of M2": 96_103, "fp8": 96_103, "bf16": 48_239, "m3, bf16": 23_416}


@pytest.fixture(scope="module", autouse=True)
def names_respelled_once() -> Iterator[None]:
    """Cache the renaming: all splits and formats have the same names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SPELLINGS, "respell", cache(SPELLINGS.respell))
        yield


def spec_of(name: str, folder: Path, *, layers: int) -> ModelSpec:
    published = PUBLISHED[name]
    fields = published.quantization_of(layers)
    quantization = read_quantization({"quantization_config": fields}, folder)
    return replace(bundled_spec(published.model).first_layers(layers), quantization=quantization)


def held_bytes(slots: dict[str, WeightSlot]) -> tuple[int, int]:
    parameters, written = {}, 0
    for slot in slots.values():
        if slot.needed and not slot.optional and slot._target is not None:
            storage = slot._target.untyped_storage()
            parameters[storage._cdata] = storage.nbytes()
            written += slot._target.nbytes
    return sum(parameters.values()), written


def check(
    name: str, folder: Path, platform: Platform, layout: ParallelLayout, *, layers: int
) -> None:
    published, spec = PUBLISHED[name], spec_of(name, folder, layers=layers)
    kernels = resolve(platform=platform, dtype=DTYPE)
    slots = build_empty_slots(spec, layout, dtype=DTYPE, kernels=kernels)
    plan = plan_load(slots, spec, folder)
    num_skipped = sum(map(len, plan.skipped.values()))
    assert num_skipped == published.num_skipped
    assert plan.num_tensors + num_skipped == sum(1 for _ in published.tensors(layers))
    parameters, written = held_bytes(slots)
    split = {"kept": partial(is_kept, platform=platform), "layout": layout}
    # The embedding has two padding rows, for ids of other ranks.
    border = 2 * spec.hidden_size * DTYPE.itemsize
    assert parameters == weight_bytes(spec, dtype="bfloat16", **split) + border
    # Every parameter is written in full, except padding of shards to whole blocks.
    assert parameters == written + border or expert_padding(spec, **split) is not None


@pytest.mark.parametrize(
    ("name", "splits"),
    [pytest.param(*each, id=each[0]) for each in SAMPLED]
    + [full(name, CHECKED) for name in PUBLISHED],
)
def test_published_checkpoints_fit_on_every_split(
    tmp_path: Path, name: str, splits: Sequence[tuple[Platform, ParallelLayout]]
) -> None:
    """Use the fewest layers that have all kinds of tensors."""
    layers = PUBLISHED[name].fewest_layers
    PUBLISHED[name].write(tmp_path, layers)
    for platform, layout in splits:
        check(name, tmp_path, platform, layout, layers=layers)


def test_published_layouts_have_the_known_tensor_counts() -> None:
    for name, published in PUBLISHED.items():
        if name in FULL_COUNTS:
            assert sum(1 for _ in published.tensors(published.layers)) == FULL_COUNTS[name]
    sizes = {"F8_E4M3": 0, "F32": 0, "BF16": 0}
    for _, (dtype, shape) in PUBLISHED["fp8 of M2"].tensors():
        sizes[dtype] += math.prod(shape)
    assert 227.40e9 < sizes["F8_E4M3"] < 227.42e9 and len(PUBLISHED["fp8 of M2"].files) == 125
    m3 = [
        math.prod(shape) * ITEM_BYTES[dtype]
        for _, (dtype, shape) in PUBLISHED["m3, bf16"].tensors()
    ]
    assert sum(m3) == 854_172_958_720 and len(PUBLISHED["m3, bf16"].files) == 59


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_fit_at_full_size(tmp_path: Path, name: str) -> None:
    layers = PUBLISHED[name].layers
    PUBLISHED[name].write(tmp_path, layers)
    for layout in SPLITS.values():
        for platform in (CPU, H200):
            check(name, tmp_path, platform, layout, layers=layers)
