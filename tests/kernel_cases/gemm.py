from dataclasses import replace

import torch
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, E4M3_GROUP, E4M3_MAX, PLAIN, plain
from negamax.formats.tensor_format import StoredWeight, TensorFormat
from negamax.kernels.activations import Hidden
from negamax.kernels.gemm.op import LINEAR, LinearOutput
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize import op as quantize
from tests.kernel_cases import weight_only
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn

_M2_SHAPES = {  # inputs and outputs of one rank
    "qkv TP4": (3072, 2048), "o_proj TP4": (1536, 3072), "qkv TP2": (3072, 4096),
    "o_proj TP2": (3072, 3072), "qkv TP1": (3072, 8192), "o_proj TP1": (6144, 3072),
}  # fmt: skip
_M3_SHAPES = {
    "M3 qkv TP4": (6144, 2560),  # includes the index projections
    "M3 o_proj TP4": (2048, 6144),
    "M3 gate_up TP4": (6144, 6144),  # gate and up of a dense layer
    "M3 down TP4": (3072, 6144),
}
_M3_PACKED_SHAPES = {"M3 qkv TP2": (6144, 4992), "M3 o_proj TP2": (4096, 6144)}
_M2_TOKENS = (1, 3, 16, 63, 128, 301, 1024, 8192)
_PACKED_TOKENS = (1, 16, 64, 1024)
_LONG = (8192,)  # numbers of tokens at which activations may be rounded
_HEAD_ROWS = {"lm_head TP4": 50016, "lm_head TP1": 200064}


def small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, inputs, outputs, *to in (
        (0, 64, 32), (1, 256, 264), (3, 37, 5), (16, 512, 256), (17, 200, 131), (33, 200, 131),
        (130, 56, 96), (5, 64, 48, torch.float32),
    ):  # fmt: skip
        out_dtype = to[0] if to else None
        tensors = {
            "x": randn(num_tokens, inputs, dtype=dtype, generator=generator),
            "weight": randn(outputs, inputs, dtype=dtype, generator=generator, scale=inputs**-0.5),
        }
        label = f"T={num_tokens} in={inputs} out={outputs}{' to fp32' if out_dtype else ''}"
        cases.append(Case(label, tensors, {"dtype": out_dtype}))
    cases += [
        weight_only_case(dtype, generator, stored, *sizes)
        for number, stored in enumerate(weight_only.SMALL_FORMATS)
        for sizes in (
            (1, 640, 130) if number % 2 else (33, 192, 72),
            (1 + number % 4, 800, 24),
            (70, 200 if number == 0 or stored.activation else 128, 136),
        )
    ]
    for num_tokens, stored in zip((3, 1, 1), weight_only.FORMATS[:3], strict=True):
        case = weight_only_case(dtype, generator, stored, num_tokens, 3584, 24)
        cases.append(replace(case, label=f"{case.label} in parts", numbers={"in_parts": True}))
    return cases + [
        fp8_case(dtype, generator, *sizes)
        for sizes in (
            (0, 128, 64), (1, 512, 24), (1, 640, 130), (2, 640, 130), (7, 896, 40), (9, 384, 72),
            (16, 896, 24), (20, 384, 128), (33, 640, 64), (65, 128, 192), (129, 256, 130),
        )
    ]  # fmt: skip


def full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = [
        fp8_case(dtype, generator, n, *sizes, label)
        for label, sizes in _M2_SHAPES.items()
        for n in (_M2_TOKENS if "TP4" in label else _M2_TOKENS[:-1])
    ]
    cases += [
        weight_only_case(dtype, generator, stored, n, *sizes, label)
        for stored in weight_only.FORMATS
        for label, sizes in _M2_SHAPES.items()
        for n in (*_PACKED_TOKENS, *(_LONG if stored.activation else ()))
    ]
    cases += [
        weight_only_case(dtype, generator, weight_only.INT4, n, *sizes, label)
        for label, sizes in _M3_PACKED_SHAPES.items()
        for n in (1, 16, 64, 100)
    ]
    for label, rows in _HEAD_ROWS.items():
        weight = randn(rows, 3072, dtype=dtype, generator=generator, scale=3072**-0.5)
        for num_tokens in (1, 16, 63, 128):
            x = randn(num_tokens, 3072, dtype=dtype, generator=generator)
            tensors = {"x": x, "weight": weight}
            cases.append(Case(f"{label} T={num_tokens}", tensors, {"dtype": torch.float32}))
    return cases + [
        fp8_case(dtype, generator, n, *sizes, label)
        for label, sizes in _M3_SHAPES.items()
        for n in (1, 16, 63, 1024)
    ]


def fp8_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    inputs: int,
    outputs: int,
    label: str = "",
) -> Case:
    """Make exact activations: e4m3 times a power of two, with maximum 7 in each group of 128."""
    x = randn(num_tokens, inputs, dtype=torch.float32, generator=generator).clamp(-6.5, 6.5)
    x = (x * 64).to(torch.float8_e4m3fn).float() / 64
    x[:, ::E4M3_GROUP] = 7.0
    weight, scale = fp8_weight(outputs, inputs, generator=generator)
    label = f"{label or f'{inputs} -> {outputs}'} FP8 T={num_tokens}"
    tensors = {"x": x.to(dtype), "weight.weight": weight, "weight.weight_scale_inv": scale}
    return Case(label, tensors, {}, E4M3_BLOCKS)


def weight_only_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    stored: TensorFormat,
    num_tokens: int,
    inputs: int,
    outputs: int,
    label: str = "",
) -> Case:
    """Make a case. Activations that may be rounded are exact: integers, or scaled e4m3."""
    x = randn(num_tokens, inputs, dtype=torch.float32, generator=generator)
    if stored.activation is not None:
        element = getattr(torch, stored.activation.element)
        largest = 127.0 if element is torch.int8 else E4M3_MAX
        x = (x * largest / 7).clamp(-largest, largest).to(element).float() / 64
        x[:, :: inputs - 1] = largest / 64
    tensors = {
        "x": x.to(dtype),
        **weight_only.tensors_of(stored, "weight", outputs, inputs, generator=generator),
    }
    label = f"{label or f'{inputs} -> {outputs}'} {stored.name} T={num_tokens}"
    return Case(label, tensors, {}, stored)


def fp8_weight(*shape: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make e4m3 matrices [..., N, K] of standard deviation K^-1/2, and their scales."""
    *count, rows, columns = shape
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=generator.device)
    for matrix in values.view(-1, rows, columns):  # In fp32, all matrices at once would be large.
        drawn = randn(rows, columns, dtype=torch.float32, generator=generator, scale=80)
        matrix.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX))
    grid = E4M3_BLOCKS.tensors[1].shape((rows, columns))
    spread = 0.5 + torch.rand(*count, *grid, generator=generator, device=generator.device)
    return values, spread * (columns**-0.5 / 80)


def stored_weight(case: Case, name: str) -> StoredWeight:
    if case.stored is PLAIN:
        return plain(case.tensors[name])
    kept = [tensor.name for tensor in case.stored.tensors]
    return StoredWeight(case.stored, {each: case.tensors[f"{name}.{each}"] for each in kept})


def apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    x: Hidden = case.tensors["x"]
    if kernel.activation is not None:
        x = quantize.quantize_activations(case.tensors["x"])
    weight = kernel.prepare(stored_weight(case, "weight"))
    out = kernel.run(x, weight, LinearOutput(**case.numbers))
    return (out if out.dim() == 2 else out.sum(1, dtype=torch.float32).to(out.dtype),)


def cost(case: Case) -> Cost:
    x, rows = case.tensors["x"], len(stored_weight(case, "weight").values)
    out_dtype = case.numbers.get("dtype") or x.dtype
    return Cost(
        num_bytes=num_bytes(*case.tensors.values()) + x.shape[0] * rows * out_dtype.itemsize,
        flops=2 * x.numel() * rows,
    )


CASES = {LINEAR: OpCases(small, apply, cost, full_size)}
