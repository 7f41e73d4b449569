"""The history of traffic: a stream of questions over a pool of passages, everything kept as the engine keeps it.

Questions come in groups. Before any question of a group is measured, there was one request for each of them: behind
most of its passages and some of the others', in an order of its own, without the question itself. Each measured one is
asked for good before the next. Nobody repairs anything meanwhile, so that what is stored does not depend on the
strategies measured. Invariant: the same group gives the same stream.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common.rag import Ids, RagPrompt
from benchmarks.internals import Nothing, repair_with, repairing
from kvboost.engine import KVBoost

GROUP = 6  # questions that share a pool
_OWN = 2 / 3  # of the passages of a first visit


class Stream:
    """What the questions of one group have left in a store."""

    def __init__(self, engine: KVBoost, group: Sequence[RagPrompt]) -> None:
        """Clear the store and make the first visits."""
        self._engine = engine
        self._seen: set[Ids] = set()
        engine.clear()
        for visit in first_visits(group):
            self.ask(visit)

    def ask(self, prompt: RagPrompt) -> None:
        """One request; what it computes is kept."""
        with repairing(self._engine, repair_with(Nothing(), 0.0)):
            self._engine.prefill(prompt.tokens, boundaries=prompt.boundaries)
        self._seen.update(prompt.passages)

    def known(self, prompt: RagPrompt) -> list[bool]:
        """Which passages of a prompt came before."""
        return [passage in self._seen for passage in prompt.passages]


def first_visits(group: Sequence[RagPrompt]) -> list[RagPrompt]:
    """A request for every question, behind most of its passages and some of the others'."""
    rng = random.Random(group[0].question)
    visits = []
    for prompt in rng.sample(group, len(group)):
        pool = [passage for other in group if other is not prompt for passage in other.passages]
        own = max(1, round(_OWN * len(prompt.passages)))
        passages = rng.sample(prompt.passages, own)
        passages += rng.sample(pool, min(len(pool), len(prompt.passages) - own))
        # Another question would do; this one's own would be found again, and it is not what is measured.
        visits.append(replace(prompt, passages=tuple(rng.sample(passages, len(passages))), tail=prompt.line_break))
    return visits
