import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qs, urlsplit


class TinyModelScope(http.server.ThreadingHTTPServer):
    """Serves `files` as `lab/model`, committed at `changed`; other models do not exist."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(files)
        self.changed = 1_000_000_000  # seconds since 1970
        self.served: list[str] = []  # requested file names, and "licence"

    @property
    def environment(self) -> dict[str, str]:
        """Point ModelScope's client in a subprocess to this server."""
        return {"MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{self.server_port}"}


@contextlib.contextmanager
def tiny_modelscope(files: Mapping[str, bytes]) -> Iterator[TinyModelScope]:
    """Run a server until the block ends."""
    with TinyModelScope(files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TinyModelScope

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(address.query).items()}
        if address.path == "/openapi/v1/models/lab/model":
            self.server.served.append("licence")
            return self.reply_json({"success": True, "data": {"license": "lab-1"}})
        found = re.fullmatch(r"/api/v1/models/lab/model/repo(/files)?", address.path)
        if found is None or asked.get("Revision", "master") != "master":
            return self.reply_json({"Code": 404, "Message": "not found"}, 404)
        if found[1]:
            return self.reply_json({"Code": 200, "Data": {"Files": self.listing()}})
        name = asked["FilePath"]
        if self.command == "GET":
            self.server.served.append(name)
        self.reply(self.server.files[name])

    def listing(self) -> list[dict[str, object]]:
        return [
            {
                "Path": path,
                "Type": "blob",
                "Size": len(body),
                "Sha256": hashlib.sha256(body).hexdigest(),
                "CommittedDate": self.server.changed,
            }
            for path, body in self.server.files.items()
        ]

    def reply_json(self, answer: object, status: int = 200) -> None:
        self.reply(json.dumps(answer).encode(), status)

    def reply(self, body: bytes, status: int = 200) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and status == 200:
            first, last = int(wanted[1]), int(wanted[2] or len(body) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        else:
            self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
