import torch
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels.activations import GROUP, SILU, QuantizedActivations, SwiGlu
from negamax.kernels.mlp.op import SWIGLU
from negamax.kernels.op import AnyKernel
from tests.kernel_cases.case import Case, Cost, num_bytes, randn, tabled
from tests.kernel_cases.quantize import outputs

M3 = SwiGlu(alpha=1.702, limit=7.0, beta=1.0)


def _case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    width: int,
    activation: SwiGlu = M3,
    quantize: bool = True,
) -> Case:
    gate_up = randn(num_tokens, 2 * width, dtype=dtype, generator=generator, scale=4.0)
    label = f"T={num_tokens} width={width} alpha={activation.alpha:g}{' fp8' * quantize}"
    return Case(label, {"gate_up": gate_up}, {"activation": activation, "quantize": quantize})


def apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """Return plain values, and the FP8 values within tolerance if the kernel writes them."""
    n = case.numbers
    quantize = n["quantize"] and Feature.TRITON in kernel.requires
    out = kernel.run(case.tensors["gate_up"], activation=n["activation"], quantize=quantize)
    if isinstance(out, QuantizedActivations):
        return outputs(out)
    return (out, out) if n["quantize"] else (out,)


def cost(case: Case) -> Cost:
    gate_up = case.tensors["gate_up"]
    count = gate_up.numel() // 2
    in_fp8 = count + 4 * count // GROUP if case.numbers["quantize"] else 0
    return Cost(num_bytes=num_bytes(gate_up) * 3 // 2 + in_fp8, flops=8 * count)


_SMALL = (
    (0, 64, M3, False), (1, 37, SILU, False), (5, 136, M3, False), (2, 256, SILU), (3, 1280)
)  # fmt: skip
_WIDE = [(num_tokens, width) for width in (12288, 3072, 1536) for num_tokens in (1, 16, 100, 8192)]
CASES = {SWIGLU: tabled(_case, _SMALL, apply, cost, _WIDE)}
