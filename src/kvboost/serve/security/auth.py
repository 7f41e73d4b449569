"""Who may call what, and how often: keys, tenants, and the gate before every route.

The gate runs before the app's routing, and :class:`RateLimit` after the gate. Invariant: a route that is not listed is
denied, and a listed one answers only to a caller of its kind; a client's tenant is that of its key, whatever it writes.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.errors import ConfigError
from kvboost.private import make_secret, read_private, read_secret
from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits, Rates

_TENANT_PURPOSE = b"kvboost tenant v2:"
_NAME_PURPOSE = b"kvboost named tenant v2:"
_MIN_LENGTH = 8
_LINE = re.compile(r"(?:([\w.@-]{1,64}):\s+)?(\S+)")
"""Of a file of keys: a key, or ``NAME: KEY``. Keys have no spaces, so nothing else looks like it."""


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
    key_id: str = ""
    """Tells the keys of one tenant apart; empty where no key is needed."""


class Keys:
    """The keys of a server. Without any, every caller is the admin: that is for one's own machine."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        *,
        admin_key: str | None = None,
        named: Mapping[str, Sequence[str]] | None = None,
        secret: bytes | None = None,
    ) -> None:
        """``named`` are the keys of tenants with a name; each of ``api_keys`` is a tenant of its own.

        ``secret`` names the tenants; without it they have other names after a restart, and find nothing stored.
        """
        self._files: tuple[str | Path | None, str | Path | None] | None = None
        self._secret = secret = secrets.token_bytes() if secret is None else secret
        named = named or {}
        tenants = [(key, tenant_of(key, secret)) for key in api_keys]
        tenants += [(key, tenant_named(name, secret)) for name, keys in named.items() for key in keys]
        every = [key for key, _ in tenants]
        for key in (*every, *([admin_key] if admin_key is not None else [])):
            check_key(key)
        if admin_key is not None and admin_key in every:
            raise ConfigError("the admin key is also an API key; give the admin one of its own")
        if admin_key is not None and not every:
            raise ConfigError("an admin key without API keys would leave users without a key; give API keys as well")
        if len(dict(tenants)) < len(set(tenants)):
            raise ConfigError("a key is given for two tenants; give each tenant keys of its own")
        known = [(key, tenant, False) for key, tenant in tenants]
        known += [(admin_key, tenant_of(admin_key, secret), True)] if admin_key is not None else []
        self._known = [_entry(key, tenant, admin=admin) for key, tenant, admin in known]

    @classmethod
    def from_files(
        cls, api_keys: str | Path | None, admin_key: str | Path | None, *, secret: str | Path | None = None
    ) -> Self:
        """The keys in these files, one per line; of the admin's file the only one. Raises ConfigError.

        ``secret`` is a file too; None takes the installation's, which is made if there is none.
        """
        found = cls._read(api_keys, admin_key, _read_secret(secret) if api_keys is not None else None)
        found._files = api_keys, admin_key
        return found

    @classmethod
    def _read(cls, api_keys: str | Path | None, admin_key: str | Path | None, secret: bytes | None) -> Self:
        admin = _read_keys(admin_key, name="admin_key_file")
        lines = _read_keys(api_keys, name="api_key_file")
        if len(admin) > 1:
            raise ConfigError("the file for the admin key holds several lines; give one key")
        named: dict[str, list[str]] = {}
        for name, key in lines:
            if name is not None:
                named.setdefault(name, []).append(key)
        bare = [key for name, key in lines if name is None]
        return cls(bare, admin_key=admin[0][1] if admin else None, named=named, secret=secret)

    def read_again(self) -> None:
        """Use what the files hold now: tenants keep their names. Raises ConfigError, and then everything stays."""
        if self._files is not None:
            self._known = self._read(*self._files, self._secret)._known

    @property
    def callers(self) -> list[Caller]:
        """Of all keys, the admin's included, in their order; none where no key is needed."""
        return [caller for _, caller in self._known]

    @property
    def tenants(self) -> list[str]:
        """Of all API keys, in their order; none where no key is needed."""
        return list(dict.fromkeys(caller.tenant for caller in self.callers if not caller.admin))

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


def _read_keys(file: str | Path | None, *, name: str) -> list[tuple[str | None, str]]:
    """The keys of a file, each with the name of its tenant, if it has one. No message holds a key."""
    if file is None:
        return []
    remedy = "give a text file with one key per line"
    try:
        lines = read_private(file, name=name, remedy=remedy).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text ({error}); {remedy}") from error
    keys: list[tuple[str | None, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(f"line {number} of {file} is neither a key nor 'NAME: KEY'; write one key per line")
        check_key(found[2], called=f"the key in line {number} of {file}")
        keys.append((found[1], found[2]))
    if not keys:
        raise ConfigError(f"{file} holds no key; write one per line, for example from `openssl rand -hex 32`")
    return keys


def check_key(key: str, *, called: str = "a key") -> None:
    """Refuse one that can be guessed, or that no header carries. ``called`` says which it is."""
    if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{called} needs {_MIN_LENGTH} or more printable ASCII characters without spaces; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )


def _read_secret(file: str | Path | None) -> bytes | None:
    """The secret in ``file``, or this user's own; None if that cannot be made, which is a warning."""
    if file is not None:
        return read_secret(file, name="secret_file")
    own = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "kvboost" / "secret"
    try:
        make_secret(own)
    except OSError as error:
        warnings.warn(
            f"{own} cannot be made ({error.strerror}), so tenants find nothing of theirs after a restart; "
            "give a secret_file",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return read_secret(own, name="secret_file")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _entry(key: str, tenant: str, *, admin: bool) -> tuple[bytes, Caller]:
    digest = _digest(key.encode())
    return digest, Caller(tenant, admin, key_id=digest.hex()[:16])


def tenant_of(key: str, secret: bytes) -> str:
    """The tenant of a key: the same after a restart. Without the secret, no guess of a key can be tried against it."""
    return hmac.new(secret, _TENANT_PURPOSE + key.encode(), hashlib.sha256).hexdigest()


def tenant_named(name: str, secret: bytes) -> str:
    """The tenant of all keys with this name: the same whichever keys it has. Never that of a key without a name."""
    return hmac.new(secret, _NAME_PURPOSE + name.encode(), hashlib.sha256).hexdigest()


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
        origins: Sequence[str] = (),
    ) -> None:
        """``origins`` may call from a browser even where no key is needed."""
        self._app = app
        self._max_header_bytes = limits.max_header_bytes
        self._routes = [(method, path, compile_path(path)[0], access) for (method, path), access in routes.items()]
        self._keys = keys
        self._origins = frozenset(origin.encode() for origin in origins)
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
            self._admit(scope, scope.setdefault("state", {}))
        except ApiError as error:
            response = JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, state: dict[str, Any]) -> None:
        """Note the caller and the route in ``state``. Raises ApiError for what is not let through."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self._max_header_bytes} bytes", code="headers_too_large")
        headers = _single_headers(scope["headers"])
        if self._only_local_names and not _is_local_name(headers.get(b"host", b"")):
            raise ApiError(
                403, "this server answers only to localhost; set an API key to use other names", code="wrong_host"
            )
        # Anthropic's clients write the key in a header of their own.
        given = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b""))
        caller = state["caller"] = self._keys.caller(given)
        path, method = scope["path"], scope["method"]
        # The whole path: the pattern's own $ lets a newline pass, which limits by path would not know.
        matching = (route for route in self._routes if route[2].fullmatch(path))
        found = [(name, route, access) for name, route, _, access in matching]
        methods = {name: access for name, _, access in found}
        access = methods.get(method)
        state["route"] = found[0][1] if found else None  # for logs: the path itself is a client's text
        if access is Access.OPEN:
            return
        may_call = b"*" in self._origins or headers.get(b"origin") in self._origins
        if not self._keys and not may_call and _is_of_another_site(headers):
            state["caller"] = None  # whose page it is, nobody knows
            raise ApiError(
                403, "this server takes nothing from pages of other sites; set an API key", code="wrong_origin"
            )
        if caller is None:
            raise ApiError(
                401,
                "give a valid key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if access is Access.ADMIN and not caller.admin:
            raise ApiError(403, "this needs the server's admin key", code="admin_only")
        if not methods:
            meant = any(pattern.fullmatch(f"/v1{path}") for _, _, pattern, _ in self._routes)
            hint = "; end the client's base URL with /v1" if meant else ""
            raise ApiError(404, f"there is no such route{hint}", code="unknown_url")
        if access is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(405, f"use {allowed} here", code="method_not_allowed", headers={"Allow": allowed})


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


class RateLimit:
    """Lets requests to ``paths`` through while their key has something left. Runs after the gate."""

    def __init__(self, app: ASGIApp, *, rates: Rates, paths: Collection[str]) -> None:
        self._app, self._rates, self._paths = app, rates, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        key_id = scope["state"]["caller"].key_id
        try:
            self._rates.enter(key_id)
        except ApiError as error:
            await JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._rates.headers(key_id))
            await send(message)

        await self._app(scope, receive, with_headers)
