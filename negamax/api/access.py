"""Identify senders by API key, and refuse requests that web pages of other sites send."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import Scope

from negamax.api.playground import read_browser_key
from negamax.base.errors import AuthenticationError, ConfigError, ForbiddenError
from negamax.engine.client.open_request import Owner
from negamax.options.key_file import keys_of_file
from negamax.options.server import ServerOptions


class Access:
    """Identifies the sender of a request by its headers. Each API key identifies one tenant."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises `ConfigError` if the key file cannot be used."""
        self._options = options
        self.reload()
        self._admin_key = None if options.admin_api_key is None else options.admin_api_key.encode()
        self._origins = frozenset(options.allowed_origins)
        self.has_keys = bool(self._keys)

    def reload(self) -> None:
        """Read the key file again. Keep the old keys and raise `ConfigError` on failure."""
        keys = (*self._options.api_keys, *keys_of_file(self._options.api_key_file))
        if self._options.admin_api_key in keys:
            raise ConfigError(
                "--api-key-file contains the key of --admin-api-key",
                hint="use a separate key for administrators",
            )
        self._keys = [key.encode() for key in keys]

    def identify(self, scope: Scope) -> None:
        """Store `is_admin`, `tenant` and `shares_queue` of the sender in the request's state.

        Raises `AuthenticationError` for a missing or wrong key.
        """
        state = scope.setdefault("state", {})
        given = _read_key(scope["headers"]) or read_browser_key(scope["path"], scope["headers"])
        is_admin = self._admin_key is not None and hmac.compare_digest(given, self._admin_key)
        state["is_admin"] = is_admin or (self._admin_key is None and not self.has_keys)
        state["tenant"] = ""
        state["shares_queue"] = len(set(self._keys)) > 1
        if not self.has_keys:
            return
        if not given:
            raise AuthenticationError(
                "the API key is missing",
                hint="send the key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="missing_api_key",
            )
        # Compare with every key, so that the time does not show which key matches.
        is_known = sum(hmac.compare_digest(given, key) for key in self._keys)
        if not (is_known or is_admin):
            raise AuthenticationError("the API key is wrong", code="invalid_api_key")
        state["tenant"] = hashlib.blake2b(given, digest_size=16).hexdigest()

    def check_site(self, scope: Scope) -> None:
        """Raise `ForbiddenError` if a page of another site made a browser send the request.

        A page of another site cannot set key headers, so a key in a header allows the request.
        """
        fields = dict(scope["headers"])
        origin = fields.get(b"origin", b"").decode("latin-1")
        site = fields.get(b"sec-fetch-site", b"").decode("latin-1")
        if site in ("same-origin", "none") or not (site or origin) or _read_key(scope["headers"]):
            return
        if origin in self._origins or "*" in self._origins:
            return
        host = fields.get(b"host", b"").decode("latin-1")
        if not site and origin.partition("://")[2].lower() == host.lower():
            return
        raise ForbiddenError(
            f"a page of {(origin or 'another site')[:100]!r} sent this request across sites",
            hint="start the server with --allowed-origins to allow this page",
            code="cross_site",
        )


def get_tenant(request: Request) -> str:
    """Return the tenant of a request, or an empty string if the server has no keys."""
    return str(request.scope["state"]["tenant"])


def get_owner(request: Request, names: Iterable[str] = ()) -> Owner:
    """Return the owner of a request. The client can abort the request by any id in `names`."""
    return Owner(
        get_tenant(request), frozenset(names), shares_queue=request.scope["state"]["shares_queue"]
    )


def get_salt(request: Request, cache_salt: str) -> str:
    """Return the salt of a request's block hashes. No other tenant can use the same salt."""
    tenant = get_tenant(request)
    return f"{tenant}/{cache_salt}" if tenant else cache_salt


def list_ids(answer_id: str) -> list[str]:
    """List the ids by which a client aborts a request: the answer's id with and without prefix."""
    return [answer_id, answer_id.partition("-")[2]]


def is_admin(request: Request) -> bool:
    """Return whether the sender has the admin key, or the server has no keys at all."""
    return bool(request.scope["state"]["is_admin"])


def check_admin(request: Request) -> None:
    """Raise `ForbiddenError` if the sender is not an administrator."""
    if not is_admin(request):
        raise ForbiddenError(
            f"{request.url.path} is for administrators, because it affects all clients",
            hint="send the key that --admin-api-key sets",
            code="admin_key_needed",
        )


def _read_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    given = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            given = value.strip()
    return given
