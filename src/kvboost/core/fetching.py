"""Loads what a prefill would reuse into memory, before it is opened.

Used by the scheduler, whose thread must not wait for a tier. Invariant: nothing is held or counted here; the prefill
looks up again what is in memory by then.
"""

from __future__ import annotations

from kvboost.core.guarded import joined_loads
from kvboost.core.prefill import ChunkedPrompt
from kvboost.core.prefiller import Prefiller
from kvboost.types import NOTHING_LOADED, Fetched


def fetch(prefiller: Prefiller, prompt: ChunkedPrompt, *, approx: bool) -> Fetched:
    """Bring up the prompt's leading chunks and the end of an earlier prompt; with ``approx``, other chunks too."""
    store, usable = prefiller.store, prompt.usable
    exact, known = store.fetch(prompt.lookup)
    content = NOTHING_LOADED
    if approx:
        first = prefiller.approx.first_wanted(usable, available=min(known, len(usable)))
        if first is not None and first < len(usable):
            content = store.fetch_content(usable, after=first)
    tail = prefiller.stored_tail(prompt, known)
    if tail is not None:
        exact = joined_loads(exact, store.fetch([tail])[0])
    return Fetched(exact, content)
