"""What this machine's processors are, asked once, and what is known not to run on them.

Imports no torch until a device is asked for.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from negamax.base.errors import ConfigError

if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = (8, 0)  # Ampere: the first with bf16 arithmetic
FP8_CAPABILITY = (8, 9)  # Ada: the first on which Triton multiplies e4m3 values
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
MEASURED_CAPABILITIES = ((9, 0),)  # kernels were tested, and tiles chosen, on H200


@dataclass(frozen=True)
class Platform:
    """One device. `capability` is NVIDIA's (major, minor); None on others."""

    vendor: str  # "cpu", "nvidia", "amd"
    name: str
    capability: tuple[int, int] | None = None

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start before the one in front of it has ended."""
        return self.capability is not None and self.capability >= DEPENDENT_LAUNCH_CAPABILITY

    @property
    def is_measured(self) -> bool:
        """Whether tests and measurements of the kernels were made on such a device."""
        return self.vendor == "cpu" or self.capability in MEASURED_CAPABILITIES

    @property
    def label(self) -> str:
        """The device in words."""
        if self.capability is None:
            return self.name
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"

    def check(self, *, fp8_weights: bool, fp8_cache: bool) -> None:
        """Refuse what does not run here. Errors: `ConfigError` naming the device and what does."""
        if self.vendor == "amd":
            raise ConfigError(
                f"{self.label}: AMD GPUs (ROCm) are not supported yet",
                hint="use an NVIDIA GPU of compute capability 9.0, or --device cpu",
            )
        if self.capability is None:
            return
        if self.capability < BF16_CAPABILITY:
            raise ConfigError(
                f"{self.label} has no bfloat16 arithmetic; 8.0 or higher is needed",
                hint="use another GPU, or --device cpu",
            )
        if fp8_weights and self.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{self.label} cannot multiply FP8 weights, which this checkpoint has; 8.9 or "
                f"higher is needed",
                hint="use another GPU, --device cpu, or a bf16 checkpoint (never measured on "
                "this GPU)",
            )
        if fp8_cache and self.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{self.label} has no FP8 KV cache; 8.9 or higher is needed",
                hint="drop --kv-cache-dtype",
            )


@cache
def platform_of(device: torch.device) -> Platform:
    """The platform of `device`, asked once."""
    import torch

    if device.type != "cuda":
        return Platform("cpu", "CPU")
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return Platform("amd", name)
    return Platform("nvidia", name, torch.cuda.get_device_capability(device))


def cpu_computes_bf16() -> bool:
    """Whether this CPU multiplies bf16 by instructions of its own. oneDNN also takes bf16 on
    AVX-512 without them, and is then slower than in fp32 (docs/performance.md)."""
    import torch

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return (
        platform.machine().lower() not in ("x86_64", "amd64")
        or torch.cpu._is_avx512_bf16_supported()
    )
