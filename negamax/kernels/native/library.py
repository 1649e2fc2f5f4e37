"""Compile `rows.c` once per machine and source, and load it."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from negamax.base import env
from negamax.base.log import get_logger

logger = get_logger(__name__)

SOURCE = Path(__file__).with_name("rows.c")
FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
COMPILE_SECONDS = 60.0


@cache
def load(*, fp32: bool = False) -> ctypes.PyDLL | None:
    """Return the library for tensors in bf16 or fp32; None without a working compiler.

    A failed build is logged. `PyDLL` keeps the GIL, because a GIL release takes longer than a call.
    """
    compiler = shutil.which(env.get("CC") or "cc")
    if compiler is None:
        logger.info("no C compiler found; install one, or set CC, to use the native row kernels")
        return None
    try:
        return ctypes.PyDLL(
            str(_compiled(compiler, flags=(*FLAGS, "-DELEMENT_FP32") if fp32 else FLAGS))
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the C compiler failed; the CPU runs without native row kernels: %s", _reason(error)
        )
        return None


def _reason(error: Exception) -> str:
    """Return the compiler's first line of output, or the reason why the compiler did not run."""
    if isinstance(error, subprocess.CalledProcessError):
        said: list[str] = error.stderr.decode(errors="replace").split("\n")
        return f"{error.cmd[0]} ended with exit code {error.returncode}: {said[0][:200]}"
    return f"{error} (set XDG_CACHE_HOME to a writable folder)"


def _compiled(compiler: str, *, flags: tuple[str, ...]) -> Path:
    """Return the shared object for this source, compiler and processor; build it if needed."""
    version = _run(compiler, "--version")
    identity = b"\0".join((SOURCE.read_bytes(), version, " ".join(flags).encode(), _processor()))
    folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "negamax" / "native"
    library = folder / f"rows-{hashlib.sha256(identity).hexdigest()[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / "rows.so"
            _run(compiler, *flags, str(SOURCE), "-o", str(fresh), "-lm")
            fresh.replace(library)
    return library


def _run(*command: str) -> bytes:
    child_env = env.make_child_env()
    return subprocess.run(
        command, capture_output=True, timeout=COMPILE_SECONDS, check=True, env=child_env
    ).stdout


def _processor() -> bytes:
    """Identify the processor for `-march=native`, because machines may share a home folder."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}".encode()
    facts = [
        line
        for line in cpuinfo.read_bytes().splitlines()
        if line.startswith((b"model name", b"flags", b"Features"))
    ]
    return b"\n".join(sorted(set(facts)))
