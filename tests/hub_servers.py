"""Serve the parts of the Hugging Face hub and of ModelScope that a download uses."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class TinyServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    handler: type[http.server.BaseHTTPRequestHandler]

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), self.handler)
        self.files = dict(files)
        self.served: list[str] = []  # requested file names

    def __enter__(self) -> Self:
        # a short interval, because `shutdown` waits for it
        threading.Thread(target=partial(self.serve_forever, 0.02), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def reply(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        cut: int | None = None,
    ) -> None:
        """Answer with `body`, or with its first `cut` bytes under a header with the full length."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])

    def reply_json(self, answer: object, status: int = 200) -> None:
        self.reply(status, body=json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class _HubHandler(_Handler):
    server: "TinyHub"
    refusals: ClassVar = {
        "gated": (403, {"X-Error-Code": "GatedRepo"}),
        "token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "ill": (500, {}),
    }

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/served":
            return self.reply_json(self.server.served)
        if found := re.fullmatch(r"/api/models/lab/([\w.-]+)(/.*)?", path):
            return self.answer_about(found[1], found[2] or "")
        found = re.fullmatch(
            rf"/lab/(model|cut|MiniMax-M2.7)/resolve/{COMMIT}/(.*)", path
        ) or re.fullmatch(r"/datasets/lab/(data)/resolve/v1/(.*)", path)
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
        is_long = self.command == "GET" and len(body) > self.server.cut_at
        if found[1] == "cut" and self.server.cuts and is_long:
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
        files = self.server.files
        if not route.startswith("/tree/"):
            siblings = [{"rfilename": path} for path in files]
            card = {"siblings": siblings, "cardData": self.server.card}
            return self.reply_json({"id": f"lab/{name}", "sha": COMMIT, **card})
        sums = {path: hashlib.sha1(body).hexdigest() for path, body in files.items()}
        return self.reply_json([
            {"type": "file", "path": path, "size": len(body), "oid": sums[path]}
            for path, body in files.items()
        ])  # fmt: skip


class TinyHub(TinyServer):
    """Serve `files` as `lab/model` and `lab/MiniMax-M2.7`. Other `lab` models fail by name.

    `lab/gated` requires accepted terms, `lab/token` refuses the token, and `lab/ill` is an internal
    error. `lab/cut` truncates its first `cuts` answers that are longer than `cut_at` bytes.
    """

    handler = _HubHandler

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self.cuts, self.cut_at = 0, 1000
        self.ranges: list[str] = []  # requested byte ranges
        self.card: dict[str, Any] = {}  # licence fields of the model card

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "120",
            "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        }  # fmt: skip


class _ModelScopeHandler(_Handler):
    server: "TinyModelScope"

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
            files = [
                {
                    "Path": path, "Type": "blob", "Size": len(body),
                    "Sha256": hashlib.sha256(body).hexdigest(),
                    "CommittedDate": self.server.changed,
                }
                for path, body in self.server.files.items()
            ]  # fmt: skip
            return self.reply_json({"Code": 200, "Data": {"Files": files}})
        body = self.server.files[asked["FilePath"]]
        if self.command == "GET":
            self.server.served.append(asked["FilePath"])
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(body) - 1)
            part = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            return self.reply(206, part, body[first : last + 1])
        return self.reply(200, body=body)


class TinyModelScope(TinyServer):
    """Serve `files` as `lab/model`, committed at `changed`. `served` also lists "licence"."""

    handler = _ModelScopeHandler
    changed = 1_000_000_000  # seconds since 1970

    @property
    def environment(self) -> dict[str, str]:
        return {"MODELSCOPE_ENDPOINT": self.endpoint}
