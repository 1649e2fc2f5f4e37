"""Read environment variables, versions, cores and memory sizes for all other modules."""

import hashlib
import math
import os
import resource
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from negamax.base.errors import ResourceError

_HARMLESS = (
    "PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "PYTHON", "VIRTUAL_ENV", "LD_", "MALLOC_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
)  # fmt: skip


def get(name: str) -> str | None:
    """Return the value of an environment variable; None if the variable is unset or empty."""
    return os.environ.get(name) or None


def make_child_env(*, has_secrets: bool = True, **variables: str) -> dict[str, str]:
    """Return the environment of a child process: this process's environment without API keys, plus
    `variables`. If `has_secrets` is False, keep only variables with prefixes in `_HARMLESS`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_API_KEY") and (has_secrets or name.startswith(_HARMLESS))
    }
    return kept | variables


def allow_open_files(needed: int) -> None:
    """Raise the limit of open files to `needed`. Raises `ResourceError` if the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"this process can open {hard} files; at least {needed} are needed",
            hint="raise the limit (ulimit -n)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as possible, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else 1 << 20
    with suppress(ValueError, OSError):  # macOS refuses large limits.
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def set_default(name: str, value: str) -> None:
    """Set an environment variable of this process and its children if the variable is unset."""
    os.environ.setdefault(name, value)


def set_variable(name: str, value: str) -> None:
    """Set an environment variable of this process and its children."""
    os.environ[name] = value


def set_openmp_defaults() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning. Keep variables that the user set.

    On a busy machine, spinning threads occupy cores that other threads need. Call this function
    before PyTorch is imported, because libgomp reads the variables at import. Child processes
    inherit the variables. A thread spins 1000 times, a few microseconds, before it sleeps.
    """
    if not any(map(get, ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))):
        set_variable("OMP_WAIT_POLICY", "PASSIVE")
        set_variable("GOMP_SPINCOUNT", "1000")


def set_batch_invariant_gemms() -> None:
    """Make CPU GEMM libraries compute the same result for a row in every batch.

    Variables that the user has set are not changed. Libraries read their variables at the first
    GEMM. With AMX, oneDNN's bf16 results depend on the batch size if a matrix has over 32 rows and
    over 256 columns. On Intel processors, MKL's fp32 results also depend on the batch size.
    """
    set_default("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    with suppress(OSError):  # Systems other than Linux have no such file.
        if "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"):
            set_default("MKL_CBWR", "AUTO,STRICT")


def find_variables(*prefixes: str) -> dict[str, str]:
    """Return the environment variables whose names start with one of `prefixes`."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def digest_code() -> str:
    """Return a digest of the package's Python code, C code and tables, in hexadecimal."""
    found, root = hashlib.blake2b(digest_size=8), Path(__file__).parents[1]
    files = (file for file in root.rglob("*.*") if file.suffix in (".py", ".c", ".toml"))
    for path in sorted(files):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def installed_version(package: str) -> str | None:
    """Return the version of a Python package; None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def available_memory() -> int:
    """Return the free main memory in bytes, or half of all memory if the free size is unknown."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def main_memory() -> int:
    """Return the size of main memory or, if smaller, the container's memory limit, in bytes."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # Files of cgroups version 2 and 1.
        limit = Path("/sys/fs/cgroup") / name
        if limit.exists() and (text := limit.read_text().strip()).isdecimal():
            return min(machine, int(text))
    return machine


def usable_cores() -> int:
    """Return the number of CPU cores that affinity and the container's quota allow this process. If
    a container's threads exceed the quota, the system pauses all of them for part of a second.
    """
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(count, _cpu_quota(Path("/sys/fs/cgroup")))))


def _cpu_quota(folder: Path) -> float:
    """Return the CPU quota of the cgroup at `folder` in cores, or infinity without a quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            files = (folder / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text() for file in files)
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # The system has no cgroups, or the quota is "max".
        return math.inf
