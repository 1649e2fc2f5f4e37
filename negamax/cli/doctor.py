"""`negamax doctor`: check this machine, and list the models that it can serve.

This module imports only packages that can be imported even if other packages are broken.
"""

from __future__ import annotations

import dataclasses
import json
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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from negamax import __version__
from negamax.base import env
from negamax.cli.io import print_line
from negamax.options.server import ServerOptions
from negamax.planner.gpus import GIB

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from negamax.cli.doctor_models import ModelVerdict

HELP = "Check this machine: versions, GPUs, caches, ports, and the models that it can serve."

_PROBE_SECONDS = 120.0
_MARKS = {"ok": "ok", "info": "-", "warn": "WARN", "fail": "FAIL"}
Status = Literal["ok", "info", "warn", "fail"]
OPTIONAL_PACKAGES = ("transformers", "uvloop")
_ISA = {  # CPU flag in /proc/cpuinfo -> name of the instruction set
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16",
    "asimd": "NEON", "i8mm": "I8MM", "bf16": "BF16", "sve": "SVE",
}  # fmt: skip
_VARIABLES = ("HF_", "HUGGING", "NEGAMAX_", "CUDA_", "TRITON_", "NCCL_", "OMP_", "TORCH_", "XDG_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
_SIZE_SECONDS = 1.0  # time limit for counting the bytes of a cache folder
_LOW_DISK = 2 * GIB
_HUB = "https://huggingface.co"


def command(
    *,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    network: bool = typer.Option(
        False, "--network", help="Check whether the Hugging Face hub can be reached."
    ),
    port: int = typer.Option(ServerOptions.port, help="Test if a port is free.", min=1, max=65535),
) -> None:
    """Exit with 0 if a model can be served here, else with 1."""
    command = [sys.executable, "-m", "negamax.cli.doctor_probe"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    beside = [*check_caches(), check_port(port), *([check_network()] if network else [])]
    probe = _found_by(child)
    found = [*check_software(probe), *check_hardware(probe), *beside, *check_variables()]
    is_broken = any(check.status == "fail" for check in found)
    models = [] if is_broken else _judge_models(probe)
    works = any(verdict.runs for verdict in models)
    if as_json:
        checks, verdicts = ([dataclasses.asdict(one) for one in each] for each in (found, models))
        print(json.dumps({"can_serve": works, "checks": checks, "models": verdicts}, indent=2))
    else:
        _print(found, models)
    raise typer.Exit(0 if works else 1)


def _found_by(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the JSON output of `doctor_probe`, or an error message under the key "error"."""
    try:
        output, errors = child.communicate(timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"error": f"PyTorch's import and driver query took over {_PROBE_SECONDS:g} s"}
    lines = output.strip().splitlines()
    if child.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    last = (errors.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the import of PyTorch ended with exit code {child.returncode}: {last}"}


def _judge_models(probe: dict[str, Any]) -> list[ModelVerdict]:
    from negamax.cli.doctor_models import Gpu, Machine, verdicts

    names = [field.name for field in dataclasses.fields(Gpu)]
    found = (gpu | {"capability": tuple(gpu["capability"])} for gpu in probe["gpus"])
    gpus = tuple(Gpu(**{name: each[name] for name in names}) for each in found)
    disk = free_disk(hub_folder())
    return verdicts(Machine(gpus, env.available_memory(), probe["cpu_bfloat16"], disk))


def _print(found: list[Check], models: list[ModelVerdict]) -> None:
    section = ""
    for check in found:
        if check.section != section:
            section = check.section
            print(f"\n{section}" if check is not found[0] else section)
        print_line(f"  {_MARKS[check.status]:4}  {check.name:18} {check.detail}", indent=27)
        if check.remedy:
            print(f"  {'':4}  {'':18} -> {check.remedy}")
    print("\nModels that this machine can serve")
    width = max((len(verdict.model) for verdict in models), default=0)
    for verdict in models:
        mark = "yes" if verdict.runs else "no"
        print_line(f"  {mark:4}  {verdict.model:{width}} {verdict.detail}", indent=width + 9)
        if verdict.runs:
            print(f"  {'':4}  {'':{width}} -> {verdict.command}")
    if not models:
        print("  none: see the lines marked FAIL")


# Checks


@dataclass(frozen=True)
class Check:
    """A finding about this machine, with a remedy. If the status is "fail", no model can run."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def check_software(probe: dict[str, Any]) -> Iterator[Check]:
    """Check the versions of required packages. `probe` is the output of `doctor_probe`."""
    check = partial(Check, "Software")
    if broken := probe.get("negamax_error"):
        detail = f"{__version__}, cannot be imported: {broken}"
        yield check("negamax", "fail", detail, "install Negamax again")
    else:
        yield check("negamax", "ok", __version__)
    yield check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield check("system", "ok", platform.platform())
    for name, allowed in _required_packages().items():
        version = env.installed_version(name)
        remedy = f"pip install '{name}{allowed or ''}'"
        if version is None:
            yield check(name, "fail", "not installed", remedy)
        elif name == "torch" and "error" in probe:
            again = "install PyTorch again, for this machine's driver"
            yield check(name, "fail", f"{version}, {probe['error']}", again)
        elif allowed is not None and not allowed.contains(version, prereleases=True):
            yield check(name, "warn", f"{version}, not tested; allowed: {allowed}", remedy)
        else:
            yield check(name, "ok", version)
    for name in OPTIONAL_PACKAGES:
        yield check(name, "info", env.installed_version(name) or "not installed")


def check_hardware(probe: dict[str, Any]) -> Iterator[Check]:
    """Check processor, compiler, main memory, driver and GPUs."""
    check = partial(Check, "Hardware")
    yield _cpu(probe)
    compiler = shutil.which(env.get("CC") or "cc")
    if compiler is None:
        remedy = "install gcc or clang: CPU kernels are compiled, and Triton needs a compiler"
        yield check("C compiler", "warn", "none found", remedy)
    else:
        first = (_output(compiler, "--version") or "").partition("\n")[0]
        yield check("C compiler", "ok", f"{compiler} ({first})")
    yield check("memory", "ok", f"{env.available_memory() / GIB:.1f} GiB free")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield check("NVIDIA driver", "info", driver.split()[0] if driver else "none found")
    gpus = probe.get("gpus", [])
    if driver and not gpus and "error" not in probe:
        build = f"PyTorch {probe.get('torch')} (CUDA {probe.get('cuda')}) sees no GPU"
        remedy = "install PyTorch for this driver's CUDA version, and check CUDA_VISIBLE_DEVICES"
        yield check("GPUs", "warn", build, remedy)
    elif probe.get("hip"):
        remedy = "Negamax starts on AMD GPUs, but has never been tested there"
        yield check("GPUs", "warn", f"PyTorch for ROCm {probe['hip']}", remedy)
    elif not gpus:
        yield check("GPUs", "info", "none")
    for index, gpu in enumerate(gpus):
        free, total = gpu["free_bytes"] / GIB, gpu["total_bytes"] / GIB
        kind = gpu["amd_arch"] or "capability " + ".".join(map(str, gpu["capability"]))
        detail = f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free, {kind}"
        yield check(f"GPU {index}", "ok", detail)
    if len(gpus) > 1:
        yield _links(gpus)


def hub_folder() -> Path:
    """Return the folder that huggingface-hub downloads to."""
    general = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hf_home = Path(env.get("HF_HOME") or general / "huggingface")
    return Path(env.get("HF_HUB_CACHE") or hf_home / "hub").expanduser()


def free_disk(folder: Path) -> int:
    """Return the free bytes of the disk that contains `folder` or will contain it."""
    return shutil.disk_usage(_existing(folder)).free


def check_caches() -> Iterator[Check]:
    """Check the paths, sizes and free disk space of the cache folders."""
    check, home = partial(Check, "Caches"), Path.home()
    triton = Path(env.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    native = Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "negamax" / "native"
    for name, folder, variable in (
        ("hub", hub_folder(), "HF_HOME"),
        ("Triton kernels", triton, "TRITON_CACHE_DIR"),
        ("CPU kernels", native, "XDG_CACHE_HOME"),
    ):
        existing, disk = _existing(folder), free_disk(folder)
        detail = f"{folder}, {_size(folder)}, {disk / GIB:.1f} GiB of disk space free"
        if not env.is_writable(existing):
            remedy = f"make {existing} writable, or set {variable}"
            yield check(name, "warn", f"{detail}, not writable", remedy)
        elif disk < _LOW_DISK:
            yield check(name, "warn", detail, "free some disk space")
        else:
            yield check(name, "ok", detail)


def check_port(number: int) -> Check:
    """Check whether a server can listen on port `number` of this machine."""
    host = ServerOptions.host
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            detail = f"{host}:{number} cannot be used: {error.strerror}"
            return Check("Network", "port", "warn", detail, "use another --port")
    return Check("Network", "port", "ok", f"{host}:{number} is free")


def check_network() -> Check:
    """Check whether the hub answers."""
    address = env.get("HF_ENDPOINT") or _HUB
    request = urllib.request.Request(address, method="HEAD", headers={"user-agent": "negamax"})
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=5):
            pass
    except urllib.error.HTTPError:
        pass  # the hub answers
    except (OSError, ValueError) as error:
        remedy = "set HTTPS_PROXY, or pass models as local folders"
        return Check("Network", "hub", "warn", f"{address}: {error}", remedy)
    milliseconds = 1000 * (time.monotonic() - started)
    return Check("Network", "hub", "ok", f"{address} answers in {milliseconds:.0f} ms")


def check_variables() -> Iterator[Check]:
    """List environment variables that change the behaviour, without the values of secrets."""
    for name, value in env.find_variables(*_VARIABLES).items():
        yield Check("Environment", name, "info", "set" if _SECRET.search(name) else value)


def _required_packages() -> dict[str, SpecifierSet | None]:
    """Return the packages that Negamax requires, with the versions that it allows."""
    try:
        declared = metadata.requires("negamax") or []
    except metadata.PackageNotFoundError:
        declared = ["torch"]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        names = (re.match(r"[\w.-]+", text) for text in declared if "extra ==" not in text)
        return {name[0]: None for name in names if name is not None}
    found = map(Requirement, declared)
    return {
        one.name: one.specifier
        for one in found
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def _cpu(probe: dict[str, Any]) -> Check:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    parts = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in parts}
    model = facts.get("model name") or platform.processor() or platform.machine()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    isa = ", ".join(name for flag, name in _ISA.items() if flag in flags)
    detail = f"{model}, {env.usable_cores()} cores usable; {isa or 'instruction set unknown'}"
    if "cpu_bfloat16" in probe:
        detail += "; computes in " + ("bfloat16" if probe["cpu_bfloat16"] else "float32")
    return Check("Hardware", "CPU", "ok", detail)


def _links(gpus: list[dict[str, Any]]) -> Check:
    """Check the peer access between GPUs (from PyTorch) and the link types (from the driver)."""
    pairs = [(index, other) for index in range(len(gpus)) for other in range(index)]
    missing = [f"{index}-{other}" for index, other in pairs if other not in gpus[index]["peers"]]
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
    """Run a command and return its output, or None if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _size(folder: Path) -> str:
    """Format the size of a folder, or a lower bound if counting its bytes takes too long."""
    if not folder.is_dir():
        return "does not exist yet"
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
