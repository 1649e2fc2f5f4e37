"""The checks of `negamax doctor`: software, hardware, caches, ports and variables of this
machine.
"""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from negamax import __version__
from negamax.base import env
from negamax.options.server import ServerOptions
from negamax.planner.gpus import GIB

Status = Literal["ok", "info", "warn", "fail"]
OPTIONAL_PACKAGES = ("transformers", "uvloop")
_ISA = {  # a flag of /proc/cpuinfo, and what it is called
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}
_VARIABLES = ("HF_", "HUGGING", "NEGAMAX_", "CUDA_", "TRITON_", "NCCL_", "OMP_", "TORCH_", "XDG_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
_SIZE_SECONDS = 1.0  # that counting a cache's bytes may take
_LOW_DISK = 2 * GIB
_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Check:
    """One finding; "fail" means that nothing can be served, `remedy` says what to do."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def software(probe: dict[str, Any]) -> Iterator[Check]:
    """Versions of what Negamax needs; `probe` is what `doctor_probe` found."""
    part = "Software"
    broken = probe.get("negamax_error")
    if broken:
        detail = f"{__version__}, cannot be imported: {broken}"
        yield Check(part, "negamax", "fail", detail, "install it again")
    else:
        yield Check(part, "negamax", "ok", __version__)
    yield Check(part, "python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check(part, "system", "ok", platform.platform())
    for name in _required_packages():
        version = env.installed_version(name)
        if name == "torch" and version is not None and "error" in probe:
            remedy = "install it again, for this machine's driver"
            yield Check(part, name, "fail", f"{version}, {probe['error']}", remedy)
        elif version is None:
            yield Check(part, name, "fail", "not installed", f"pip install {name}")
        else:
            yield Check(part, name, "ok", version)
    for name in OPTIONAL_PACKAGES:
        yield Check(part, name, "info", env.installed_version(name) or "not installed")


def hardware(probe: dict[str, Any]) -> Iterator[Check]:
    """Processor, compiler, main memory, driver and GPUs."""
    part = "Hardware"
    yield _cpu(probe)
    compiler = shutil.which(env.get("CC") or "cc")
    if compiler is None:
        remedy = "install gcc or clang: the CPU kernels are compiled, and Triton needs it on GPUs"
        yield Check(part, "C compiler", "warn", "none found", remedy)
    else:
        first = (_output(compiler, "--version") or "").partition("\n")[0]
        yield Check(part, "C compiler", "ok", f"{compiler} ({first})")
    yield Check(part, "memory", "ok", f"{env.available_memory() / GIB:.1f} GiB free")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield Check(part, "NVIDIA driver", "info", driver.split()[0] if driver else "none found")
    gpus = probe.get("gpus", [])
    if driver and not gpus and "error" not in probe:
        build = f"PyTorch {probe.get('torch')} (CUDA {probe.get('cuda')}) sees no GPU"
        remedy = "install a PyTorch for this driver's CUDA version, and see CUDA_VISIBLE_DEVICES"
        yield Check(part, "GPUs", "warn", build, remedy)
    elif probe.get("hip"):
        remedy = "Negamax runs on NVIDIA GPUs and on CPUs"
        yield Check(part, "GPUs", "warn", f"PyTorch for ROCm {probe['hip']}", remedy)
    elif not gpus:
        yield Check(part, "GPUs", "info", "none")
    for index, gpu in enumerate(gpus):
        free, total = gpu["free_bytes"] / GIB, gpu["total_bytes"] / GIB
        capability = ".".join(map(str, gpu["capability"]))
        detail = f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free, capability {capability}"
        yield Check(part, f"GPU {index}", "ok", detail)
    if len(gpus) > 1:
        yield _links(gpus)


def hub_folder() -> Path:
    """Where huggingface-hub keeps what it downloads."""
    general = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hf_home = Path(env.get("HF_HOME") or general / "huggingface")
    return Path(env.get("HF_HUB_CACHE") or hf_home / "hub").expanduser()


def free_disk(folder: Path) -> int:
    """Free bytes where `folder` is, or would be made."""
    return shutil.disk_usage(_existing(folder)).free


def caches() -> Iterator[Check]:
    """The folders that are written to: place, size, free disk."""
    part = "Caches"
    home = Path.home()
    triton = Path(env.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    native = Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "negamax" / "native"
    for name, folder, variable in (
        ("hub", hub_folder(), "HF_HOME"),
        ("Triton kernels", triton, "TRITON_CACHE_DIR"),
        ("CPU kernels", native, "XDG_CACHE_HOME"),
    ):
        existing, disk = _existing(folder), free_disk(folder)
        detail = f"{folder}, {_size(folder)}, {disk / GIB:.1f} GiB of disk free"
        if not env.is_writable(existing):
            remedy = f"let {existing} be written, or set {variable}"
            yield Check(part, name, "warn", f"{detail}, not writable", remedy)
        elif disk < _LOW_DISK:
            yield Check(part, name, "warn", detail, "free some disk")
        else:
            yield Check(part, name, "ok", detail)


def port(number: int) -> Check:
    """Whether a server could listen on `number` of this machine."""
    host = ServerOptions.host
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            detail = f"{host}:{number} cannot be used: {error.strerror}"
            return Check("Network", "port", "warn", detail, "use another --port")
    return Check("Network", "port", "ok", f"{host}:{number} is free")


def network() -> Check:
    """Whether the hub answers."""
    address = env.get("HF_ENDPOINT") or _HUB
    request = urllib.request.Request(address, method="HEAD", headers={"user-agent": "negamax"})
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=5):
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        remedy = "set HTTPS_PROXY, or give models as local folders"
        return Check("Network", "hub", "warn", f"{address}: {error}", remedy)
    milliseconds = 1000 * (time.monotonic() - started)
    return Check("Network", "hub", "ok", f"{address} answers in {milliseconds:.0f} ms")


def variables() -> Iterator[Check]:
    """Variables that change what happens; secrets are not shown."""
    for name, value in env.starting_with(*_VARIABLES).items():
        yield Check("Environment", name, "info", "set" if _SECRET.search(name) else value)


def _required_packages() -> list[str]:
    """The declared dependencies of the installed package."""
    try:
        declared = metadata.requires("negamax") or []
    except metadata.PackageNotFoundError:
        declared = ["torch"]
    names = (re.match(r"[\w.-]+", text) for text in declared if "extra ==" not in text)
    return [name[0] for name in names if name is not None]


def _cpu(probe: dict[str, Any]) -> Check:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    model = facts.get("model name") or platform.processor() or platform.machine()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    isa = (
        ", ".join(name for flag, name in _ISA.items() if flag in flags) or "instruction set unknown"
    )
    detail = f"{model}, {env.usable_cores()} cores usable; {isa}"
    if "cpu_bfloat16" in probe:
        detail += "; computes in " + ("bfloat16" if probe["cpu_bfloat16"] else "float32")
    return Check("Hardware", "CPU", "ok", detail)


def _links(gpus: list[dict[str, Any]]) -> Check:
    """How GPUs reach each other: peer access as PyTorch sees it, link types as the driver does."""
    missing = [
        f"{index}-{other}"
        for index, gpu in enumerate(gpus)
        for other in range(index)
        if other not in gpu["peers"]
    ]
    rows = (_output("nvidia-smi", "topo", "-m") or "").splitlines()
    cells = [row.split() for row in rows if row.startswith("GPU")]
    kinds = {kind for cell in cells for kind in cell[1 : len(cells) + 1]} - {"X"}
    links = ", ".join(sorted(kinds)) or "unknown"
    if not missing:
        return Check("Hardware", "GPU links", "ok", f"{links}; all reach each other's memory")
    remedy = "sums over these GPUs go through NCCL, which is slower"
    detail = f"{links}; no peer access between {', '.join(missing)}"
    return Check("Hardware", "GPU links", "warn", detail, remedy)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _size(folder: Path) -> str:
    """How much a folder holds; of a very large one, what could be counted in time."""
    if not folder.is_dir():
        return "not there yet"
    total, deadline = 0, time.monotonic() + _SIZE_SECONDS
    for path in folder.rglob("*"):
        try:
            if not path.is_symlink() and path.is_file():
                total += path.stat().st_size
        except OSError:
            continue
        if time.monotonic() > deadline:
            return f"more than {total / GIB:.1f} GiB"
    return f"{total / GIB:.2f} GiB"
