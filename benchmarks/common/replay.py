"""Replays a trace against an eviction policy, and against Belady's MIN, which knows the future.

Used by :mod:`benchmarks.store.eviction`. Invariant: the policy hears what :class:`kvboost.store.MemoryStore` tells it,
in the same order, and may evict what that allows: a test holds one against the other. Only the bookkeeping is
simpler, so that millions of blocks take seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.common.traces import Prompt, Trace
from kvboost.extend import EvictionPolicy

_NEVER = 1 << 60


class _Entry:
    __slots__ = ("leased", "parent", "size", "successors")

    def __init__(self, size: int, parent: bytes | None) -> None:
        self.size = size
        self.parent = parent
        self.successors = 0
        self.leased = False


class Replay:
    """A store of ``capacity`` blocks (or tokens, where chunks are reused anywhere) that holds no data."""

    def __init__(self, capacity: int, *, policy: EvictionPolicy, chained: bool) -> None:
        self._capacity = capacity
        self._policy = policy
        self._chained = chained
        self._entries: dict[bytes, _Entry] = {}
        self._held = 0
        self.hit_tokens = 0
        self.refusals = 0
        """How often the policy offered a block that may not go."""

    def run(self, prompts: Sequence[Prompt]) -> int:
        """Serve ``prompts`` one after the other; the tokens that were found."""
        for prompt in prompts:
            self.serve(prompt)
        return self.hit_tokens

    def serve(self, prompt: Prompt) -> None:
        """Look a prompt up, keep what is missing, tell the policy: as the engine does it."""
        entries = self._entries
        found: list[bytes] = []
        for key, tokens in zip(prompt.keys, prompt.tokens, strict=True):
            entry = entries.get(key)
            if entry is not None:
                found.append(key)
                self.hit_tokens += tokens
                entry.leased = True
            elif self._chained:
                break
        self._policy.found(found)
        parent = found[-1] if found and self._chained else None
        for key, tokens in list(zip(prompt.keys, prompt.tokens, strict=True))[len(found) if self._chained else 0 :]:
            if key not in entries and not self._put(key, 1 if self._chained else tokens, parent) and self._chained:
                break  # what follows could not be reached
            parent = key if self._chained else None
        self._policy.used([key for key in prompt.keys if key in entries])
        for key in found:
            entries[key].leased = False

    def _put(self, key: bytes, size: int, parent: bytes | None) -> bool:
        above = self._entries[parent] if parent is not None else None
        if above is not None:
            above.successors += 1
        asked = False
        while self._held + size > self._capacity:
            victim = self._policy.victim(self._evictable) if size <= self._capacity else None
            if victim is not None and not asked:
                asked = True
                if not self._policy.admits(key, parent=parent, nbytes=size, victim=victim):
                    victim = None
            if victim is None:
                if above is not None:
                    above.successors -= 1
                return False
            self._evict(victim)
        self._entries[key] = _Entry(size, parent)
        self._held += size
        self._policy.inserted(key, parent=parent, nbytes=size)
        return True

    def _evictable(self, key: bytes) -> bool:
        entry = self._entries[key]
        may_go = not entry.leased and not entry.successors
        self.refusals += not may_go
        return may_go

    def _evict(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._policy.removed(key)
        self._held -= entry.size
        if entry.parent is not None:
            self._entries[entry.parent].successors -= 1


def oracle_hit_tokens(trace: Trace, capacity: int) -> int:
    """What Belady's MIN finds: after each prompt, whatever is needed last goes, of one prompt the end first.

    Exact for blocks of one size; for chunks of different sizes no rule this simple is, but none found more here.
    """
    after: dict[bytes, int] = {}
    upcoming: list[list[int]] = []
    for number in range(len(trace.prompts) - 1, -1, -1):
        keys = trace.prompts[number].keys
        upcoming.append([after.get(key, _NEVER) for key in keys])
        after.update(dict.fromkeys(keys, number))
    upcoming.reverse()
    needed: dict[bytes, int] = {}  # stored key -> the next prompt that has it
    sizes: dict[bytes, int] = {}
    order: list[tuple[int, int, bytes]] = []
    held = hits = 0
    for prompt, following in zip(trace.prompts, upcoming, strict=True):
        for key, tokens in zip(prompt.keys, prompt.tokens, strict=True):
            if key in needed:
                hits += tokens
            elif trace.chained:
                break
        for place, (key, tokens, time) in enumerate(zip(prompt.keys, prompt.tokens, following, strict=True)):
            if key not in needed:
                sizes[key] = 1 if trace.chained else tokens
                held += sizes[key]
            needed[key] = time
            heapq.heappush(order, (-time, -place if trace.chained else 0, key))
        while held > capacity:
            time, _, key = heapq.heappop(order)
            if needed.get(key) == -time:
                del needed[key]
                held -= sizes[key]
    return hits
