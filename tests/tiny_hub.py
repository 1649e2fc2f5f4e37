import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class TinyHub(http.server.ThreadingHTTPServer):
    """Serves `files` as `lab/model` and `lab/MiniMax-M2.7`; other `lab` models fail by name.

    `lab/gated` requires accepted terms, `lab/token` refuses the token, `lab/ill` is an internal
    error. `lab/cut` truncates its first `cuts` answers longer than `cut_at` bytes.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.cuts = 0
        self.cut_at = 1000
        self.served: list[str] = []  # requested file names
        self.card: dict[str, Any] = {}  # licence fields of the model card
        self.ranges: list[str] = []  # requested byte ranges

    @property
    def environment(self) -> dict[str, str]:
        """Point huggingface_hub in a subprocess to this hub."""
        endpoint = f"http://127.0.0.1:{self.server_port}"
        return {
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_ETAG_TIMEOUT": "120",
            "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        }


@contextlib.contextmanager
def tiny_hub(files: Mapping[str, bytes]) -> Iterator[TinyHub]:
    """Run a hub until the block ends."""
    with TinyHub(files) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TinyHub
    refusals: ClassVar = {
        "gated": (403, {"X-Error-Code": "GatedRepo"}),
        "token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "ill": (500, {}),
    }

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        if path == "/served":
            return self.reply(200, {}, json.dumps(self.server.served).encode())
        if found := re.fullmatch(r"/api/models/lab/([\w.-]+)(/.*)?", path):
            return self.answer_about(found[1], found[2] or "")
        found = re.fullmatch(rf"/lab/(model|cut|MiniMax-M2.7)/resolve/{COMMIT}/(.*)", path)
        if found is None or found[2] not in self.server.files:
            return self.reply(404, {"X-Error-Code": "EntryNotFound"})
        body = self.server.files[found[2]]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        if self.command == "GET":
            self.server.served.append(found[2])
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
            self.server.ranges.append(wanted[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        body, cut = body[start:], None
        if (
            self.command == "GET"
            and found[1] == "cut"
            and self.server.cuts
            and len(body) > self.server.cut_at
        ):
            self.server.cuts -= 1
            cut = self.server.cut_at
        return self.reply(206 if start else 200, headers, body, cut)

    def answer_about(self, name: str, route: str) -> None:
        if name in self.refusals:
            return self.reply(*self.refusals[name])
        if name not in ("model", "cut", "MiniMax-M2.7"):
            return self.reply(401, {"X-Error-Code": "RepoNotFound"})
        if not route.endswith(("/main", COMMIT)):
            return self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        files = self.server.files.items()
        if route.startswith("/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": path,
                    "size": len(body),
                    "oid": hashlib.sha1(body).hexdigest(),
                }
                for path, body in files
            ]
            return self.reply(200, {}, json.dumps(tree).encode())
        about = {
            "id": f"lab/{name}",
            "sha": COMMIT,
            "siblings": [{"rfilename": path} for path, _ in files],
            "cardData": self.server.card,
        }
        return self.reply(200, {}, json.dumps(about).encode())

    def reply(
        self, status: int, headers: Mapping[str, str], body: bytes = b"", cut: int | None = None
    ) -> None:
        """Answer with `body`, or with its first `cut` bytes and the full length in the header."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])

    def log_message(self, format: str, *args: object) -> None:
        pass
