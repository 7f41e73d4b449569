"""Settings of an engine, of model loading and of a batch runner, validated when they are made.

Used by the engine and by :mod:`kvboost.cli.settings`, which derives flags, environment variables and TOML names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

QUALITIES = ("exact", "auto", "high", "fast")
PROTECTIONS = ("none", "mac", "encrypt")
AUTO = "auto"
"""A size that follows from the machine's memory when an engine is made."""
DEFAULT_CHUNK = 32
DEFAULT_PLACE_BYTES = 20 * 2**30
"""Limit of a cache directory for which no engine has given one."""
DEFAULT_TTL_S = 7 * 24 * 3600.0
"""How long a shared server keeps a chunk at most: what no model uses any more goes, also where nothing is evicted."""
_CHECKED_BY_DEFAULT = 0.02
_SIZES = (
    "cache_bytes",
    "workspace_bytes",
    "packed_bytes",
    "kv_bytes",
    "tenant_bytes",
    "host_cache_bytes",
    "disk_cache_bytes",
)

_NON_PREFIX = ("recompute_strategy", "recompute_ratio", "force_approx", "calibration", "shadow_share")
_AUTOMATIC = ("cache_bytes", "workspace_bytes", "packed_bytes", "host_cache_bytes")


def parse_bytes(value: int | str, *, name: str) -> int:
    """A number of bytes from an int or from text such as ``"2GiB"`` or ``"500 MB"``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"{name}={value!r} is not a size; write for example 2_000_000_000, '2GB' or '500MiB'")
        value = int(float(match[1]) * _UNITS[match[2]])
    if value < 0:
        raise ConfigError(f"{name}={value} is negative; use 0 to keep nothing")
    return value


def check_bytes(value: object, *, name: str) -> None:
    """Refuse a size in text where a number is taken."""
    if isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is text; give a number of bytes, such as 2 * 10**9")


def is_server(place: str) -> bool:
    """Whether this is the URL of a Redis or Valkey server, of a cluster, of Sentinels, or of a Mooncake Store."""
    return re.match(r"(rediss?(\+cluster|\+sentinel)?|mooncake)://", place) is not None


def _is_share(value: Any, *, below_one: bool = False) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0.0 <= value <= 1.0 and not (below_one and value == 1.0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, given to :class:`kvboost.KVBoost` as keyword arguments.

    The first sentence of a field's docstring is the help text of its flag (:mod:`kvboost.cli.settings`).
    """

    strict: bool = True
    """Raise for a model whose cache cannot be reused. False runs it without reuse."""
    chunk_size: int | None = None
    """Tokens per chunk, on average. By default 16 to 64, so that a chunk's KV takes roughly 0.25 to 2 MB."""
    chunking: Any = "natural"
    """Where chunks end: ``"natural"`` (at paragraphs, lines and messages, by content where there are none),
    ``"content"``, ``"fixed"``, or in Python a Chunker."""
    max_chunks: int | None = None
    """Keep at most this many chunks in memory."""
    cache_bytes: int | str = AUTO
    """Memory for chunks: a number of bytes, text such as ``"2GiB"``, or ``"auto"``. On an accelerator that is a fifth
    of the memory that is free beside the weights, on the CPU 2 GiB. With tiers below, a quarter of it, at most 512 MiB,
    is for chunks that wait to be written there."""
    workspace_bytes: int | str = AUTO
    """Memory for caches kept between requests, so that a repeated prefix needs no copy. ``"auto"`` is a fifth of an
    accelerator's free memory, on the CPU 1 GiB."""
    packed_bytes: int | str = AUTO
    """Memory for copies of weights that are packed for a CPU's kernels. ``"auto"`` is a quarter of the memory beside
    the weights: of all there is, or of the container's limit, not of what is free. What is packed rounds otherwise, so
    machines of different sizes share KV only if they pack the same layers: give all of them the same number."""
    kv_bytes: int | str | None = None
    """KV that running requests may hold in memory, prompt and new tokens, such as ``"512MB"``. A request of
    ``generate`` that needs more is paged: pages that do not fit are kept on disk (with an accelerator, in host memory).
    Results are equal up to rounding, and slower. A server does not page; it refuses such a job. None sets no limit
    for ``generate``; a server's jobs then hold two fifths of an accelerator's free memory together, on the CPU 2 GiB.
    Stored chunks and idle workspaces have separate budgets."""
    kv_dir: str | Path | None = None
    """Directory for pages beyond ``kv_bytes``. Not a memory-backed one, as some /tmp are. By default the system's
    directory for temporary files."""
    tenant: str = ""
    """Chunks of different tenants are never shared. One engine serves many: see :meth:`kvboost.KVBoost.for_tenant`."""
    tenant_bytes: int | str | None = None
    """Limit for one tenant, in memory and on disk; a shared server has its own limit only. Without one, a
    tenant uses what others leave free; in a full memory or disk tier it evicts its own chunks, or those of tenants that
    have more than it has and more than an even share."""
    numerics: Any = None
    """How exact reuse rounds: ``"bitwise"`` has the bits of a cold run, ``"fast"`` is exact up to rounding. By default
    bitwise on CPUs and fast on accelerators, where bitwise recomputes up to 1,023 tokens behind a hit."""
    reuse_generated: bool = False
    """Also store KV made by decoding. Such a hit is not bitwise and is reported so."""
    quality: float | str = "exact"
    """How far non-prefix reuse may go: ``"exact"``, ``"auto"``, ``"high"``, ``"fast"``, or the share of answers that
    may differ. ``"exact"`` never uses it. ``"auto"`` is exact until checks on this engine's own requests have shown
    that at most 5 % of the answers would differ; the checks run while no request does, and go on afterwards
    (``cache_stats()`` says where they stand). ``"high"`` recomputes half of the reused tokens, ``"fast"`` 15 % (about
    22 % on models other than Llama and Gemma 3, where CacheBlend is used). On SmolLM2-135M, ``"high"`` left 39 of 100
    answers of 32 tokens as they were, ``"fast"`` 4 of 8 answers of 8 tokens; other models differ. With a
    ``shadow_share``, they stop once more than 20 % (``"fast"``: 50 %) of the answers are proven to differ; without one,
    as in Python by default, nobody looks. In all checks an answer differs if one of its first eight tokens does. The
    repair a share needs depends on the model and the prompts. With a ``calibration``, the engine uses the cheapest one
    shown to stay within the share, and no non-prefix reuse if there is none. Without one it uses the ratio of
    ``"high"``, and shadow checks stop non-prefix reuse once the share is proven to be exceeded."""
    shadow_share: float | None = None
    """Share of the requests with non-prefix reuse that are also answered without it, in the background. Non-prefix
    reuse stops once too many answers differ (see ``cache_stats()["non_prefix_reuse"]``). The default is 0, or 2 % if
    ``quality`` is a number (``kvboost serve``: 2 % also for ``"high"`` and ``"fast"``); ``quality="auto"`` then checks
    while no request runs, and this share at once if given. There are three slots for it. A request holds one
    from its beginning until its check is over, the whole answer long: a busy server checks less than this share."""
    calibration: str | Path | None = None
    """File written by ``KVBoost.calibrate``: the strategy and ratio this model needs for each quality."""
    recompute_strategy: Any = None
    """Which tokens of non-prefix reuse are recomputed, instead of the quality's choice. ``"none"``, ``"even"``,
    ``"cacheblend"``, ``"auto"``, or in Python a RepairStrategy."""
    recompute_ratio: float | None = None
    """Share of their tokens to recompute, instead of the quality's own."""
    force_approx: bool = False
    """Use non-prefix reuse also where computing is expected to be faster, as measurements do."""
    kv_cache_bits: int = 16
    """Bits of stored KV: 16 keeps it as the model has it, 8 and 4 take a half and a quarter of the memory. Answers that
    used 8 or 4 are not bitwise (see docs/results/codec.md)."""
    host_cache_bytes: int | str = AUTO
    """Host memory for chunks that an accelerator's memory (``cache_bytes``) evicts. They load faster than from a
    disk. ``"auto"`` is a quarter of the host's free memory beside an accelerator, and 0 for a model on the CPU. It is
    pinned, in pages that are allocated as they are needed. For the engine's own tenant only."""
    disk_cache_dir: str | Path | None = None
    """Also keep chunks in this directory. They outlive the process, and several processes may share it."""
    disk_cache_bytes: int | str | None = None
    """Limit of the directory, over all models and tenants in it, for everybody who uses it. If left out, it keeps the
    limit it has; a new one gets 20 GiB. What is beyond a smaller limit is evicted as new chunks are stored. 1 GiB of
    the file system, or a twentieth of a small one, is left free."""
    remote_url: str | None = None
    """Also keep chunks in this Redis or Valkey server: ``redis://host:port``, or ``rediss://`` for TLS. Several
    machines may share it; ``rediss://user:password@host:port`` logs in, ``redis+cluster://host:port`` is a cluster,
    ``redis+sentinel://host:port/service`` the master of Sentinels. Needs ``kvboost[redis]``. A Mooncake
    Store is ``mooncake://master:port``; it needs ``kvboost[mooncake]``. The server's own limit holds: give it
    ``maxmemory`` and ``maxmemory-policy allkeys-lru``."""
    remote_ttl_seconds: float | None = DEFAULT_TTL_S
    """Chunks leave a Redis server this long after they were stored: 7 days. None keeps them until it evicts them."""
    remote_timeout_seconds: float = 0.03
    """How long a request waits for the server beyond what its bytes take, before it computes instead. Give more for a
    server across a slow network, or a busy machine."""
    record_protection: str = "none"
    """Protection of what is written outside the process: ``"none"``, ``"mac"`` or ``"encrypt"``. ``"none"`` has
    checksums, ``"mac"`` also detects changes by others, ``"encrypt"`` also prevents reading (needs
    ``kvboost[crypto]``)."""
    record_key_file: str | Path | None = None
    """Key for that: a file with 32 random bytes, or with 64 hex digits, that only its owner may read."""

    @property
    def chunk_tokens(self) -> int:
        """``chunk_size``, or what most models get by default."""
        return self.chunk_size if self.chunk_size is not None else DEFAULT_CHUNK

    @property
    def checked_share(self) -> float:
        """Share of the requests with non-prefix reuse that are answered both ways."""
        if self.shadow_share is not None:
            return self.shadow_share
        if self.checks_when_idle:
            return 1.0
        return 0.0 if isinstance(self.quality, str) else _CHECKED_BY_DEFAULT

    @property
    def checks_when_idle(self) -> bool:
        """Whether requests are checked while no other runs, instead of at once."""
        return self.quality == "auto" and self.shadow_share is None

    def __post_init__(self) -> None:
        if isinstance(self.quality, str) and self.quality not in QUALITIES:
            raise ConfigError(
                f"quality={self.quality!r} is not known; use one of {QUALITIES}, or the largest share of answers "
                "that may differ, such as 0.02"
            )
        if self.calibration is not None and (self.recompute_strategy is not None or self.recompute_ratio is not None):
            raise ConfigError(
                "calibration chooses what to recompute, and so do recompute_strategy and recompute_ratio; leave one out"
            )
        if not isinstance(self.quality, str) and not _is_share(self.quality, below_one=True):
            raise ConfigError(f"quality={self.quality!r} is not a share; give 0.02 for two answers in a hundred")
        if self.numerics not in (None, "bitwise", "fast"):
            raise ConfigError(f"numerics={self.numerics!r} is not known; use 'bitwise' or 'fast', or leave it out")
        if self.kv_cache_bits not in (16, 8, 4):
            raise ConfigError(f"kv_cache_bits={self.kv_cache_bits} is not known; use 16, 8 or 4")
        if self.shadow_share is not None and not _is_share(self.shadow_share):
            raise ConfigError(
                f"shadow_share={self.shadow_share} is not a share; give 0.02 to check 2 % of the requests"
            )
        if self.recompute_ratio is not None and not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio={self.recompute_ratio} is not a share; give 0.15 for 15 % of tokens")
        if self.chunk_size is not None and self.chunk_size < 4:
            raise ConfigError(f"chunk_size={self.chunk_size} is too small; use 4 or more, or leave it out")
        if self.max_chunks is not None and self.max_chunks < 0:
            raise ConfigError(f"max_chunks={self.max_chunks} is negative; leave it out for no limit")
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and not (name in _AUTOMATIC and value == AUTO):
                object.__setattr__(self, name, parse_bytes(value, name=name))
        if self.disk_cache_bytes == 0:
            raise ConfigError("disk_cache_bytes=0 keeps nothing; leave disk_cache_dir out instead")
        if not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={self.tenant!r} is no name; give a text")
        if not (isinstance(self.remote_timeout_seconds, int | float) and self.remote_timeout_seconds > 0):
            raise ConfigError(f"remote_timeout_seconds={self.remote_timeout_seconds!r} is no time; give 0.03 for 30 ms")
        if self.kv_dir is not None and not Path(self.kv_dir).is_dir():
            raise ConfigError(f"kv_dir={str(self.kv_dir)!r} is no directory; create it, or leave it out")
        self._check_non_prefix()
        self._check_protection()
        if self.remote_url is not None and not is_server(self.remote_url):
            raise ConfigError(
                f"remote_url={self.remote_url!r} is not known; give redis://HOST:PORT (rediss: for TLS), "
                "redis+cluster://HOST:PORT, redis+sentinel://HOST:PORT/SERVICE or mooncake://MASTER:PORT"
            )

    def _check_non_prefix(self) -> None:
        if self.quality == "auto" and self.calibration is None and self.shadow_share == 0:
            raise ConfigError(
                "quality='auto' is earned by checks, and shadow_share=0 makes none; leave shadow_share out to check "
                "while no request runs, or give the share to check at once, such as 0.02"
            )
        if self.quality != "exact":
            return
        idle = [name for name in _NON_PREFIX if getattr(self, name) is not None and getattr(self, name) is not False]
        if idle:
            raise ConfigError(
                f"{' and '.join(idle)} set{'s' if len(idle) == 1 else ''} non-prefix reuse, which quality='exact' (the "
                "default) never uses; add quality='auto', 'high' or 'fast', or a share such as 0.02"
            )

    def _check_protection(self) -> None:
        protection, file = self.record_protection, self.record_key_file
        if protection not in PROTECTIONS:
            raise ConfigError(f"record_protection={protection!r} is not known; use one of {PROTECTIONS}")
        if protection != "none" and file is None:
            raise ConfigError(f"record_protection={protection!r} needs a key; give record_key_file")
        if protection == "none" and file is not None:
            raise ConfigError(
                f"record_key_file={str(file)!r} protects nothing; set record_protection to mac or encrypt"
            )


SETTINGS = tuple(field.name for field in fields(EngineConfig))
"""The names of an engine's settings."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How a model is loaded: arguments of :meth:`kvboost.KVBoost.from_pretrained`."""

    dtype: str = "auto"
    """The model's dtype, as Transformers takes it. ``"auto"`` takes the checkpoint's own."""
    device: str | None = None
    """Where to put the model. If left out, the accelerator if there is one, else the CPU."""
    revision: str | None = None
    """The branch, tag or commit of a model from the hub. If left out, the newest."""
    weight_budget: int | str | None = None
    """Memory for the model's weights, such as ``"6GB"``; the rest is read from disk as needed."""
    weight_dir: str | Path | None = None
    """Directory for the layers' files of a ``weight_budget``. If left out, beside the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How requests run concurrently: arguments of :class:`kvboost.scheduler.runner.BatchRunner`."""

    max_running: int = 16
    """Requests computed concurrently."""
    max_waiting: int = 256
    """Requests that may wait; further ones are refused with a 429."""
    max_step_seconds: float = 600.0
    """A prefill or decode step that takes longer hangs: the server says so and ends, with an exit code that is not 0.
    Raise it where one pass over the weights takes minutes."""
    deterministic: bool = False
    """Give the same bytes for the same request (with a seed or temperature 0), alone or among others. Slower."""
