"""Kernels for the CPU that take weights as they are stored, in any format: dequantised when they
are prepared. With them ranks hold what ranks on GPUs hold.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from negamax.kernels.formats import StoredWeight, TensorFormat, is_plain, plain
from negamax.kernels.op import AnyKernel
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import EXPERTS, LINEAR


def dequantized(weight: StoredWeight) -> Tensor:
    """[..., rows, columns] fp32."""
    lead = weight.values.shape[:-2]
    if not lead:
        return weight.format.dequantize(weight.tensors)
    return torch.stack(
        [
            weight.format.dequantize({name: t[index] for name, t in weight.tensors.items()})
            for index in range(lead[0])
        ]
    )


def keeping_stored(table: KernelTable) -> KernelTable:
    """`table`, whose products take every format as it is stored, too."""

    def stored(kernel: AnyKernel) -> AnyKernel:
        def prepare(*weights: StoredWeight) -> object:
            return kernel.prepare(*(plain(dequantized(weight)) for weight in weights))

        return replace(kernel, prepare=prepare, reads=lambda form: not is_plain(form))

    changed = {op: (*table.candidates[op], stored(table[op])) for op in (LINEAR, EXPERTS)}
    return replace(table, candidates={**table.candidates, **changed})


def random_stored(stored: TensorFormat, shape: tuple[int, int], *, seed: int) -> dict[str, Tensor]:
    """Tensors of a matrix of `shape`: of random numbers, or any codes and scales around 1."""
    generator = torch.Generator().manual_seed(seed)
    if stored.quantize is not None:
        return dict(stored.quantize(torch.randn(shape, generator=generator)))
    tensors = {}
    for tensor in stored.tensors:
        if not tensor.is_kept:
            continue
        dtype, size = getattr(torch, tensor.dtypes[0]), tensor.shape(shape)
        if dtype.is_floating_point:
            noise = torch.randn(size, generator=generator)
            noise = noise if tensor is stored.values else 1 + 0.5 * noise.tanh()
            tensors[tensor.name] = noise.to(dtype)
        else:
            bits = torch.iinfo(dtype)
            tensors[tensor.name] = torch.randint(
                bits.min, bits.max + 1, size, dtype=dtype, generator=generator
            )
    return tensors
