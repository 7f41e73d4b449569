"""The engine's settings, checked once when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

QUALITIES = ("exact", "high", "fast")
PROTECTIONS = ("none", "mac", "encrypt")
_CHECKED_BY_DEFAULT = 0.02


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


def _is_share(value: Any, *, below_one: bool = False) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0.0 <= value <= 1.0 and not (below_one and value == 1.0)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, given to :class:`kvboost.KVBoost` as keyword arguments."""

    strict: bool = True
    """Raise for a model whose cache cannot be reused. False runs it without reuse."""
    chunk_size: int = 128
    """Tokens per chunk, on average. Smaller ones leave less to compute after a hit and slow the first reading down."""
    chunking: Any = "content"
    """``"content"`` (cuts that depend on the text just read), ``"fixed"``, or a Chunker."""
    max_chunks: int | None = None
    """Keep at most this many chunks."""
    cache_bytes: int | str = "2GiB"
    """Keep at most this many bytes of chunks: a number or text such as ``"2GiB"``."""
    workspace_bytes: int | str = "1GiB"
    """Memory for caches kept between requests, so that a repeated prefix needs no copy."""
    kv_bytes: int | str | None = None
    """Memory for the KV of one running request, prompt and new tokens, such as ``"512MB"``. One that would take more is
    read and decoded in pages, of which those that do not fit lie on disk (beside an accelerator: in host memory): the
    same up to rounding, and slower. Jobs of a server are not paged: such a one is refused. None sets no limit. Stored
    chunks and idle workspaces have budgets of their own."""
    kv_dir: str | Path | None = None
    """Where those pages are written to; not a directory that lies in memory, as some /tmp do. If left out, the system's
    directory for temporary files."""
    tenant: str = ""
    """Chunks of different tenants never meet. One engine serves many: see :meth:`kvboost.KVBoost.for_tenant`."""
    tenant_bytes: int | str | None = None
    """One tenant may take at most so much of the memory, and as much of each tier below; None sets no limit."""
    reuse_generated: bool = False
    """Also keep KV made by decoding. Such a hit is not bitwise and is reported so."""
    quality: str | float = "high"
    """How far text may be reused that stands elsewhere: ``"exact"`` (never), ``"high"`` (half of its rows computed
    again; at most 20 % of the answers may differ), ``"fast"`` (15 % of the rows, 50 % of the answers), or the largest
    share of answers that may differ, such as 0.05. An answer differs if one of its first eight tokens does.
    What a share takes depends on the model and the prompts. With a ``calibration`` the smallest ratio is taken that was
    shown to keep within it, and nothing is moved if none was. Without one the ratio is that of ``"high"``, whatever the
    share, and shadow checks put an end to moving once it is proven to be passed."""
    shadow_share: float | None = None
    """Answer this share of the requests that used moved chunks both ways, in the background, and stop moving once
    too many answers differ (see ``cache_stats()["non_prefix_reuse"]``). By default none, or 2 % where ``quality`` is a
    number: a promise that nobody checks is none."""
    calibration: str | Path | None = None
    """A file written by :meth:`kvboost.KVBoost.calibrate`: what ratio this model needs for the quality asked for."""
    recompute_strategy: Any = None
    """How to choose the rows of moved chunks that are computed again, instead of the quality's way: ``"none"``,
    ``"selective"``, ``"first"``, ``"cacheblend"``, ``"query"``, ``"auto"``, or a RepairStrategy."""
    recompute_ratio: float | None = None
    """The share of their rows to compute again, instead of the quality's own."""
    recompute_overlap: int | None = None
    """Rows per seam for the ``"selective"`` strategy."""
    force_approx: bool = False
    """Move chunks also where computing them is expected to be faster, as measurements do."""
    kv_cache_bits: int = 16
    """16 keeps KV as the model has it; 8 and 4 keep it in a half and a quarter of the memory of 16-bit KV. Answers that
    used such KV are not bitwise (see docs/results/codec.md)."""
    host_cache_bytes: int | str = 0
    """Where the model is on an accelerator: keep chunks that its memory (``cache_bytes``) lets go in so much host
    memory. They come back faster than from a disk. For the engine's own tenant only."""
    disk_cache_dir: str | Path | None = None
    """Also keep chunks in this directory: they outlive the process, and several processes may share it."""
    disk_cache_bytes: int | str = "20GiB"
    """What the directory may take, over all models and tenants in it."""
    remote_url: str | None = None
    """Also keep chunks in this Redis or Valkey server, which several machines may share: ``redis://host:port`` or
    ``rediss://user:password@host:port`` (TLS). Needs ``kvboost[redis]``."""
    remote_cache_bytes: int | str = "20GiB"
    """What all engines together may keep there."""
    remote_ttl_seconds: float | None = None
    """A chunk is gone from there so long after it was stored; None keeps it until others need the room."""
    object_url: str | None = None
    """Also keep chunks in this object store, ``s3://BUCKET/PREFIX``, asked when no other tier has them. The region, the
    endpoint and the keys come from the environment (``AWS_*``). Needs ``kvboost[s3]``."""
    object_cache_bytes: int | str | None = None
    """What one model and tenant may keep there; None leaves it to the bucket's own rules, which let old chunks go."""
    draft: Any = None
    """What proposes tokens that the model then verifies, several in one pass over its weights: a smaller model of the
    same vocabulary (loaded, or its folder or name), or ``"prompt-lookup"``, which proposes what followed the last two
    tokens earlier in the prompt. Pays most where weights are streamed; see docs/decisions/0019-speculation.md. The
    draft's own weights are not part of ``weight_budget``. Used by generate, stream and chat; batches do without it."""
    record_protection: str = "none"
    """What is written outside the process: ``"none"`` has checksums, ``"mac"`` is also proof against changes by others,
    ``"encrypt"`` against reading too (needs ``kvboost[crypto]``)."""
    record_key_file: str | Path | None = None
    """The key for that: a file with 32 random bytes, or with 64 hex digits, that only its owner may read."""

    @property
    def checked_share(self) -> float:
        """Of the requests that used moved chunks, the share that is answered both ways."""
        if self.shadow_share is not None:
            return self.shadow_share
        return 0.0 if isinstance(self.quality, str) else _CHECKED_BY_DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.quality, str) and self.quality not in QUALITIES:
            raise ConfigError(
                f"quality={self.quality!r} is not known; use one of {QUALITIES}, or the largest share of answers "
                "that may differ, such as 0.02"
            )
        if self.calibration is not None and (self.recompute_strategy is not None or self.recompute_ratio is not None):
            raise ConfigError(
                "calibration chooses how to repair, and so do recompute_strategy and recompute_ratio; leave one out"
            )
        if not isinstance(self.quality, str) and not _is_share(self.quality, below_one=True):
            raise ConfigError(f"quality={self.quality!r} is not a share; give 0.02 for two answers in a hundred")
        if self.kv_cache_bits not in (16, 8, 4):
            raise ConfigError(f"kv_cache_bits={self.kv_cache_bits} is not known; use 16, 8 or 4")
        if self.shadow_share is not None and not _is_share(self.shadow_share):
            raise ConfigError(
                f"shadow_share={self.shadow_share} is not a share; give 0.02 to check 2 % of the requests"
            )
        if self.recompute_ratio is not None and not 0.0 <= self.recompute_ratio <= 1.0:
            raise ConfigError(f"recompute_ratio={self.recompute_ratio} is not a share; give 0.15 for 15 % of the rows")
        if self.recompute_overlap is not None and self.recompute_overlap < 0:
            raise ConfigError(f"recompute_overlap={self.recompute_overlap} is negative; give a number of tokens")
        if self.chunk_size < 4:
            raise ConfigError(f"chunk_size={self.chunk_size} is too small; use 4 or more (128 is a good start)")
        if self.max_chunks is not None and self.max_chunks < 0:
            raise ConfigError(f"max_chunks={self.max_chunks} is negative; leave it out for no limit")
        object.__setattr__(self, "cache_bytes", parse_bytes(self.cache_bytes, name="cache_bytes"))
        object.__setattr__(self, "workspace_bytes", parse_bytes(self.workspace_bytes, name="workspace_bytes"))
        object.__setattr__(self, "host_cache_bytes", parse_bytes(self.host_cache_bytes, name="host_cache_bytes"))
        object.__setattr__(self, "disk_cache_bytes", parse_bytes(self.disk_cache_bytes, name="disk_cache_bytes"))
        object.__setattr__(self, "remote_cache_bytes", parse_bytes(self.remote_cache_bytes, name="remote_cache_bytes"))
        for name in ("tenant_bytes", "object_cache_bytes", "kv_bytes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, name=name))
        if not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={self.tenant!r} is no name; give a text")
        if self.object_url is not None and not re.match(r"s3://[^/]", self.object_url):
            raise ConfigError(f"object_url={self.object_url!r} is not known; give s3://BUCKET/PREFIX")
        if self.kv_dir is not None and not Path(self.kv_dir).is_dir():
            raise ConfigError(f"kv_dir={str(self.kv_dir)!r} is no directory; create it, or leave it out")
        self._check_protection()
        if self.remote_url is not None and not self.remote_url.startswith(("redis://", "rediss://")):
            raise ConfigError(f"remote_url={self.remote_url!r} is not known; give redis://HOST:PORT (rediss: for TLS)")

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
