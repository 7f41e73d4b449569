"""Prefills documents behind other documents, so that their KV fits wherever they turn up later.

Called by :meth:`KVBoost.warm_documents`. A document prefilled behind the head and a few others is far closer to what a
later prompt needs than one prefilled alone (docs/results/recompute.md). Each group of documents is one prompt; the
documents that only stand before the others are prefilled, and stored, once more in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.core.session import Session

_MAX_GROUP_TOKENS = 2048  # prefilled as one prompt


def warm_documents(
    documents: Sequence[list[int]],
    *,
    head: list[int],
    context_documents: int,
    session: Session,
    warm: Callable[[list[int], list[int]], int],
    progress: bool,
) -> int:
    """Prefill those documents that are not stored yet, each behind others. Returns how many chunks were new.

    ``warm`` prefills tokens with boundaries.
    """
    limits = [limit for limit in (session.limits.max_positions, session.limits.exact_limit) if limit is not None]
    max_tokens = min(limits, default=None)
    fitting = [tokens for tokens in documents if max_tokens is None or len(head) + len(tokens) <= max_tokens]
    if len(fitting) < len(documents):
        warnings.warn(
            f"{len(documents) - len(fitting)} of {len(documents)} documents do not fit behind the head into the "
            f"{max_tokens} tokens that this model takes; they are left out: cut them into parts",
            stacklevel=3,
        )
    missing = [not session.prefiller.knows(tokens) for tokens in fitting]
    limit = _MAX_GROUP_TOKENS if max_tokens is None else min(_MAX_GROUP_TOKENS, max_tokens)
    new = 0
    with tqdm(total=sum(missing), unit="doc", desc="reading", disable=not progress, delay=2) as bar:
        for tokens, ends, count in group_documents(
            fitting, missing, head=head, context_documents=context_documents, max_tokens=limit
        ):
            new += warm(tokens, ends)
            bar.update(count)
    return new


def group_documents(
    documents: Sequence[list[int]],
    missing: Sequence[bool],
    *,
    head: Sequence[int],
    context_documents: int,
    max_tokens: int,
) -> Iterator[tuple[list[int], list[int], int]]:
    """Prompts that hold each missing document behind ``context_documents`` others: tokens, boundaries, new documents.

    Each prompt is the head, the documents before the new ones (the last ones for the very first), and the missing
    documents that follow, up to ``max_tokens``. Nothing stands twice in one prompt. A document that fits behind no
    other comes alone behind the head, however long it is.
    """
    count = len(documents)
    index = 0
    while index < count:
        if not missing[index]:
            index += 1
            continue
        left = max_tokens - len(head) - len(documents[index])
        numbers: list[int] = []
        for back in range(min(context_documents, count - 1), 0, -1):
            other = (index - back) % count
            if len(documents[other]) <= left:
                numbers.append(other)
                left -= len(documents[other])
        new = [index]
        for following in range(index + 1, count):
            if not missing[following] or following in numbers or len(documents[following]) > left:
                break
            new.append(following)
            left -= len(documents[following])
        tokens, ends = list(head), [len(head)] if head else []
        for number in [*numbers, *new]:
            tokens += documents[number]
            ends.append(len(tokens))
        yield tokens, ends, len(new)
        index += len(new)
