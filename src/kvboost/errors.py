"""Every error KVBoost raises on purpose; each message says what to do next."""


class KVBoostError(Exception):
    """Base of all errors that KVBoost raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """A setting or an argument that cannot work as given."""


class MovedModelError(ConfigError):
    """The model was moved to another device, or cast, after its engine was made: make a new engine."""


class UnsupportedModelError(KVBoostError):
    """The model keeps state that KVBoost cannot reuse without changing the output."""


class CapacityError(KVBoostError):
    """The request does not fit the model or the memory it was given."""


class BusyError(CapacityError):
    """Too many requests are waiting: try again later."""


class ClosedError(KVBoostError):
    """The engine or runner was closed or has failed: make a new one."""


class StoreError(KVBoostError):
    """A store was used in a way its contract forbids (never a failed or missing chunk: that is a miss)."""


class PlaceError(KVBoostError):
    """A directory or server of chunk records cannot be used by an administrative command.

    Tiers never raise it: for them it is a miss.
    """


class RecordError(StoreError):
    """A chunk record that cannot be written or used. Tiers turn it into a miss; readers of single records see it."""


class DamagedRecordError(RecordError):
    """The bytes are not a record, or were damaged."""


class ForeignRecordError(RecordError):
    """An intact record of another key, model, tenant, codec or secret."""


class RecordVersionError(RecordError):
    """A record of an unsupported format version."""


EXTRAS: dict[str, tuple[str, ...]] = {
    "cli": ("pydantic",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "structured": ("llguidance",),
    "redis": ("redis",),
    "mooncake": ("mooncake",),
    "crypto": ("cryptography",),
    "adapters": ("peft",),
    "otel": ("opentelemetry",),
    "fleet": ("zmq", "msgspec"),
    "ray": ("ray",),
    "evals": ("lm_eval",),
    "lighteval": ("lighteval",),
}
"""What can be imported once an extra is installed."""


def with_extra(name: str) -> str:
    """What to do about a missing extra, in words that are right in a checkout and after a release."""
    return f'install KVBoost with its extra {name} (in a checkout: pip install ".[{name}]")'
