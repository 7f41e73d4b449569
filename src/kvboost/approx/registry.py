"""Documents that prompts are searched for, and where they were cut when they were prefilled.

Filled by :mod:`kvboost.approx.documents`, asked by :class:`kvboost.approx.find.ApproxReuse` for every prompt. A chunk
is found only if it is cut at the same tokens, and next to other text a document would be cut elsewhere at its edges.
Invariants: a boundary is given only where at least one chunk of a document stands token by token; a search is
linear in the prompt, however many documents there are; tokens are bounded, the oldest documents go first.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvboost.core.chunking import HASH_WINDOW, window_hashes
from kvboost.core.keys import common_prefix, token_array
from kvboost.extend import TokenArray

_log = logging.getLogger(__name__)
_MAX_TOKENS = 2**22  # with their hashes about 60 MB, in every tenant's registry
_MAX_ALIKE = 8  # documents looked at where many have the same words; the newest
_MIN_VARIETY = 4  # different tokens behind a cut that is looked for: a ruler or a table's edge stands everywhere


@dataclass(frozen=True, eq=False)
class _Document:
    tokens: TokenArray
    cuts: Sequence[int]
    """Ascending, from 0 to its length."""


class _Cut(NamedTuple):
    """A cut in a document."""

    document: _Document
    cut: int


class _Match(NamedTuple):
    """Tokens ``[start, end)`` of a document that stand in a prompt, ``shift`` positions later."""

    document: _Document
    start: int
    end: int
    shift: int

    @property
    def cuts(self) -> Sequence[int]:
        cuts = self.document.cuts
        return cuts[bisect_left(cuts, self.start) : bisect_right(cuts, self.end)]

    @property
    def found(self) -> int:
        """Tokens in whole chunks."""
        return self.cuts[-1] - self.cuts[0] if self.cuts else 0


class DocumentRegistry:
    """The documents of one tenant, by name. Thread-safe."""

    def __init__(self, *, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._documents: OrderedDict[Hashable, _Document] = OrderedDict()
        self._by_hash: dict[int, list[_Cut]] = {}  # by the hash of the first tokens behind each cut
        self._tokens = 0

    def add(self, name: Hashable, tokens: Sequence[int], cuts: Iterable[int]) -> None:
        """Look for these tokens from now on. ``cuts`` are the ends of its chunks. Replaces a document of that name."""
        ids = token_array(tokens)
        document = _Document(ids, sorted({0, *cuts, len(ids)}))
        with self._lock:
            self._drop(name)
            self._documents[name] = document
            self._tokens += len(ids)
            for value, cut in _anchors(document):
                self._by_hash.setdefault(value, []).append(_Cut(document, cut))
            dropped = 0
            while self._tokens > self._max_tokens and len(self._documents) > 1:
                self._drop(next(iter(self._documents)))
                dropped += 1
        if dropped:
            _log.warning("the %d oldest documents are looked for no more: %d tokens are", dropped, self._max_tokens)

    def remove(self, names: Iterable[Hashable]) -> int:
        """Look for these no more. Returns how many there were."""
        with self._lock:
            return sum(self._drop(name) for name in names)

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            self._documents.clear()
            self._by_hash.clear()
            self._tokens = 0

    def boundaries(self, tokens: Sequence[int]) -> list[int]:
        """Where to cut a prompt so that the documents in it have the chunks they were prefilled in, ascending."""
        with self._lock:
            return self._search(token_array(tokens)) if self._by_hash else []

    def _search(self, ids: TokenArray) -> list[int]:
        hashes = window_hashes(ids).tolist()
        ends: list[int] = []
        behind = 0  # the last match
        last = HASH_WINDOW - 1  # of the window that is looked up
        while last < len(hashes):
            start = last - HASH_WINDOW + 1
            found = self._by_hash.get(hashes[last], ())
            matches = [_match(ids, start, cut, behind=behind) for cut in found[-_MAX_ALIKE:]]
            best = max(matches, key=lambda match: match.found, default=None)
            if best is None or best.found < HASH_WINDOW:  # nothing, or the same words for a while
                last += 1
                continue
            ends += [cut + best.shift for cut in best.cuts]
            behind = best.end + best.shift
            last = behind + HASH_WINDOW - 1
        return sorted({end for end in ends if end > 0})

    def _drop(self, name: Hashable) -> bool:
        """The caller holds the lock."""
        document = self._documents.pop(name, None)
        if document is None:
            return False
        self._tokens -= len(document.tokens)
        for value, _ in _anchors(document):
            left = [cut for cut in self._by_hash.get(value, ()) if cut.document is not document]
            if left:
                self._by_hash[value] = left
            else:
                self._by_hash.pop(value, None)
        return True


def _anchors(document: _Document) -> list[tuple[int, int]]:
    """The hash of the first tokens behind each cut, and the cut; not where they are few different ones."""
    hashes = window_hashes(document.tokens)
    return [
        (int(hashes[cut + HASH_WINDOW - 1]), cut)
        for cut in document.cuts
        if cut + HASH_WINDOW <= len(document.tokens)
        and len(set(document.tokens[cut : cut + HASH_WINDOW].tolist())) >= _MIN_VARIETY
    ]


def _match(ids: TokenArray, start: int, found: _Cut, *, behind: int) -> _Match:
    """How far the prompt from ``start`` on, and back to ``behind``, is the document around that cut."""
    document, cut = found
    ahead = common_prefix(ids[start:], document.tokens[cut:])
    back = common_prefix(ids[behind:start][::-1], document.tokens[:cut][::-1])
    return _Match(document, cut - back, cut + ahead, start - cut)
