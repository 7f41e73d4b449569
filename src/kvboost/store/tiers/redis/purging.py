"""Removes everything of a space, of a tenant or of all from a server, a few chunks in each script.

Used by the Redis tier and by ``kvboost cache``. It follows the ledger's own lists of each space. The database is
scanned only where the ledger was lost, so that there may be values it knows nothing of, and not for every purge: other
programs may have millions of keys there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from kvboost.store.tiers.redis.ledger import Ledger, Page
from kvboost.store.tiers.redis.resp import Link

_AT_ONCE = 64  # chunks in one script: others must get their turn

T = TypeVar("T")


class Ask(Protocol):
    """Does some work over a link."""

    def __call__(self, work: Callable[[Link], T]) -> T | None:
        """What came of it; None if it failed and that was reported."""


def remove_owned(ask: Ask, ledger: Ledger, owner: bytes) -> int:
    """Remove all chunks of ``owner``: a space, a tenant, or ``b"*"``, as the ledger names them. How many there were."""
    removed = 0
    is_whole = ask(ledger.is_whole)
    for space in _found(ask, partial(ledger.spaces, owner=owner)):
        while (count := ask(partial(ledger.purge_some, space=space, limit=_AT_ONCE))) is not None and count > 0:
            removed += count
        is_whole = is_whole and count == 0
    if not is_whole:
        ids = list(_found(ask, partial(ledger.ids, owner=owner)))
        removed += len(ids)
        remove_ids(ask, ledger, ids)
        sweep(ask, ledger)
    if ledger.elsewhere is not None:
        ledger.elsewhere.forget(ledger.values_of(owner))
    return removed


def remove_ids(ask: Ask, ledger: Ledger, ids: Sequence[bytes]) -> None:
    """Remove these chunks."""
    for begin in range(0, len(ids), _AT_ONCE):
        ask(partial(ledger.remove, ids=ids[begin : begin + _AT_ONCE]))


def sweep(ask: Ask, ledger: Ledger) -> None:
    """Remove what lies under the prefix and is not in the ledger, by a scan of the whole database.

    Only where nothing failed is it noted as done; else somebody begins again later.
    """
    lost_at = ask(ledger.lost_at)
    cursor = ask(partial(ledger.sweep, cursor=b"0"))
    while cursor is not None and cursor != b"0":
        cursor = ask(partial(ledger.sweep, cursor=cursor))
    is_whole = cursor is not None
    if ledger.elsewhere is not None:
        for names in ledger.elsewhere.scan(ledger.prefix.strip(b"{}") + b":"):
            if names is None or (names and not ask(partial(ledger.strays, names=names))):
                is_whole = False
    if is_whole and lost_at:
        ask(partial(ledger.swept, lost_at=lost_at))


def _found(ask: Ask, page_of: Callable[..., Page]) -> Iterator[bytes]:
    cursor = b"0"
    while True:
        page = ask(partial(page_of, cursor=cursor))
        if page is None:
            return
        cursor, names = page
        yield from names
        if cursor == b"0":
            return
