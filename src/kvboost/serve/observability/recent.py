"""The last requests, for the page: numbers only, never a word of a prompt."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

_MAX_RECORDS = 60


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What one request computed and reused. Token counts are of its prompt, except ``new``."""

    id: str
    endpoint: str
    at: float
    """Seconds since 1970, when it ended."""
    prompt: int
    """All of them. Where they came from is not known of an answer that was cancelled: the next four are 0 then."""
    exact: int
    moved: int
    """The recomputed ones included."""
    recomputed: int
    fresh: int
    new: int
    ttft_ms: float | None
    total_ms: float
    saved_ms: float
    """What computing the reused tokens would have taken, as the engine expects from its recent requests."""
    finish: str
    reason: str | None
    """Why something was not reused."""
    queue_ms: float | None = None
    """Until the first job was admitted."""
    token_ms: float | None = None
    """For each token after the first; None where there is one at most."""


class RecentRequests:
    """The newest few records. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)

    def add(self, record: RequestRecord) -> None:
        """One more."""
        with self._lock:
            self._records.append(record)

    def listed(self) -> list[dict[str, Any]]:
        """As JSON takes them, the newest last."""
        with self._lock:
            return [asdict(record) for record in self._records]
