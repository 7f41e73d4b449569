"""From an URL to redis-py's client: of one server, of the master that Sentinels name, or of a cluster.

Used by :mod:`kvboost.store.tiers.redis.values`. Invariant: no message holds a password.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvboost.errors import ConfigError, with_extra

Address = tuple[str, int]

_READ_BYTES = 2**18


def place_of(url: str) -> str:
    """An URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def client_maker(url: str, *, timeout_s: float) -> Callable[[], Any]:
    """What makes the client. That of a cluster connects at once, and raises what redis-py raises; others connect later.

    ``timeout_s`` is for each step of a connection and each read. Raises ConfigError for an URL that cannot work, or if
    redis-py is missing.
    """
    try:
        import redis
        from redis import connection as connections
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(f"a Redis tier needs the redis package; {with_extra('redis')}") from error
    limits: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1),  # once: a connection may have been closed while it was idle
    }
    options = {
        **limits,
        "protocol": 2,
        "client_name": "kvboost",
        "decode_responses": False,
        "socket_read_size": _READ_BYTES,
        "socket_keepalive": True,
    }
    try:
        scheme, _, kind = urlsplit(url).scheme.partition("+")
        plain, hosts, service = _split(url, scheme, kind)
        options = connections.parse_url(plain) | options  # type: ignore[no-untyped-call]
        password = options.pop("sentinel_password", None)
        made: Any = options.pop("connection_class", connections.Connection)
        made(**options)  # so that unknown options are seen now
    except (ValueError, TypeError, redis.RedisError) as error:  # never with the URL, which may hold a password
        why = "its host or port; is a sign in its password not percent-encoded?" if _may_tell(error) else error
        raise ConfigError(
            f"this is no URL of a Redis server ({why}); give redis://HOST:PORT/0, rediss://:PASSWORD@HOST:PORT/0, "
            "redis+cluster://HOST:PORT or redis+sentinel://HOST:PORT/SERVICE"
        ) from error
    if not kind:
        pool = redis.ConnectionPool(connection_class=made, command_packer=_packer(), **options)
        return lambda: redis.Redis(connection_pool=pool)
    for name in ("host", "port", "retry"):
        options.pop(name, None)
    options["ssl"] = scheme == "rediss"
    if kind == "sentinel":
        secure = {name: value for name, value in options.items() if name.startswith("ssl")}
        asking = {**limits, **secure, "password": password}
        sentinel: Any = redis.Sentinel(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        return lambda: sentinel.master_for(service, retry=limits["retry"], **options)
    options.pop("db", None)  # a cluster has one

    def cluster() -> Any:
        nodes = [redis.cluster.ClusterNode(*address) for address in hosts]  # type: ignore[no-untyped-call]
        # Without full coverage a cluster may serve the slots it has.
        try:
            return redis.RedisCluster(
                startup_nodes=nodes, retry=limits["retry"], require_full_coverage=False, **options
            )
        except IndexError as error:  # redis-py's, where the node that answers has no slots to tell of
            raise ConnectionError("the node that answers has not joined a cluster: it knows no slots") from error

    return cluster


def _packer() -> Any:
    """Packs commands without copying values: hiredis would copy them, which takes as long as sending them does."""
    from redis._parsers import Encoder
    from redis.connection import PythonRespSerializer

    encoder = Encoder("utf-8", "strict", False)  # type: ignore[no-untyped-call]
    return PythonRespSerializer(6000, encoder.encode)


def _may_tell(error: Exception) -> bool:
    """Whether an error has a part of the URL in it: what it takes for a port may be of a password."""
    return str(error).startswith(("Port ", "netloc "))


def _split(url: str, scheme: str, kind: str) -> tuple[str, Sequence[Address], str]:
    """The URL of the first host as redis-py reads it, all hosts, and the name that Sentinels know the master by."""
    if not kind:
        return url, [], ""
    if kind not in ("cluster", "sentinel"):
        raise ValueError(f"there is no scheme {scheme}+{kind}")
    parts = urlsplit(url)
    login, at, addresses = parts.netloc.rpartition("@")
    usual = 26379 if kind == "sentinel" else 6379
    hosts = []
    for text in addresses.split(","):
        address = urlsplit(f"//{text}")
        hosts.append((address.hostname or "localhost", address.port or usual))
    service, _, database = parts.path.strip("/").partition("/") if kind == "sentinel" else ("", "", "")
    if kind == "sentinel" and not service:
        raise ValueError("Sentinels need the name of the service")
    query = f"?{parts.query}" if parts.query else ""
    return f"{scheme}://{login}{at}{hosts[0][0]}:{hosts[0][1]}/{database}{query}", hosts, service
