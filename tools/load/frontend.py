"""Measure CPU time per streamed token and latency of a server whose engine has no model.

The stub engine sends one token per stream every few milliseconds and records the time. A token's
latency is the time from this record to the arrival of the token's bytes. Latencies are measured
after all streams have begun. The CPU time includes the handling of requests. If possible, each
server process gets its own core.
"""

import bisect
import contextlib
import json
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.load.http import request_bytes
from tools.load.server import Server, percentile, serving

_TEXT = {"type": "string"}
_FILE = {"type": "object", "properties": {"path": _TEXT, "content": _TEXT}}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": _FILE}}]
_TAIL_BYTES = 2000  # last bytes of a stream, which show how the stream ended


@dataclass
class _Arrivals:
    """The times of one round's streams."""

    times: list[float] = field(default_factory=list)  # monotonic seconds, one per read
    all_begun: float = 0.0  # time of the first bytes of the last stream
    num_events: int = 0
    num_failed: int = 0


def _read_all(server: Server, *, streams: int, tokens: int) -> _Arrivals:
    """Read `streams` streams of `tokens` tokens each to their ends."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "tools": TOOLS, "stream": True, "max_tokens": tokens}
    request = request_bytes("/v1/chat/completions", json.dumps(body).encode())
    arrivals = _Arrivals()
    connections: dict[int, socket.socket] = {}
    tails: dict[int, bytes] = {}
    poll = select.epoll()
    for _ in range(streams):
        connection = socket.create_connection((server.host, server.port))
        connection.sendall(request)
        connection.setblocking(False)
        connections[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
    open_streams = streams
    while open_streams:
        ready = poll.poll(30)
        if not ready:
            raise SystemExit("a stream makes no progress")
        for number, _ in ready:
            part = connections[number].recv(1 << 18)
            arrivals.times.append(time.monotonic())
            arrivals.num_events += part.count(b"data: {")
            if number not in tails:
                arrivals.all_begun = arrivals.times[-1]
            tail = tails[number] = (tails.get(number, b"") + part)[-_TAIL_BYTES:]
            if b"data: [DONE]" in tail or not part:
                # Every prepared answer ends with calls.
                arrivals.num_failed += b'"finish_reason":"tool_calls"' not in tail
                open_streams -= 1
                poll.unregister(number)
    for connection in connections.values():
        connection.close()
    return arrivals


@contextlib.contextmanager
def _apart(server: Server) -> Iterator[None]:
    """Keep the client and the stub engine off the servers' cores, for stable latencies."""
    cores, pids = sorted(os.sched_getaffinity(0)), server.server_pids()
    if len(cores) > len(pids):
        for core, pid in zip(cores, pids, strict=False):
            _pin(pid, [core])
        for pid in (server.engine_pid(), os.getpid()):
            _pin(pid, cores[len(pids) :])
    try:
        yield
    finally:
        _pin(os.getpid(), cores)


def _pin(pid: int, cores: list[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def measure(*, streams: int, tokens: int, step_ms: float, num_servers: int) -> dict[str, Any]:
    """Measure one round after a warm-up. If `step_ms` is 0, the stub sends as fast as possible."""
    with tempfile.NamedTemporaryFile(suffix=".steps") as log:
        environment = {"STUB_STEP_MS": str(step_ms), "STUB_LOG": log.name}
        how = {"num_servers": num_servers, "module": "tests.stub_server"}
        with serving(environment=environment, **how) as server, _apart(server):
            _read_all(server, streams=streams, tokens=max(tokens // 3, 100))
            cpu, started = server.cpu_seconds(), time.monotonic()
            arrivals = _read_all(server, streams=streams, tokens=tokens)
            cpu, seconds = server.cpu_seconds() - cpu, time.monotonic() - started
            steps = [at for (at,) in struct.iter_unpack("d", Path(log.name).read_bytes())]
    settled = arrivals.all_begun + 2 * step_ms / 1000
    times = [at for at in arrivals.times if at > settled]
    latencies = [1000 * (at - steps[bisect.bisect_right(steps, at) - 1]) for at in times]
    result: dict[str, Any] = {
        "streams": streams,
        "tokens": streams * tokens,
        "events": arrivals.num_events,
        "streams without their tool call": arrivals.num_failed,
        "tokens/s": streams * tokens / seconds,
        "server CPU us per token": 1e6 * cpu / (streams * tokens),
    }
    if step_ms:
        shares = (50, 90, 99)
        result["latency ms"] = {f"p{each}": percentile(latencies, each / 100) for each in shares}
    return result


def frontend(
    *, tokens: int, step_ms: float, num_servers: int, max_us: float | None, max_p99_ms: float | None
) -> dict[str, Any]:
    """Run three rounds: 64 streams in steps, one stream in steps, and 64 streams without pauses."""
    pace = f"a step every {step_ms:g} ms"
    rounds = {
        name: measure(streams=streams, tokens=count, step_ms=pause, num_servers=num_servers)
        for name, streams, count, pause in (
            (f"64 streams, {pace}", 64, tokens, step_ms),
            (f"1 stream, {pace}", 1, tokens, step_ms),
            ("64 streams, at once", 64, 4 * tokens, 0.0),
        )
    }
    problems: list[str] = []
    for name, result in rounds.items():
        if failed := result["streams without their tool call"]:
            problems.append(f"{name}: {failed} streams ended without their tool call")
        cost = result["server CPU us per token"]
        if max_us is not None and result["streams"] == 64 and cost > max_us:
            problems.append(f"{name}: {cost:.1f} us per token; allowed: {max_us}")
    p99 = next(iter(rounds.values()))["latency ms"]["p99"]
    if max_p99_ms is not None and p99 > max_p99_ms:
        problems.append(f"the p99 of the latency is {p99:.2f} ms; allowed: {max_p99_ms}")
    return {**rounds, "problems": problems}
