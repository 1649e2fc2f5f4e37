"""Serve the chat page and the status page as static files that load nothing from other sites."""

import base64
import binascii
import gzip
import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, Request, Response

# With trusted types for scripts, innerHTML and similar APIs raise an error.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Header `www-authenticate` of a 401 response on PAGE_PATHS.
CHALLENGE = 'Basic realm="Negamax: the password is the API key", charset="UTF-8"'
_OWN_HEADER = b"x-negamax-page"  # Header that the chat page adds to its requests.
_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_PAGES = {"index.html": "/", "status.html": "/status"}


def _get_address(path: Path) -> str:
    return _PAGES.get(path.name) or f"/playground/{path.relative_to(_FOLDER).as_posix()}"


_FILES = {_get_address(path): path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}
PAGE_PATHS = frozenset(_FILES)  # Paths that a browser requests before the user enters a key.


def read_browser_key(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the password of Basic credentials, which the user entered in a dialog of the browser.

    Browsers add Basic credentials even to requests by pages of other sites. The server accepts
    Basic credentials only for page files, or if a header that other sites cannot send is present.
    """
    fields = dict(headers)
    scheme, _, credentials = fields.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic" or not (path in PAGE_PATHS or _OWN_HEADER in fields):
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class _File:
    def __init__(self, path: Path) -> None:
        self._body = body = path.read_bytes()
        self._headers = {
            "content-type": _TYPES[path.suffix],
            "etag": f'W/"{hashlib.sha256(body).hexdigest()[:32]}"',
            # Browsers revalidate the file at each use. The answer is 304 until the file changes.
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "vary": "accept-encoding",
            "x-content-type-options": "nosniff",
        }

    async def answer(self, request: Request) -> Response:
        known = [
            tag.strip().removeprefix("W/")
            for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if self._headers["etag"].removeprefix("W/") in known:
            return Response(status_code=304, headers=self._headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self._compressed, headers=self._headers | {"content-encoding": "gzip"})
        return Response(self._body, headers=self._headers)

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._body, mtime=0)


def make_playground_router() -> APIRouter:
    """Build one route per page file, so that requests can read only these files."""
    router = APIRouter()
    for address, path in _FILES.items():
        router.add_route(address, _File(path).answer, methods=["GET"])
    return router
