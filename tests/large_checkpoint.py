"""A checkpoint of M2's shapes with few layers and random values, to measure conversions with.

python -m tests.large_checkpoint FOLDER [--layers 3]
python -m tests.large_checkpoint FOLDER --convert DST --to int4    # and what memory that takes
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from negamax.checkpoint.reader import INDEX_NAME
from negamax.config.families import bundled_spec
from negamax.convert.convert import Conversion, convert
from negamax.convert.source import Source
from negamax.convert.targets import target_of
from negamax.convert.writer import Planned, TensorFile
from negamax.kernels.formats import E4M3_GROUP
from negamax.models.family import WeightSpec, names_of
from tests.tiny import NANO, TOKENIZER_FILES

SHARED = torch.randint(0, 256, (2**24,), dtype=torch.uint8).bitwise_and_(0xF7)  # no NaN among them


def write(folder: Path, layers: int) -> None:
    """MiniMax's own format, a file per layer."""
    folder.mkdir(parents=True)
    spec = replace(bundled_spec("minimax-m2"), num_layers=layers)
    names, weight_map = names_of(spec), {}
    by_layer: dict[int | None, list[tuple[str, WeightSpec]]] = {}
    for weight in names.weights(spec):
        for name in weight.names():
            by_layer.setdefault(names.layer_of(name), []).append((name, weight))
    for number, members in enumerate(by_layer.values()):
        planned = [one for name, weight in members for one in stored(name, weight)]
        path = folder / f"model-{number:05d}-of-{len(by_layer):05d}.safetensors"
        weight_map |= {one.name: path.name for one in planned}
        with TensorFile(path, planned, {}) as file:
            for one in planned:
                file.write(one, values(one))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    for name in TOKENIZER_FILES:
        shutil.copy(NANO / name, folder / name)
    sizes = {
        "vocab_size": spec.vocab_size, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": layers, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6, "num_local_experts": 256,
        "num_experts_per_tok": 8, "max_position_embeddings": 196608, "eos_token_id": 200020,
    }  # fmt: skip
    config = {"architectures": [spec.architecture], "dtype": "bfloat16", **sizes}
    assert spec.quantization is not None
    config["quantization_config"] = spec.quantization.fields
    (folder / "config.json").write_text(json.dumps(config))


def stored(name: str, weight: WeightSpec) -> list[Planned]:
    """The tensors that MiniMax stores of a weight."""
    if "_proj" not in name and ".experts." not in name:
        is_router = "block_sparse_moe" in name
        return [Planned(name, torch.float32 if is_router else torch.bfloat16, weight.shape)]
    rows, columns = weight.shape
    scales = -(-rows // E4M3_GROUP), -(-columns // E4M3_GROUP)
    return [
        Planned(name, torch.float8_e4m3fn, weight.shape),
        Planned(f"{name}_scale_inv", torch.float32, scales),
    ]


def values(planned: Planned) -> Tensor:
    """Random FP8, ones of the others."""
    if planned.dtype is not torch.float8_e4m3fn:
        return torch.ones(planned.shape, dtype=planned.dtype)
    count = planned.num_bytes
    repeated = SHARED.repeat(-(-count // len(SHARED)))[:count]
    return repeated.view(torch.float8_e4m3fn).reshape(planned.shape)


def measure(folder: Path, destination: Path, to: str) -> None:
    """Convert, and print what it takes."""
    source = Source(folder)
    total, layer = (
        sum(weight.num_bytes for weight in those) for those in (source.weights, source.of_layer(0))
    )
    del source
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    convert(Conversion(str(folder), folder, destination, target_of(to), allow_lossy=True))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(
        f"{total / 1e9:.1f} GB to {to}: {seconds:.0f} s, {total / 1e6 / seconds:.0f} MB/s; memory "
        f"{peak / 1e9:.2f} GB above {before / 1e9:.2f} GB, a layer is {layer / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--convert", type=Path)
    parser.add_argument("--to", default="int4")
    given = parser.parse_args()
    if given.convert:
        measure(given.folder, given.convert, given.to)
    else:
        write(given.folder, given.layers)
