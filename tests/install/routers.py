"""Install routers from PyPI, and run them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.conftest import eventually
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def install(*arguments: str | Path) -> None:
    """Run tools/install.py."""
    line = [sys.executable, ROOT / "tools" / "install.py", *arguments]
    subprocess.run(line, check=True, timeout=600)


@contextmanager
def running_router(
    folder: Path, requirement: str, program: str, *options: str
) -> Iterator[httpx.Client]:
    """Install `requirement`, and run `program` of its environment until the block ends."""
    python = folder / requirement / "bin" / "python"
    line = [sys.executable, "-m", "venv", "--without-pip", folder / requirement]
    subprocess.run(line, check=True, timeout=600)
    install("--python", python, "--quiet", requirement)
    front, log_file = free_port(), folder / f"{requirement}.log"
    addresses = ["--host", "127.0.0.1", "--port", str(front)]
    addresses += ["--prometheus-port", str(free_port())]
    name, *words = program.split()
    command = [python.with_name(name), *words, *options, *addresses]
    with log_file.open("w") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{front}", timeout=60) as http:

            def is_ready() -> bool:
                try:
                    return http.get("/health").status_code == 200
                except httpx.ConnectError:
                    return False

            assert eventually(is_ready), log_file.read_text()
            yield http
    finally:
        router.terminate()
        router.wait(60)
