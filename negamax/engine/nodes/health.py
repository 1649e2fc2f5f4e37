"""Answer /livez, /readyz and /health on nodes that run no API server, for Kubernetes probes."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from negamax.base.addresses import bind, resolve_host
from negamax.base.errors import ResourceError
from negamax.base.log import get_logger

logger = get_logger(__name__)

# An agent is considered dead if one iteration of its loop takes longer than this time.
STILL_SECONDS = 60.0
_REQUEST_SECONDS = 2.0  # Time limit for a request to arrive.
_MOST_BYTES = 8192  # Size limit of a request's headers, in bytes.
_PATHS = ("/livez", "/readyz", "/health")


class NodeHealth:
    """Answers HTTP probes in a thread. Probes need no API key and return only node states."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at `port`; 0 selects a free port. Raises `ConfigError` or `ResourceError`."""
        self._turned_at: float | None = None  # Start of the latest loop iteration, if any.
        self._missing: Callable[[], str] = lambda: "the agent starts"
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        logger.info("this node answers %s at %s port %d", ", ".join(_PATHS), host, self.port)
        serve = partial(asyncio.run, self._serve())
        threading.Thread(target=serve, name="health", daemon=True).start()

    def watch(self, missing: Callable[[], str]) -> None:
        """Answer readiness probes. `missing` returns why the node is not ready, or "" if it is."""
        self._missing = missing

    def turn(self) -> None:
        self._turned_at = time.monotonic()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._listener, limit=_MOST_BYTES)
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer_to(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # The request is invalid, or the client has disconnected.
        finally:
            writer.close()

    def _answer_to(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in _PATHS:
            return _response("404 Not Found", {"error": f"allowed: {', '.join(_PATHS)}"})
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", {"error": "use GET"})
        seconds = time.monotonic() - (self._turned_at or time.monotonic())
        problem = "" if path == "/livez" else self._missing()
        if seconds > STILL_SECONDS:
            problem = f"the agent has been stuck for {seconds:.0f} s"
        status = "503 Service Unavailable" if problem else "200 OK"
        return _response(status, {"status": problem or "ok"}, head=method == "HEAD")


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = bind(*resolve_host(host, port))
        listener.listen()
    except OSError as error:
        raise ResourceError(
            f"--node-health-port {port} cannot be used at {host}: {error.strerror}",
            hint="use another port, or --host 127.0.0.1 or 0.0.0.0",
        ) from None
    return listener


def _response(status: str, answer: dict[str, str], *, head: bool = False) -> bytes:
    body = json.dumps(answer).encode()
    lines = (
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-store",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else body)
