"""Who may call what: keys, tenants, and the gate before every route.

The gate runs before the app's routing. Invariant: a route that is not listed is denied, and a listed one answers
only to a caller of its kind; a tenant is never taken from what a client writes, only from its key.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.errors import ConfigError
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits

_TENANT_PURPOSE = b"kvboost tenant v1"
_MIN_KEY_LENGTH = 8


class Access(enum.Enum):
    """Who may call a route."""

    OPEN = "open"
    """Everybody: it tells nothing about anybody."""
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    tenant: str
    admin: bool


class Keys:
    """The keys of a server. Without any, every caller is the admin: that is for one's own machine."""

    def __init__(self, api_keys: Sequence[str] = (), *, admin_key: str | None = None) -> None:
        for key in (*api_keys, *([admin_key] if admin_key is not None else [])):
            if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"a key needs {_MIN_KEY_LENGTH} or more printable ASCII characters without spaces; "
                    "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
        if admin_key is not None and admin_key in api_keys:
            raise ConfigError("the admin key is also an API key; give the admin one of its own")
        if admin_key is not None and not api_keys:
            raise ConfigError("an admin key without API keys would leave users without a key; give API keys as well")
        known = [(key, False) for key in api_keys] + ([(admin_key, True)] if admin_key is not None else [])
        self._known = [(_digest(key.encode()), Caller(tenant_of(key), admin)) for key, admin in known]

    @classmethod
    def from_files(cls, api_keys: str | Path | None, admin_key: str | Path | None) -> Self:
        """The keys in these files, one per line; of the admin's file the only one. Raises ConfigError."""
        admin = _read_keys(admin_key)
        if len(admin) > 1:
            raise ConfigError("the file for the admin key holds several lines; give one key")
        return cls(_read_keys(api_keys), admin_key=admin[0] if admin else None)

    @property
    def tenants(self) -> list[str]:
        """Of all API keys, in their order; none where no key is needed."""
        return [caller.tenant for _, caller in self._known if not caller.admin]

    @property
    def every_tenant(self) -> list[str]:
        """Every tenant that can have sent a request: of the API keys, of the admin's, and of callers without a key."""
        return ["", *(caller.tenant for _, caller in self._known)]

    def __bool__(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._known)

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Who has this ``Authorization`` header; None for nobody. Takes as long for every wrong key."""
        if not self._known:
            return Caller("", admin=True)
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = _digest(given.strip())
        found: Caller | None = None
        for known, caller in self._known:  # all of them, whichever fits
            if hmac.compare_digest(known, digest):
                found = caller
        return found if scheme.lower() == b"bearer" else None


def _read_keys(file: str | Path | None) -> list[str]:
    if file is None:
        return []
    try:
        keys = Path(file).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file with one key per line") from error
    if not keys:
        raise ConfigError(f"{file} holds no key; write one per line, for example from `openssl rand -hex 32`")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def tenant_of(key: str) -> str:
    """The tenant of a key: the same after a restart, and of no use to find the key."""
    return hmac.new(key.encode(), _TENANT_PURPOSE, hashlib.sha256).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: Keys, *, allow_open: bool) -> None:
    """Refuse to be reached by other machines without a key, unless ``allow_open``."""
    if not keys and not allow_open and not is_loopback(host):
        raise ConfigError(
            f"binding {host} would let everybody who can reach this machine use the model; set an API key "
            "(--api-key-file), or say that you want this (--allow-open)"
        )


class Gate:
    """Lets a request through to the app, with its :class:`Caller` in the scope's state, or answers it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Mapping[tuple[str, str], Access],
        keys: Keys,
        limits: Limits,
        only_local_names: bool,
    ) -> None:
        self._app = app
        self._max_header_bytes = limits.max_header_bytes
        self._routes = [(method, compile_path(path)[0], access) for (method, path), access in routes.items()]
        self._keys = keys
        # Without keys, a page in a browser on this machine could reach us under a name of its own (DNS rebinding).
        self._only_local_names = only_local_names and not keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here
        try:
            scope.setdefault("state", {})["caller"] = self._admit(scope)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, headers=error.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self._max_header_bytes} bytes", code="headers_too_large")
        headers = _single_headers(scope["headers"])
        if self._only_local_names and not _is_local_name(headers.get(b"host", b"")):
            raise ApiError(
                403, "this server answers only to localhost; set an API key to use other names", code="wrong_host"
            )
        caller = self._keys.caller(headers.get(b"authorization"))
        path, method = scope["path"], scope["method"]
        methods = {name: access for name, pattern, access in self._routes if pattern.match(path)}
        access = methods.get(method)
        if access is Access.OPEN:
            return caller
        if not self._keys and _is_of_another_site(headers):
            raise ApiError(
                403, "this server takes nothing from pages of other sites; set an API key", code="wrong_origin"
            )
        if caller is None:
            raise ApiError(
                401,
                "give a valid key as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if access is Access.ADMIN and not caller.admin:
            raise ApiError(403, "this needs the server's admin key", code="admin_only")
        if not methods:
            raise ApiError(404, "there is no such route", code="unknown_url")
        if access is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(405, f"use {allowed} here", code="method_not_allowed", headers={"Allow": allowed})
        return caller


def _single_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name; one that is sent twice counts as empty."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = b"" if name in found else value
    return found


def _is_local_name(host: bytes) -> bool:
    name = host.decode("latin-1")
    name = name[: name.index("]") + 1] if name.startswith("[") and "]" in name else name.rsplit(":", 1)[0]
    return is_loopback(name)


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser says that the page of another site sent this. What is no browser says neither."""
    if headers.get(b"sec-fetch-site", b"").lower() == b"cross-site":
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


def caller_of(request: Any) -> Caller:
    """The caller whom the gate let through."""
    caller: Caller = request.scope["state"]["caller"]
    return caller
