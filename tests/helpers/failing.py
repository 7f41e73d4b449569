"""Engines over tiers that fail, held against a cold engine: the answers must be its answers, to the bit.

Used by the tests and by the benchmark tier_faults.
"""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.faults import Fault, FaultyProxy
from kvboost import KVBoost
from kvboost.core.verify import same_bits
from kvboost.direct_io import DirectFile
from kvboost.store.tiers.disk.files import Files
from tests.helpers.models import VOCAB

TEXTS = 3
_SETTINGS: dict[str, Any] = {"chunk_size": 32, "quality": "exact"}


class Failing(Files):
    """The system calls of the disk tier, counted; the ``number``-th ``call`` fails with ``error``."""

    def __init__(self, call: str = "", number: int = 0, error: int = 0) -> None:
        super().__init__()
        self.call, self.number, self.error = call, number, error
        self.counts: Counter[str] = Counter()
        self.failed = False
        self._lock = threading.Lock()

    def _count(self, call: str) -> None:
        with self._lock:
            self.counts[call] += 1
            self.failed |= (fails := (call, self.counts[call]) == (self.call, self.number))
        if fails:
            raise OSError(self.error, os.strerror(self.error))

    def _writev(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        self._count("write")
        return super()._writev(descriptor, parts)

    def _read(self, file: DirectFile, buffer: memoryview) -> int:
        self._count("read")
        return super()._read(file, buffer)

    def _rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super()._rename(source, target)

    def _fsync(self, descriptor: int) -> None:
        self._count("fsync")
        super()._fsync(descriptor)


@contextmanager
def _opened(judge: Judge, **where: Any) -> Iterator[KVBoost]:
    """An engine that loads whatever it finds, also where computing would be faster: here that is nearly always so."""
    with KVBoost(judge.model, None, **_SETTINGS, **where) as engine:
        store: Any = engine._store
        store._loader.rules = replace(store._loader.rules, compute_seconds=None)
        yield engine


class Judge:
    """Knows what a cold engine answers."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.texts = [
            torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(seed)).tolist()
            for seed in range(TEXTS)
        ]
        with KVBoost(model, None, **_SETTINGS, cache_bytes=0, workspace_bytes=0) as cold:
            self._cold = [cold.prefill(tokens) for tokens in self.texts]
        self.requests = self.failed = self.differing = self.reused = 0

    def ask(self, engine: KVBoost) -> None:
        """Read every text and compare."""
        for tokens, cold in zip(self.texts, self._cold, strict=True):
            self.requests += 1
            try:
                result = engine.prefill(tokens)
            except Exception:  # noqa: BLE001 - this is what is counted
                self.failed += 1
                continue
            self.reused += result.reuse.cached_tokens > 0
            pairs = zip(result.cache.extract(0, len(tokens)), cold.cache.extract(0, len(tokens)), strict=True)
            if not same_bits(result.logits, cold.logits) or not all(same_bits(one, other) for one, other in pairs):
                self.differing += 1

    @property
    def well(self) -> bool:
        """Whether nothing failed or differed."""
        return self.failed == self.differing == 0


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the one warning that a failure is
        yield


def over_failing_disk(judge: Judge, directory: Path, files: Failing) -> None:
    """Two engines one after the other over one directory, while one of its system calls fails."""
    with _quietly():
        for number in range(2):
            with _opened(judge, disk_cache_dir=directory) as engine:
                tier: Any = engine._store._own.tiers[0]  # type: ignore[attr-defined]
                tier._files = tier._directory.files = files
                judge.ask(engine)
                engine.flush()
                if number:
                    engine._store._memory.clear()  # type: ignore[attr-defined]
                    judge.ask(engine)  # from the directory, or what is left of it


MOMENTS = ("from the beginning", "while writing", "before loading", "while loading", "on and off")


def over_failing_redis(judge: Judge, port: int, fault: Fault, moment: str, *, seed: int = 0) -> None:
    """Engines one after the other over one server that fails in this way, at this moment."""
    with _quietly(), FaultyProxy(port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        proxy.fault = fault if moment == "from the beginning" else Fault.NONE
        ended = threading.Event()
        flips = threading.Thread(target=_on_and_off, args=(proxy, fault, ended, random.Random(seed)))
        if moment == "on and off":
            flips.start()
        try:
            with _opened(judge, remote_url=url) as engine:
                if moment == "while writing":
                    threading.Timer(0.02, _set, (proxy, fault)).start()
                judge.ask(engine)
                engine.flush()
            if moment == "before loading":
                proxy.fault = fault
            with _opened(judge, remote_url=url) as engine:
                if moment == "while loading":
                    threading.Timer(0.01, _set, (proxy, fault)).start()
                judge.ask(engine)
                judge.ask(engine)
        finally:
            ended.set()
            if flips.is_alive():
                flips.join()


def _set(proxy: FaultyProxy, fault: Fault) -> None:
    proxy.fault = fault


def _on_and_off(proxy: FaultyProxy, fault: Fault, ended: threading.Event, chooser: random.Random) -> None:
    while not ended.is_set():
        proxy.fault = fault
        time.sleep(chooser.uniform(0.001, 0.03))
        proxy.fault = Fault.NONE
        time.sleep(chooser.uniform(0.001, 0.1))
