"""y = x W^T with W stored [out, in], as in a checkpoint: in the activations' dtype, or as FP8
blocks with their scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, unquantized
from negamax.kernels.formats import (
    E4M3_BLOCKS,
    E4M3_GROUP,
    E4M3_MAX,
    PLAIN,
    StoredWeight,
    e4m3_blocks,
    plain,
)
from negamax.kernels.op import (
    AnyKernel,
    Case,
    Cost,
    Kernel,
    Op,
    num_bytes,
    randn,
    rounding_tolerance,
)
from negamax.kernels.quantize.spec import dequantize_block, quantize_activations, scale_shape
from negamax.kernels.signatures import LINEAR


def linear(
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out] in `out_dtype` (None: that of x), in `out` where
    given. Of FP8 activations the plain form counts.
    """
    values = unquantized(x)
    dtype = out_dtype or values.dtype
    if weight.dtype != values.dtype:
        values, weight = values.float(), weight.float()
    return into(out, F.linear(values, weight).to(dtype))


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """`result`, in `out` where given."""
    return result if out is None else out.copy_(result)


def keep(weight: StoredWeight) -> Tensor:
    """The values of a plain weight [out, in] as they are; of another its fp32 values."""
    if weight.format is PLAIN:
        return weight.values
    return weight.format.dequantize(weight.tensors)


def _cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, inputs, outputs in (
        (0, 64, 32),
        (1, 256, 1536),
        (3, 37, 5),
        (16, 512, 256),
        (130, 56, 96),
    ):
        tensors = {
            "x": randn(num_tokens, inputs, dtype=dtype, generator=generator),
            "weight": randn(outputs, inputs, dtype=dtype, generator=generator, scale=inputs**-0.5),
        }
        cases.append(Case(f"T={num_tokens} in={inputs} out={outputs}", tensors))
    tensors = {
        "x": randn(5, 64, dtype=dtype, generator=generator),
        "weight": randn(48, 64, dtype=dtype, generator=generator, scale=0.125),
    }
    return [*cases, Case("T=5 in=64 out=48 to fp32", tensors, {"out_dtype": torch.float32})]


def fp8_case(
    num_tokens: int,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
    label: str = "",
) -> Case:
    """A case with an FP8 weight. The activations are e4m3 values times a power of two, 7 the
    largest of each 128, so that their FP8 form is exact and kernels that read either form have one
    result."""
    device = generator.device
    x = torch.randn(num_tokens, inputs, device=device, generator=generator).clamp(-6.5, 6.5)
    x = (x * 64).to(torch.float8_e4m3fn).float() / 64
    x[:, ::E4M3_GROUP] = 7.0
    weight = (
        torch.randn(outputs, inputs, device=device, generator=generator)
        .mul_(80)
        .clamp_(-E4M3_MAX, E4M3_MAX)
    )
    grid = scale_shape(outputs, inputs)
    scale = (torch.rand(*grid, device=device, generator=generator) + 0.5) * (inputs**-0.5 / 80)
    tensors = {"x": x.to(dtype), "weight": weight.to(torch.float8_e4m3fn), "scale": scale}
    return Case(
        f"{label or f'{inputs} -> {outputs}'} FP8 T={num_tokens}", tensors, stored=E4M3_BLOCKS
    )


_M2_SHAPES = {  # in, out of one rank
    "qkv TP4": (3072, 2048),
    "o_proj TP4": (1536, 3072),
    "qkv TP2": (3072, 4096),
    "o_proj TP2": (3072, 3072),
    "qkv TP1": (3072, 8192),
    "o_proj TP1": (6144, 3072),
}
_M2_TOKENS = (1, 3, 16, 63, 128, 301, 1024, 8192)
_HEAD_ROWS = {"lm_head TP4": 50016, "lm_head TP1": 200064}


def _wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for label, (inputs, outputs) in _M2_SHAPES.items():
        tokens = _M2_TOKENS if "TP4" in label else _M2_TOKENS[:-1]
        cases += [
            fp8_case(n, inputs, outputs, dtype=dtype, generator=generator, label=label)
            for n in tokens
        ]
    for label, rows in _HEAD_ROWS.items():
        weight = (
            torch.randn(rows, 3072, device=generator.device, generator=generator)
            .mul_(3072**-0.5)
            .to(dtype)
        )
        for num_tokens in (1, 16, 63, 128):
            x = torch.randn(num_tokens, 3072, device=generator.device, generator=generator).to(
                dtype
            )
            cases.append(
                Case(
                    f"{label} T={num_tokens}",
                    {"x": x, "weight": weight},
                    {"out_dtype": torch.float32},
                )
            )
    return cases


def _apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    x, scale = case.tensors["x"], case.tensors.get("scale")
    weight = plain(case.tensors["weight"])
    if case.stored is not PLAIN:
        weight = e4m3_blocks(case.tensors["weight"], case.tensors["scale"])
    elif scale is not None:  # upcast
        weight = plain(dequantize_block(case.tensors["weight"], scale))
    prepared = kernel.prepare(weight)
    return (kernel.run(x if scale is None else quantize_activations(x), prepared, **case.numbers),)


def _cost(case: Case) -> Cost:
    x, weight = case.tensors["x"], case.tensors["weight"]
    scales = [case.tensors["scale"]] if "scale" in case.tensors else []
    out_bytes = x.shape[0] * weight.shape[0] * case.numbers.get("out_dtype", x.dtype).itemsize
    return Cost(
        num_bytes=num_bytes(x, weight, *scales) + out_bytes, flops=2 * x.shape[0] * weight.numel()
    )


OPS = (
    Op(
        name=LINEAR,
        summary="x W^T with the weight prepared at load",
        reference=Kernel(LINEAR, "reference", linear, keep),
        cases=_cases,
        apply=_apply,
        tolerance=rounding_tolerance(
            reason="fp32 sums in another order, one rounding to the dtype; |y| about 1"
        ),
        cost=_cost,
        wide=_wide,
        wide_error=4e-3,  # one rounding to bf16 is 1.7e-3
    ),
)
