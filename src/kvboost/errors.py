"""Every error KVBoost raises on purpose; each message says what to do next."""


class KVBoostError(Exception):
    """Base of all errors that KVBoost raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """A setting or an argument that cannot work as given."""


class UnsupportedModelError(KVBoostError):
    """The model keeps state that KVBoost cannot reuse without changing the output."""


class CapacityError(KVBoostError):
    """The request does not fit the model or the memory it was given."""


class StoreError(KVBoostError):
    """A store was used in a way its contract forbids (never a failed or missing chunk: that is a miss)."""
