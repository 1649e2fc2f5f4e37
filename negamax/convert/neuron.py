"""Layout of neuronx-distributed-inference: file names, tensor names and stacked experts.

`preprocess_minimax_m2_fp8.py` defines the layout and the rescaling of FP8 blocks. Values are
converted to bf16, divided by 448/240 and rounded to FP8. Scales are multiplied by 448/240.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.convert.layout import Piece, pieces, read_together
from negamax.convert.source import Source, Weight
from negamax.convert.targets import Target
from negamax.convert.writer import Planned
from negamax.formats.floats import E4M3_BLOCKS, E4M3_GROUP, E4M3_MAX, PLAIN
from negamax.kernels.quantize.stored import encode
from negamax.quantization.neuron import LARGEST, NEURON_BLOCKS

_EXPERT = re.compile(r"(.*\.block_sparse_moe\.)experts\.(\d+)\.(w1|w2|w3)\.weight")
# name of a stacked tensor -> an expert's matrices, which the tensor stores as one matrix
_STACKED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"(\.block_sparse_moe\.)gate\.weight$"), r"\1router.linear_router.weight"),
    (re.compile(r"(\.block_sparse_moe\.)(e_score_correction_bias)$"), r"\1router.\2"),
)


def file_name(layer: int | None) -> str:
    """Return the file name of a layer, or of the tensors outside the layers (`layer` None)."""
    return "model_extras.safetensors" if layer is None else f"model_layer{layer}.safetensors"


def neuron_pieces(source: Source, layer: int | None, target: Target) -> Iterator[Piece]:
    """Yield a layer's pieces. Raises `ConfigError`."""
    experts: dict[str, list[dict[str, Weight]]] = defaultdict(list)
    for weight in source.read_layer(layer):
        if match := _EXPERT.fullmatch(weight.name):
            prefix, number, name = match[1], int(match[2]), match[3]
            if number == len(experts[prefix]):
                experts[prefix].append({})
            experts[prefix][number][name] = weight
    for piece in pieces(source, layer, target):
        if piece.slot is None or not _EXPERT.fullmatch(piece.slot):
            yield _renamed(piece)
    for prefix, matrices in experts.items():
        for number, matrix in enumerate(matrices):
            for stacked, parts in _STACKED.items():
                name = f"{_rename(prefix)}expert_mlps.mlp_op.{stacked}"
                yield _expert(name, [matrix[part] for part in parts], number, len(matrices))


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _renamed(piece: Piece) -> Piece:
    names = {planned.name: _rename(planned.name) for planned in piece.tensors}

    def make(read: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {names[name]: tensor for name, tensor in piece.make(read).items()}

    planned = tuple(Planned(names[one.name], one.dtype, one.shape) for one in piece.tensors)
    return replace(piece, tensors=planned, make=make)


def _expert(name: str, weights: list[Weight], number: int, count: int) -> Piece:
    """Make the entry of expert `number` in a stack of `count`. [I, K] is stored as [K, I]."""
    rows, columns = weights[0].shape
    if rows % E4M3_GROUP or columns % E4M3_GROUP:
        raise ConfigError(
            f"{weights[0].name} is {rows} x {columns}; the Neuron layout needs multiples of "
            f"{E4M3_GROUP}",
            hint="choose another format for --to",
        )

    def make(read: list[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        made = [_transposed(*both) for both in zip(weights, read, strict=True)]
        return {f"{name}.{key}": torch.cat([one[key] for one in made], 1) for key in made[0]}

    shapes = {
        "weight": (torch.float8_e4m3fn, (columns, rows * len(weights))),
        "scale": (torch.float32, (columns // E4M3_GROUP, rows * len(weights) // E4M3_GROUP)),
    }
    planned = tuple(
        Planned(f"{name}.{key}", dtype, shape, count=count, index=number)
        for key, (dtype, shape) in shapes.items()
    )
    read, num_bytes = partial(read_together, weights), sum(one.move.num_bytes for one in weights)
    return Piece(None, (), PLAIN, planned, read, make, num_bytes)


def _transposed(weight: Weight, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of `weight` as [K, I] in Trainium's FP8."""
    if weight.format == NEURON_BLOCKS:
        return tensors
    if weight.format != E4M3_BLOCKS:
        return encode(NEURON_BLOCKS, weight.dequantize(tensors))
    factor = E4M3_MAX / LARGEST
    values = (tensors["weight"].bfloat16() / factor).to(torch.float8_e4m3fn)
    scale = tensors["weight_scale_inv"] * factor
    return {"weight": values.T.contiguous(), "scale": scale.T.contiguous()}
