"""Figures of known GPU models, so that `negamax plan` needs no GPU.

`memory` is the size that the driver reports. Bandwidth and rates (without sparsity) are from the
data sheet named above each GPU. Link rates are for one direction, summed over all other GPUs.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.formats.platform import Platform, amd, nvidia

MIB, GIB = 2**20, 2**30
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class GpuModel:
    """Figures of one kind of GPU, in bytes, bytes per second and operations per second."""

    name: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float  # FP8 operations per second; 0: not supported
    link: float
    has_fabric: bool  # whether NVLink or similar links join a machine's GPUs; False: PCIe
    platform: Platform


def _gpu(
    platform: Platform, mib: int, terabytes: float, bf16: float, fp8: float, link: float
) -> GpuModel:
    """Build a `GpuModel` from `bf16` and `fp8` in TFLOP/s, and `link` in GB/s."""
    figures = (mib * MIB, terabytes * 1e12, bf16 * 1e12, fp8 * 1e12, link * 1e9)
    return GpuModel(platform.name, *figures, has_fabric=link > 64, platform=platform)


def _nvidia(name: str, *figures: Any) -> GpuModel:
    """Build a `GpuModel`. The last argument is the compute capability."""
    return _gpu(nvidia(figures[-1], name=name), *figures[:-1])


def _amd(name: str, *figures: Any) -> GpuModel:
    """Build a `GpuModel`. The last argument is the architecture."""
    platform = amd(figures[-1], name=name, multiprocessors=304, shared_memory=65_536)
    return _gpu(platform, *figures[:-1])


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        # NVIDIA A100 data sheet (SXM4): 1,555 and 2,039 GB/s, NVLink 600 GB/s in both directions
        _nvidia("A100-40GB", 40_960, 1.555, 312, 0, 300, (8, 0)),
        _nvidia("A100-80GB", 81_920, 2.039, 312, 0, 300, (8, 0)),
        # NVIDIA L40S data sheet: 864 GB/s, PCIe 4.0 x16
        _nvidia("L40S", 46_068, 0.864, 362, 733, 32, (8, 9)),
        # NVIDIA H100 data sheet (SXM5 and NVL): NVLink 900 and 600 GB/s in both directions
        _nvidia("H100", 81_559, 3.35, 989, 1979, 450, (9, 0)),
        _nvidia("H100-NVL", 95_830, 3.9, 835, 1671, 300, (9, 0)),
        # NVIDIA H800: an H100 with NVLink of 400 GB/s in both directions
        _nvidia("H800", 81_559, 3.35, 989, 1979, 200, (9, 0)),
        # Source: NVIDIA H200 data sheet (SXM)
        _nvidia("H200", 143_771, 4.8, 989, 1979, 450, (9, 0)),
        # Source: NVIDIA H20 product brief
        _nvidia("H20", 97_871, 4.0, 148, 296, 450, (9, 0)),
        # NVIDIA HGX B200 and B300 data sheets, whose figures are for eight GPUs; NVLink 1.8 TB/s
        _nvidia("B200", 183_359, 8.0, 2250, 4500, 900, (10, 0)),
        _nvidia("B300", 275_040, 8.0, 2250, 4500, 900, (10, 3)),
        # NVIDIA RTX PRO 6000 Blackwell data sheet (Workstation): 1,792 GB/s, PCIe 5.0 x16. The FP8
        # rate is a quarter, and the bf16 rate an eighth, of 4,000 FP4 TFLOP/s with sparsity.
        _nvidia("RTX-PRO-6000", 97_887, 1.792, 500, 1000, 64, (12, 0)),
        # AMD Instinct MI300X, MI325X and MI355X data sheets: seven links of 64, 64 and 77 GB/s
        _amd("MI300X", 196_592, 5.3, 1307, 2615, 448, "gfx942"),
        _amd("MI325X", 262_128, 6.0, 1307, 2615, 448, "gfx942"),
        _amd("MI355X", 294_896, 8.0, 2517, 5033, 538, "gfx950"),
    )
}
MEASURED_RANKS = 4  # Largest number of GPUs on which a model was measured.
MEASURED = GPUS["h200"]  # The GPU of all measured and fitted constants in `cost`.


def format_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def find_gpu(name: str) -> GpuModel:
    """Return the GPU with a name of `GPUS` or of a driver ("NVIDIA H200"). Raises `ConfigError`."""
    words = set(re.findall("[a-z0-9]+", name.lower()))
    found = [key for key in GPUS if words.issuperset(key.split("-"))]
    if not found:
        raise ConfigError(
            f"--gpu is {name[:60]!r}; known: {', '.join(gpu.name for gpu in GPUS.values())}",
            hint="for another GPU, pass the most similar known GPU and --gpu-memory",
        )
    return GPUS[max(found, key=len)]  # the longest name in `GPUS` matches best


def visible_gpus() -> Sequence[GpuModel]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; [] without a driver. Raises `ConfigError`."""
    try:
        rows = _driver_rows("index,uuid,name,memory.total")
        seen = _seen_by_cuda(rows, env.find_variables(_VISIBLE).get(_VISIBLE))
        named = [(name, int(mib)) for _, _, name, mib in seen]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [replace(find_gpu(name), memory=mib * MIB) for name, mib in named]


def visible_devices() -> list[str] | None:
    """Return the ids of usable GPUs; None if neither CUDA_VISIBLE_DEVICES nor a driver exists."""
    wanted = env.find_variables(_VISIBLE).get(_VISIBLE)
    words = None if wanted is None else [word.strip() for word in wanted.split(",") if word.strip()]
    try:
        rows = _driver_rows("index,uuid")
    except (OSError, subprocess.SubprocessError):
        return words
    if words is None:
        return [row[0] for row in rows]
    return words[: len(_seen_by_cuda(rows, wanted))]


def _driver_rows(columns: str) -> list[list[str]]:
    """Return nvidia-smi's rows of GPUs. Raises `OSError` or `SubprocessError` without a driver."""
    query = ("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits")
    done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    return [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines()]


def _seen_by_cuda(rows: list[list[str]], wanted: str | None) -> list[list[str]]:
    """Return the GPUs' rows that `wanted` lists. As in CUDA, the first unknown id ends the list."""
    if wanted is None:
        return rows
    found = []
    for word in wanted.split(","):
        place = word.strip()
        if place.startswith("GPU-"):
            row = next((row for row in rows if row[1].startswith(place)), None)
        else:
            row = next((row for row in rows if row[0] == place), None)
        if row is None:
            break
        found.append(row)
    return found
