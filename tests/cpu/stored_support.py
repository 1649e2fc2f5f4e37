import json
from collections.abc import Mapping
from pathlib import Path

import torch
from model_support import PagedRun, build
from torch import Tensor

from negamax.checkpoint.loader import CheckpointReport, fill
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.kernels.registry import KernelTable
from negamax.layers.weights import WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()), folder)


def load(
    folder: Path,
    layout: ParallelLayout = ParallelLayout(),  # noqa: B008  (it never changes)
    *,
    spec: ModelSpec | None = None,
    kernels: KernelTable | None = None,
    is_split: bool = False,
) -> tuple[Decoder, dict[str, Tensor], CheckpointReport]:
    """Load one rank's model: the model, its slots' tensors before `finish_loading`, the report."""
    spec, one = spec or spec_of(folder), SingleRank()
    context = ParallelContext(layout, attention_group=one, expert_group=one, world=one)
    model = build(spec, context=context, kernels=kernels, loaded=False)
    slots = model.weight_slots()
    targets = {name: vars(slot)["_target"] for name, slot in slots.items()}
    report = fill(slots, plan_load(slots, spec, folder, layout if is_split else None))
    written = {name: targets[name] for name, slot in slots.items() if slot.written}
    return model, {name: each for name, each in written.items() if each is not None}, report


def part_of(slot: WeightSlot, whole: Tensor) -> Tensor:
    return whole[tuple(slice(each.start, each.stop) for each in slot.region)]


def assert_holds(model: Decoder, found: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    for name, values in found.items():
        assert torch.equal(values, part_of(model.weight_slots()[name], plain[name])), name


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    run, tokens = PagedRun(model), list(prompt)
    for _ in range(count):
        logits = run.step([("a", tokens[run.lengths.get("a", 0) :])])["a"]
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
