"""Detect the platform of a PyTorch device."""

import platform
from functools import cache
from typing import Any

import torch

from negamax.formats.platform import CPU, Platform, amd, nvidia


@cache
def platform_of(device: torch.device) -> Platform:
    """Return the platform of `device`."""
    if device.type != "cuda":
        return CPU
    found = torch.cuda.get_device_properties(device)
    sizes: dict[str, Any] = {
        "name": found.name,
        "multiprocessors": found.multi_processor_count,
        "shared_memory": found.shared_memory_per_multiprocessor,
    }
    if torch.version.hip is not None:
        return amd(found.gcnArchName.split(":")[0], **sizes)
    return nvidia((found.major, found.minor), **sizes)


def cpu_computes_bf16() -> bool:
    """Return whether this CPU has bf16 instructions.

    With plain AVX-512 only, oneDNN multiplies bf16 more slowly than fp32 (docs/performance.md).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return (
        platform.machine().lower() not in ("x86_64", "amd64")
        or torch.cpu._is_avx512_bf16_supported()
    )
