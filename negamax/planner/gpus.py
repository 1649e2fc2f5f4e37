"""Figures of known GPU models (gpus.toml), so that `negamax plan` needs no GPU."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.tables import read_table
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
    has_fabric: bool  # whether NVLink or similar links, and not PCIe, join a machine's GPUs
    platform: Platform


def _read_gpus() -> Iterator[GpuModel]:
    """Yield the GPUs of gpus.toml, where comments describe the columns."""
    tables = read_table(__file__)
    more = {"multiprocessors": 304, "shared_memory": 65_536}
    platforms: list[Platform] = [nvidia(tuple(row[-1]), name=row[0]) for row in tables["nvidia"]]
    platforms += [amd(row[-1], name=row[0], **more) for row in tables["amd"]]
    for platform, row in zip(platforms, [*tables["nvidia"], *tables["amd"]], strict=True):
        name, mib, terabytes, bf16, fp8, link, _ = row
        rates = (terabytes * 1e12, bf16 * 1e12, fp8 * 1e12, link * 1e9)
        yield GpuModel(name, mib * MIB, *rates, has_fabric=link > 64, platform=platform)


GPUS = {gpu.name.lower(): gpu for gpu in _read_gpus()}
MEASURED_RANKS = 4  # Largest number of GPUs on which a model was measured.
MEASURED = GPUS["h200"]  # The GPU of all measured and fitted constants in `cost`.


def format_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def find_gpu(name: str) -> GpuModel:
    """Find a GPU by its name in `GPUS` or in the driver ("NVIDIA H200"). Raises `ConfigError`."""
    words = set(re.findall("[a-z0-9]+", name.lower()))
    found = [key for key in GPUS if words.issuperset(key.split("-"))]
    if not found:
        raise ConfigError(
            f"--gpu is {name[:60]!r}; known: {', '.join(gpu.name for gpu in GPUS.values())}",
            hint="for another GPU, pass the most similar known GPU and --gpu-memory",
        )
    return GPUS[max(found, key=len)]  # the longest name in `GPUS` matches best


def visible_gpus() -> Sequence[GpuModel]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or [] without a driver. Raises `ConfigError`."""
    try:
        rows = _driver_rows("index,uuid,name,memory.total")
        seen = _seen_by_cuda(rows, env.find_variables(_VISIBLE).get(_VISIBLE))
        named = [(name, int(mib)) for _, _, name, mib in seen]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [replace(find_gpu(name), memory=mib * MIB) for name, mib in named]


def visible_devices() -> list[str] | None:
    """Return the ids of usable GPUs, or None if CUDA_VISIBLE_DEVICES and a driver are missing."""
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
    """Return nvidia-smi's rows of `wanted` GPUs up to the first unknown id, as CUDA does."""
    if wanted is None:
        return rows
    found = []
    for word in wanted.split(","):
        place = word.strip()
        is_uuid = place.startswith("GPU-")
        named = (row for row in rows if (row[1].startswith(place) if is_uuid else row[0] == place))
        if (row := next(named, None)) is None:
            break
        found.append(row)
    return found
