"""Finding a model: folders, nano and hub ids; downloads go through the real client against a small hub on this machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from negamax.base.errors import ConfigError
from negamax.checkpoint.hub import NANO_FOLDER, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "minimax_m2"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00000-of-00001.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "modeling_minimax_m2.py": b"raise SystemExit('remote code')",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"other",
    "README.md": b"readme",
}


class TinyHub(http.server.BaseHTTPRequestHandler):
    """The routes of the hub that a snapshot download uses, for the repository `lab/model`."""

    served: list[str]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        if self.path.startswith("/api/models/lab/model"):
            route = self.path.split("?")[0]
            if not route.endswith(("/main", COMMIT)):
                return self.refuse("RevisionNotFound", 404)
            if "/tree/" in route:
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in FILES.items()
                ]
                return self.reply(json.dumps(tree).encode())
            siblings = [{"rfilename": name} for name in FILES]
            return self.reply(json.dumps({"id": "lab/model", "sha": COMMIT, "siblings": siblings}).encode())
        if self.path.startswith("/api/models/lab/gated"):
            return self.refuse("GatedRepo", 403)
        if self.path.startswith("/api/models/lab/ill"):
            return self.refuse("", 500)
        name = self.path.removeprefix(f"/lab/model/resolve/{COMMIT}/")
        if name in FILES:
            self.served.append(name)
            return self.reply(FILES[name])
        return self.refuse("RepoNotFound", 401)

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, code: str, status: int) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    TinyHub.served = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), TinyHub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


RESOLVE = """
import sys
from negamax.base.errors import NegamaxError
from negamax.checkpoint.hub import resolve_model
for argument in sys.argv[2:]:
    model, _, revision = argument.partition("@")
    try:
        print(resolve_model(model, revision or None, sys.argv[1]))
    except NegamaxError as error:
        print(type(error).__name__, error)
"""


def resolve_all(endpoint: str, cache: Path, *models: str, **environment: str) -> list[str]:
    """One line per model: the folder, or the error. In a process of its own: the client reads its endpoint at import."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(cache), *models],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_download_takes_weights_and_json_but_never_code_or_pickles(
    hub: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    plain, pinned = resolve_all(endpoint, tmp_path, "lab/model", f"lab/model@{COMMIT}")
    folder = Path(plain)
    assert plain == pinned and folder.is_relative_to(tmp_path)
    kept = {"config.json", "tokenizer.json", "chat_template.jinja", "model-00000-of-00001.safetensors"}
    assert {path.name for path in folder.rglob("*")} == kept
    assert all((folder / name).read_bytes() == FILES[name] for name in kept)
    assert set(TinyHub.served) == kept
    # what is there already is not fetched again, and works without the hub
    TinyHub.served = []
    assert resolve_all(endpoint, tmp_path, "lab/model") == [plain]
    assert resolve_all(endpoint, tmp_path, "lab/model", HF_HUB_OFFLINE="1") == [plain]
    assert TinyHub.served == []


def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    lines = resolve_all(f"http://127.0.0.1:{hub.server_port}", tmp_path, "lab/nothing", "lab/model@v9", "lab/gated", "lab/ill")
    assert len(lines) == 4
    for line, words in zip(
        lines,
        [
            ("model 'lab/nothing' is not on the hub, or private", "check the name"),
            ("model 'lab/model' at revision 'v9' does not exist on the hub", "check --revision"),
            ("model 'lab/gated' is gated on the hub", "hf auth login"),
            ("model 'lab/ill'", "check the network and run again"),
        ],
        strict=True,
    ):
        assert line.startswith("ConfigError ") and all(word in line for word in words), line


def test_no_network_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    (unreachable,) = resolve_all("http://127.0.0.1:9", tmp_path, "lab/model")
    (offline,) = resolve_all("http://127.0.0.1:9", tmp_path, "lab/model", HF_HUB_OFFLINE="1")
    for line in (unreachable, offline):
        assert line.startswith("ConfigError model 'lab/model' is not in the local cache and the hub cannot be reached")
        assert "give a local folder" in line


def test_local_folders_and_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "nano").mkdir()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/model") == Path("org/model")  # a folder goes before a hub id
    assert resolve_model("nano") == NANO_FOLDER and NANO_FOLDER.parts[-3:] == ("negamax", "assets", "nano")
    assert resolve_model("./nano") == Path("nano")


@pytest.mark.parametrize(
    "model",
    [
        "",
        "nothing",
        "/does/not/exist",
        "./org/model",
        "a/b/c",
        "org/",
        "/model",
        "org/mo del",
        "../x/y",
        "a/..",
        "-x/y",
        "a/b\n",
        "a\0b",
        "~nobody-of-this-name/model",
        "x" * 10_000,
    ],
)
def test_what_is_no_model_is_refused_without_asking_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="is neither an existing folder, nor 'nano', nor a hub id") as caught:
        resolve_model(model)
    assert repr(model[:200]) in str(caught.value) and "MiniMaxAI/MiniMax-M2" in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve_model(str(path))
