"""A checkpoint of M2's shapes with few layers and random values, to measure conversions with.

python -m tests.large_checkpoint FOLDER [--layers 2]
python -m tests.large_checkpoint FOLDER --convert DST --to int4    # print time and memory
python -m tests.large_checkpoint FOLDER --convert DST --tp 4       # split for ranks, as stored
"""

import argparse
import json
import math
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from negamax.checkpoint.reader import INDEX_NAME
from negamax.convert.convert import Conversion, convert
from negamax.convert.source import Source
from negamax.convert.targets import find_target
from negamax.convert.verify import compare
from negamax.convert.writer import Planned, TensorFile
from negamax.formats.floats import E4M3_GROUP
from negamax.models.family import WeightSpec
from negamax.models.registry import bundled_spec, import_names
from tests.tiny import NANO, TOKENIZER_FILES

# Normal values, as large as those of FP8 blocks; no row length divides the table's length.
SHARED = (
    torch.randn(2**24 + 1, generator=torch.Generator().manual_seed(0)).mul_(90).clamp_(-448, 448)
)


def write(folder: Path, layers: int) -> None:
    """Write MiniMax's format, one file per layer."""
    folder.mkdir(parents=True)
    spec = replace(bundled_spec("minimax-m2"), num_layers=layers)
    names, weight_map = import_names(spec), {}
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
    """Make the tensors that MiniMax stores of a weight."""
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
    """Make scales of about 1e-4, ones for vectors, and normal values otherwise."""
    if len(planned.shape) < 2:
        return torch.ones(planned.shape, dtype=planned.dtype)
    if planned.name.endswith("_scale_inv"):
        return torch.rand(planned.shape).add_(0.5).mul_(1e-4)
    values = SHARED if planned.dtype is torch.float8_e4m3fn else SHARED * 1e-4
    count = math.prod(planned.shape)
    return values.to(planned.dtype).repeat(-(-count // len(values)))[:count].view(planned.shape)


def measure(folder: Path, destination: Path, to: str | None, tp: int) -> None:
    """Convert, read the result again, and print time and memory."""
    source = Source(folder)
    total, layer = (
        sum(weight.num_bytes for weight in those) for those in (source.weights, source.of_layer(0))
    )
    target = find_target(to) if to else None
    conversion = Conversion(str(folder), folder, destination, target, tp=tp, allow_lossy=True)
    del source
    before, began = peak_bytes(), time.perf_counter()
    source = convert(conversion)
    seconds, peak = time.perf_counter() - began, peak_bytes()
    written = sum(path.stat().st_size for path in destination.iterdir())
    print(
        f"{total / 1e9:.1f} GB to {to or f'{tp} ranks'}, {written / 1e9:.1f} GB: {seconds:.0f} s, "
        f"{total / 1e6 / seconds:.0f} MB/s; peak {peak / 1e9:.2f} GB, {before / 1e9:.2f} GB of it "
        f"before; a layer is {layer / 1e9:.2f} GB",
        flush=True,
    )
    began = time.perf_counter()
    errors = [one.error for one in compare(source, destination)]
    changed = [error for error in errors if error]
    print(
        f"read again in {time.perf_counter() - began:.0f} s, peak {peak_bytes() / 1e9:.2f} GB: "
        f"{len(changed)} of {len(errors)} weights changed, by "
        f"{sum(changed) / max(1, len(changed)):.2%}, {max(errors):.2%} at most"
    )
    assert peak - before < 2 * layer, "the memory of two layers is the limit"
    assert max(errors) <= (target.limit if target else 0.0), "farther off than the format explains"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--convert", type=Path)
    parser.add_argument("--to")
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    if given.convert:
        measure(given.folder, given.convert, given.to, given.tp)
    else:
        write(given.folder, given.layers)
