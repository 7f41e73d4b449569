"""From an URL to a connected link: one server, a node of a Redis Cluster, or the master that Sentinels name.

Used by :mod:`kvboost.store.tiers.redis.server` and :mod:`kvboost.store.tiers.redis.cluster`. redis-py reads the URL,
finds the server and connects. Invariant: no message holds a password.

In a cluster the ledger lies in one slot, so on one node: its scripts touch several keys and must be atomic. The link of
an URL leads there, and moves with the slot. Values lie on all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvboost.errors import ConfigError, with_extra
from kvboost.store.tiers.redis.resp import Deadline, Link

CONNECT_TIMEOUT_S = 1.0
"""For each step of a connection made in the background."""
_LIMITS: dict[str, Any] = {"socket_timeout": CONNECT_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}


Address = tuple[str, int]
Slots = Mapping[int, Address]
"""Of a cluster: the node in charge of each slot."""
Greeting = list[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes links to the server that is in charge now."""

    connect: Callable[[Deadline], tuple[Link, Greeting]]
    """A link, and what must be said on it first. Raises OSError."""
    prefix: str
    """Of all keys: in a cluster with the mark that keeps them together."""
    may_move: bool
    """Whether another server may come to be in charge: then it is looked for again."""
    nodes: Nodes | None = None
    """Of a cluster."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster."""

    slots: Callable[[], Slots]
    """Asks the cluster. Raises OSError."""
    at: Callable[[Address], Connector]
    """How to reach one of them."""


def place_of(url: str) -> str:
    """An URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connector(url: str, *, prefix: str) -> Connector:
    """How to reach what an URL names. Raises ConfigError for one that cannot work, or if redis-py is missing."""
    try:
        from redis import RedisError
        from redis import connection as connections
    except ImportError as error:
        raise ConfigError(f"a Redis tier needs the redis package; {with_extra('redis')}") from error
    try:
        scheme, _, kind = urlsplit(url).scheme.partition("+")
        prefix = "{" + prefix + "}" if kind == "cluster" else prefix
        plain, hosts, service = _split(url, scheme, kind)
        options: dict[str, Any] = connections.parse_url(plain)  # type: ignore[no-untyped-call]
        made: Any = options.pop("connection_class", connections.Connection)
        user, password, database = (options.pop(name, None) for name in ("username", "password", "db"))
        locate: Callable[[], dict[str, Any]] = dict
        slots: Callable[[], Slots] | None = None
        if kind == "cluster":
            secrets = {"username": user, "password": password, "ssl": scheme == "rediss"}
            slots = _slots(hosts, {**_without_address(options), **secrets})
            locate = _node_of(slots, prefix)
        elif kind == "sentinel":
            locate = _sentinel(hosts, service)
        # The greeting is said by us: redis-py's own has a time limit for each byte only.
        options |= _LIMITS | {"protocol": 2, "redis_connect_func": lambda _: None}
        made(**options)
    except (ValueError, TypeError, RedisError) as error:  # never with the URL, which may hold a password
        why = "its host or port; is a sign in its password not percent-encoded?" if _may_tell(error) else error
        raise ConfigError(
            f"this is no URL of a Redis server ({why}); give redis://HOST:PORT/0, rediss://:PASSWORD@HOST:PORT/0, "
            "redis+cluster://HOST:PORT or redis+sentinel://HOST:PORT/SERVICE"
        ) from error
    greeting: Greeting = []
    if password is not None:
        greeting.append((b"AUTH", *(part.encode() for part in (user, password) if part)))
    if database:
        greeting.append((b"SELECT", b"%d" % int(database)))
    greeting.append((b"CLIENT", b"SETNAME", b"kvboost"))

    def connecting(locate: Callable[[], dict[str, Any]]) -> Callable[[Deadline], tuple[Link, Greeting]]:
        def connect(deadline: Deadline) -> tuple[Link, Greeting]:
            try:
                connection = made(**{**options, **locate()})
                connection.connect()
            except RedisError as error:
                raise ConnectionError(str(error)) from error
            return Link(connection._sock, deadline, owner=connection), greeting

        return connect

    def at(address: Address) -> Connector:
        host, port = address
        return Connector(connecting(lambda: {"host": host, "port": port}), prefix, may_move=False)

    nodes = None if slots is None else Nodes(slots, at)
    return Connector(connecting(locate), prefix, may_move=bool(kind), nodes=nodes)


def _may_tell(error: Exception) -> bool:
    """Whether an error has a part of the URL in it: what it takes for a port may be of a password."""
    return str(error).startswith(("Port ", "netloc "))


def _split(url: str, scheme: str, kind: str) -> tuple[str, list[tuple[str, int]], str]:
    """The URL of the first host as redis-py reads it, all hosts, and the name that Sentinels know the master by."""
    if kind not in ("", "cluster", "sentinel"):
        raise ValueError(f"there is no scheme {scheme}+{kind}")
    if not kind:
        return url, [], ""
    parts = urlsplit(url)
    login, at, addresses = parts.netloc.rpartition("@")
    usual = 26379 if kind == "sentinel" else 6379
    hosts = [(host or "localhost", int(port or usual)) for host, port in map(_address, addresses.split(","))]
    service, _, database = parts.path.strip("/").partition("/") if kind == "sentinel" else ("", "", "")
    if kind == "sentinel" and not service:
        raise ValueError("Sentinels need the name of the service")
    query = f"?{parts.query}" if parts.query else ""
    return f"{scheme}://{login}{at}{hosts[0][0]}:{hosts[0][1]}/{database}{query}", hosts, service


def _address(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdigit() else (text, "", "")
    return host, port


def _without_address(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("host", "port")}


def _once() -> Any:
    """No second try: redis-py waits for seconds between them, and the next host, or the next look, may answer."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Retry(NoBackoff(), 0)


def _slots(hosts: list[Address], options: dict[str, Any]) -> Callable[[], Slots]:
    """Asks one node after the other, as redis-py's own cluster does not start while any node is gone."""
    from redis import Redis, RedisError

    seen: dict[Address, None] = {}  # in the last answer: those of the URL may be gone for good

    def slots() -> Slots:
        failure: Exception = ConnectionError("there is no node to ask")
        for host, port in dict.fromkeys((*hosts, *seen)):
            client = Redis(**{**options, **_LIMITS, "host": host, "port": port, "retry": _once()})
            try:
                found = _read_slots(client.execute_command("CLUSTER SLOTS"), asked=host)  # type: ignore[no-untyped-call]
            except (RedisError, ValueError, TypeError, IndexError) as error:
                failure = error
                continue
            finally:
                client.close()
            if not found:  # it was started, and has not joined yet
                failure = ConnectionError("a node that knows no slots")
                continue
            seen.clear()
            seen.update(dict.fromkeys(found.values()))
            return found
        raise ConnectionError(f"no node of the cluster answers: {failure}") from failure

    return slots


def _read_slots(reply: Any, *, asked: str) -> dict[int, Address]:
    """The master of each slot. A node that does not know its own name means the one it was asked by."""
    found: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in reply:
        name = host.decode() if isinstance(host, bytes) else host
        found.update(dict.fromkeys(range(int(first), int(last) + 1), (name or asked, int(port))))
    return found


def _node_of(slots: Callable[[], Slots], key: str) -> Callable[[], dict[str, Any]]:
    from redis.crc import key_slot

    def locate() -> dict[str, Any]:
        address = slots().get(key_slot(key.encode()))
        if address is None:
            raise ConnectionError("no node of the cluster has the slot of the ledger")
        return {"host": address[0], "port": address[1]}

    return locate


def _sentinel(hosts: list[tuple[str, int]], service: str) -> Callable[[], dict[str, Any]]:
    from redis.sentinel import Sentinel

    def locate() -> dict[str, Any]:
        limits = {**_LIMITS, "retry": _once()}
        sentinel = Sentinel(hosts, sentinel_kwargs=limits)  # type: ignore[no-untyped-call]
        try:
            host, port = sentinel.discover_master(service)  # type: ignore[no-untyped-call]
        finally:
            for client in sentinel.sentinels:
                client.close()
        return {"host": host, "port": port}

    return locate
