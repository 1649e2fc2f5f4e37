"""Activations between kernels: plain values, and an FP8 copy if the next GEMM reads FP8.

If the next GEMM reads FP8, the norm or attention kernel writes the FP8 copy itself, which saves a
launch. Layers pass the result of a kernel to the next kernel unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import E4M3_GROUP

if TYPE_CHECKING:
    from negamax.kernels.peers import Collective

GROUP = E4M3_GROUP  # number of adjacent columns that share a scale


@dataclass(frozen=True)
class SwiGlu:
    """The activation of an MLP: g * sigmoid(alpha * g) * (u + beta). The default is silu(g) * u.

    g is the gate, clamped to at most `limit`. u is the up projection, clamped to -limit .. limit.
    """

    alpha: float = 1.0
    limit: float | None = None
    beta: float = 0.0

    def __call__(
        self, gate_up: Tensor, *, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    ) -> Tensor:
        """Map gate_up [T, 2 * width], gate columns first, to [T, width] in gate_up's dtype.

        With default constants, silu(g) and its product with u are each rounded to gate_up's dtype.
        With custom constants, only the final product is rounded. `sigmoid` maps fp32 to fp32.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        if self == SILU:
            return F.silu(gate).mul_(up)
        gate, up = gate.float(), up.float()
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * sigmoid(self.alpha * gate) * (up + self.beta)).to(gate_up.dtype)


SILU = SwiGlu()


@dataclass(frozen=True)
class QuantizedActivations:
    """`hidden` and its FP8 copy: hidden[t, c] is approximately q[t, c] * scale[t, c // 128]."""

    hidden: Tensor  # [T, width] bf16 or fp16
    q: Tensor  # [T, width] float8_e4m3fn, on MI300 float8_e4m3fnuz
    scale: Tensor  # [T, width / 128] fp32

    def dequantize(self) -> Tensor:
        """Return the values of the FP8 copy, [T, width] fp32."""
        groups: Tensor = self.q.float().unflatten(1, (-1, GROUP))
        return (groups * self.scale.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True)
class ShardedActivations(QuantizedActivations):
    """Activations whose rows are sharded over `group`, valid until the group's next all-reduce.

    `q` and `scale` have all rows. `hidden` has only this rank's rows, which start at row `first`.
    """

    group: Collective
    first: int


Hidden = Tensor | QuantizedActivations


def unquantized(x: Hidden) -> Tensor:
    """Return all rows of the activations in the model's dtype."""
    assert not isinstance(x, ShardedActivations), (
        "this rank has only its own rows of the unquantized activations"
    )
    return x.hidden if isinstance(x, QuantizedActivations) else x


def model_dtype(x: Hidden) -> torch.dtype:
    """Return the dtype of the unquantized activations."""
    return x.hidden.dtype if isinstance(x, QuantizedActivations) else x.dtype


def concatenate(parts: Sequence[Hidden]) -> Hidden:
    """Concatenate the rows of `parts`. Either all parts or no part must have an FP8 copy."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedActivations)]
    if not quantized:
        return torch.cat([unquantized(part) for part in parts])
    assert len(quantized) == len(parts), "either all parts or no part must have an FP8 copy"
    return QuantizedActivations(
        hidden=torch.cat([unquantized(part) for part in quantized]),
        q=torch.cat([part.q.view(torch.uint8) for part in quantized]).view(quantized[0].q.dtype),
        scale=torch.cat([part.scale for part in quantized]),
    )
