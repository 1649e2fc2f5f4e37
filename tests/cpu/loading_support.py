import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from m2_checkpoints import CONFIG, random_tensors, save_sharded, tiny_spec
from model_support import PagedRun, build
from safetensors.torch import load_file, save_file
from torch import Tensor

from negamax.checkpoint.loader import CheckpointReport, fill
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.convert.convert import Conversion
from negamax.convert.targets import find_target
from negamax.layers.weights import WeightSlot
from negamax.models.decoder import Decoder
from negamax.models.registry import read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

FILES = ["model-00000-of-00009.safetensors", "model-00001-of-00009.safetensors"]
KV_SCALE = "model.layers.1.self_attn.k_proj.k_scale"


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()), folder)


def build_rank(
    spec: ModelSpec,
    layout: ParallelLayout = ParallelLayout(),  # noqa: B008  (the default is immutable)
    **options: Any,
) -> tuple[Decoder, dict[str, Tensor]]:
    """Build one rank's model for loading. Return the model and the tensors of its slots by name."""
    model = build(spec, context=ParallelContext(layout), loaded=False, **options)
    return model, {name: slot.target for name, slot in model.weight_slots().items()}


def load(
    folder: Path,
    layout: ParallelLayout = ParallelLayout(),  # noqa: B008  (the default is immutable)
    *,
    spec: ModelSpec | None = None,
    is_split: bool = False,
    **options: Any,
) -> tuple[Decoder, dict[str, Tensor], CheckpointReport]:
    """Load one rank's model.

    Return the model, the tensors of its slots before `finish_loading`, and the report.
    """
    spec = spec or spec_of(folder)
    model, targets = build_rank(spec, layout, **options)
    slots = model.weight_slots()
    report = fill(slots, plan_load(slots, spec, folder, layout if is_split else None))
    written = {name: targets[name] for name, slot in slots.items() if slot.written}
    return model, {name: each for name, each in written.items() if each is not None}, report


def part_of(slot: WeightSlot, whole: Tensor) -> Tensor:
    return whole[tuple(slice(each.start, each.stop) for each in slot.region)]


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_holds(model: Decoder, found: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    slots = model.weight_slots()
    assert_equal(found, {name: part_of(slots[name], plain[name]) for name in found})


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    run, tokens = PagedRun(model), list(prompt)
    for _ in range(count):
        tokens.append(int(run.step([("a", tokens[run.lengths.get("a", 0) :])])["a"][-1].argmax()))
    return tokens[len(prompt) :]


def write_source(
    folder: Path, *, tensor_dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Write an unquantized checkpoint with fp32 routers, KV cache scales and side files."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "vocab_size": 64}
    config = {**CONFIG, **sizes, "num_local_experts": 2, "dtype": "bfloat16", **changes}
    tensors = random_tensors(tiny_spec(**config), dtype=tensor_dtype)
    for name in tensors:
        if name.endswith(("gate.weight", "correction_bias")):
            tensors[name] = tensors[name].float()
    tensors[KV_SCALE] = torch.tensor(0.25)
    tensors["model.layers.1.self_attn.q_scale"] = torch.tensor(0.5)
    save_sharded(folder, tensors, names=FILES)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "hf_quant_config.json.bak").write_text("")
    return folder


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a file, or of a folder's model.safetensors, and save the changes."""
    file = file / "model.safetensors" if file.is_dir() else file
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, {"format": "pt"})


def conversion(
    source: Path, destination: Path, to: str | None = None, **options: Any
) -> Conversion:
    options = {"allow_lossy": to is not None, **options}
    return Conversion(str(source), source, destination, find_target(to) if to else None, **options)


def stored_bytes(folder: Path) -> dict[str, bytes]:
    return {
        name: tensor.flatten().view(torch.uint8).numpy().tobytes()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
