"""Whether refusing new blocks pays: of each refused block and the one it would have replaced, which is used first.

Used by :mod:`kvboost.store.eviction.expected`. Duels are held whether or not refusals are made, so a wrong opinion
changes with what is seen. O(1) per call; at most 512 duels at a time, about 200 bytes each.
"""

from __future__ import annotations

from collections import OrderedDict

_MOST = 1024  # keys in duels, two each
_FADE = 0.98  # of earlier results with each new one: the last fifty or so count
_PAYS = 0.5  # the mean result from which on refusals are made: three in four are right


class Duels:
    """Pairs of keys that are compared by their next use."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._mean = 0.0  # 1: every holder came first

    @property
    def refusing_pays(self) -> bool:
        """Whether holders came first clearly more often than the blocks that would have replaced them."""
        return self._mean > _PAYS

    def start(self, *, newcomer: bytes, holder: bytes) -> None:
        """``newcomer`` seems worth less than ``holder``. No more than one duel at a time for either."""
        if newcomer in self._open or holder in self._open or newcomer == holder:
            return
        self._open[newcomer] = (holder, -1.0)
        self._open[holder] = (newcomer, 1.0)
        while len(self._open) > _MOST:
            _, (other, _) = self._open.popitem(last=False)
            del self._open[other]

    def end(self, key: bytes) -> None:
        """``key`` is used: if it is in a duel, it has won."""
        duel = self._open.pop(key, None)
        if duel is not None:
            other, result = duel
            del self._open[other]
            self._mean = _FADE * self._mean + (1 - _FADE) * result
