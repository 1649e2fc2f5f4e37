"""Start a server, watch it through /proc and /metrics, and stop it."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from negamax.api.processes.supervisor import SERVER_WORKER_MODULE
from negamax.engine.client.connection import ENGINE_MODULE
from tools.load.http import Connection

ROOT = Path(__file__).parents[2]
ENGINES = (ENGINE_MODULE, "tests.stub_engine", "tools.replay.engine")
IDLE_SECONDS = 120.0
HELD = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "negamax:open_requests", "negamax:waiting_tokens",
)  # fmt: skip
_READY = re.compile(r"ready: http://([\d.]+):(\d+)/v1")


class Server:
    """Watch a running server process of this machine."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = _READY.search(line)
        if match is None:
            raise SystemExit(f"the server did not start: {line!r}\n{log.read_text()}")
        self.process = process
        self.log = log
        self.host, self.port = match[1], int(match[2])

    def connection(self) -> Connection:
        return Connection(self.host, self.port)

    def engine_pid(self) -> int:
        (pid,) = [pid for pid in self._children() if any(_runs(pid, name) for name in ENGINES)]
        return pid

    def server_pids(self) -> list[int]:
        workers = [pid for pid in self._children() if _runs(pid, SERVER_WORKER_MODULE)]
        return [self.process.pid, *workers]

    def _children(self) -> list[int]:
        pid = self.process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def rss(self, *pids: int) -> float:
        """Return the resident memory of processes in MiB. A process that ended counts as 0."""
        total = 0.0
        for pid in pids:
            with contextlib.suppress(OSError):
                match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                total += int(match[1]) / 1024 if match else 0.0
        return total

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the server processes."""
        # number of a process's CPU clock, see clock_getcpuclockid(3)
        clocks = [(~pid << 3) | 2 for pid in self.server_pids()]
        return sum(map(time.clock_gettime, clocks))

    async def metrics(self) -> dict[str, float]:
        """Return metrics by name. Samples of a metric with several label sets are added."""
        connection = self.connection()
        text = (await connection.get("/metrics")).body.decode()
        connection.hang_up()
        values: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    async def leftovers(self) -> dict[str, float]:
        """Return resources that are still held after all clients disconnected, by metric."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            values = await self.metrics()
            held = {name: values[name] for name in HELD if values[name]}
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.1)

    def processes(self) -> list[int]:
        return [self.engine_pid(), *self.server_pids()]

    async def final_problems(self, processes: list[int] | None = None) -> list[str]:
        """Return problems after a scenario: held resources, logged errors, changed processes."""
        held = await self.leftovers()
        problems = [f"held at the end: {held}"] if held else []
        if self.process.poll() is not None or processes not in (None, self.processes()):
            problems.append("a process ended or was started again")
        return problems + self.log_problems()[:10]

    def log_problems(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "Traceback" in line or " ERROR " in line]


def _runs(pid: int, module: str) -> bool:
    return module in Path(f"/proc/{pid}/cmdline").read_text()


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **options)


@contextlib.contextmanager
def serving(
    *options: str, num_servers: int = 1, module: str = "negamax", model: str = "nano",
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:  # fmt: skip
    """Run `negamax serve MODEL` (or `module`) until the `with` block ends."""
    command = [*options, "--api-server-count", str(num_servers)]
    if module == "negamax":
        usual = ["--port", "0", "--num-threads", "1", "--log-level", "warning"]
        command = ["serve", model, *usual, *command]
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        env = os.environ | (environment or {})
        pipe = subprocess.PIPE
        process = start(module, *command, stdout=pipe, stderr=log, text=True, cwd=ROOT, env=env)
        try:
            yield Server(process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
