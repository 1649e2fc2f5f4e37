"""Run `pip install ARGUMENTS` with uv if this Python has it, which is faster.

    python tools/install.py [--python PYTHON] ARGUMENTS...
    python tools/install.py [--python PYTHON] --torch torch==2.13.0

PYTHON is the interpreter of another environment. On Linux without an NVIDIA driver, `--torch`
selects PyTorch's smaller CPU build if PyTorch's index can be reached. uv gets pip's configuration.
If uv is missing or fails, pip installs the packages.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# uv's variable for each of pip's settings of package sources
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}


def main(arguments: list[str]) -> int:
    """Install as the command line says. Return pip's exit code, or 0."""
    python = sys.executable
    if arguments[:1] == ["--python"]:
        python, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["--torch"]:
        arguments = [*_torch_index(arguments[1]), arguments[1]]
    return install(python, arguments)


def install(python: str, arguments: Sequence[str]) -> int:
    """Install into the environment of `python`. Return the exit code."""
    arguments = ["--no-compile", *arguments]
    if importlib.util.find_spec("uv") is not None:
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", python]
        # With this strategy uv takes the best version of all indexes, like pip.
        uv += ["--index-strategy", "unsafe-best-match"]
        if subprocess.run([*uv, *arguments], env=os.environ | uv_variables()).returncode == 0:
            return 0
        print("uv could not install the packages; trying pip.", flush=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    return subprocess.run([*pip, "--disable-pip-version-check", *arguments]).returncode


def uv_variables() -> dict[str, str]:
    """Return pip's configuration as environment variables of uv, without variables that are set."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = [line.partition("=") for line in told.splitlines()]
    # Environment variables override files.
    settings.sort(key=lambda setting: setting[0].startswith(":env:"))
    found = {}
    for name, _, value in settings:
        variable = VARIABLES.get(name.rpartition(".")[2])
        if variable is not None and variable not in os.environ:
            separator = "," if variable == "UV_FIND_LINKS" else " "
            found[variable] = separator.join(str(ast.literal_eval(value)).split())
    return found


def _torch_index(requirement: str) -> list[str]:
    """Return options that select PyTorch's CPU index, if it is needed and reachable."""
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if sys.platform == "linux" and not driver and _is_reached(f"{CPU_INDEX}/torch/"):
        print(f"Installing {requirement} for CPUs (no NVIDIA driver here): a download of about")
        print("200 MB, once.", flush=True)
        return ["--index-url", CPU_INDEX]
    print(f"Installing {requirement}: a download of 200 MB (CPU) to 3 GB (with the CUDA", end=" ")
    print("libraries), once.", flush=True)
    return []


def _is_reached(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
