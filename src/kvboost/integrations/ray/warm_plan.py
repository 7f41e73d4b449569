"""What a warming run will do, from what is known of the corpus. Pure; needs no Ray.

Used by :mod:`kvboost.integrations.ray.warm`. Invariants: which documents share a prompt does not depend on what is
stored already; every missing document is in exactly one group, or over the budget; the bytes stay within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvboost.approx.documents import plan_groups

_MAX_BLOCKS = 1000  # of Ray Data: progress is seen by blocks


@dataclass(frozen=True)
class WarmPlan:
    """What a run will do, said before it begins."""

    documents: int
    """Of the corpus, without those that are empty or too long."""
    missing: int
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Prompts to prefill: the documents that stand before, and those that the group is for."""
    tokens: int
    """To prefill, the documents that stand before included."""
    nbytes: int
    """To write, at most."""
    seconds: float
    """Estimated, with all actors."""
    over_budget: int
    """Missing documents that are left out."""


class SurveyedDocument(NamedTuple):
    """A document that fits the model."""

    number: int
    """In the corpus."""
    tokens: int
    known: bool
    """Whether the shared tier has all of it."""


@dataclass(frozen=True)
class CorpusSurvey:
    """What the first pass over a corpus found."""

    documents: tuple[SurveyedDocument, ...]
    head_tokens: int
    max_tokens: int
    """Of a prompt."""
    bytes_per_token: int
    tokens_per_second: float
    """Of one actor."""
    unusable: tuple[int, ...] = ()
    """The numbers of documents that are empty or do not fit the model."""

    def plan(self, *, context_documents: int, actors: int, budget_bytes: int | None = None) -> WarmPlan:
        """What is to be prefilled."""
        lengths = [document.tokens for document in self.documents]
        groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        tokens = over = 0
        # As if all were missing: see the module's invariants.
        for context, new in plan_groups(
            lengths,
            [True] * len(lengths),
            head_tokens=self.head_tokens,
            context_documents=context_documents,
            max_tokens=self.max_tokens,
        ):
            missing = sum(not self.documents[number].known for number in new)
            if not missing:
                continue
            own = self.head_tokens + sum(lengths[number] for number in (*context, *new))
            if budget_bytes is not None and (tokens + own) * self.bytes_per_token > budget_bytes:
                over += missing
                continue
            tokens += own
            groups.append((self._indexes(context), self._indexes(new)))
        return WarmPlan(
            documents=len(self.documents),
            missing=sum(not document.known for document in self.documents),
            groups=tuple(groups),
            tokens=tokens,
            nbytes=tokens * self.bytes_per_token,
            seconds=tokens / self.tokens_per_second / actors,
            over_budget=over,
        )

    def _indexes(self, numbers: list[int]) -> tuple[int, ...]:
        return tuple(self.documents[number].number for number in numbers)


def spread(rows: int, *, actors: int, batch_size: int) -> tuple[int, int]:
    """The size of batches and the number of blocks with which every actor gets some of the rows.

    Ray Data gives an actor no less than a batch, whatever its blocks are.
    """
    batch_size = max(1, min(batch_size, rows // actors))
    return batch_size, max(1, min(_MAX_BLOCKS, rows // batch_size))
