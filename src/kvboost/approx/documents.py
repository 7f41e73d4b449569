"""Reads documents in company, so that they fit wherever they turn up later.

Called by :meth:`KVBoost.warm_documents`. A document read behind the head and a few others is far closer to
what a later prompt needs than one read alone (docs/results/recompute.md). Each group of documents is one prompt;
the documents that only keep the others company are read, and stored, once more in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.engine.assembly import Assembly

_MAX_IN_COMPANY = 2048  # tokens read as one prompt


def warm_documents(
    documents: Sequence[list[int]],
    *,
    head: list[int],
    company: int,
    parts: Assembly,
    warm: Callable[[list[int], list[int]], int],
    progress: bool,
) -> int:
    """Read those documents that are not stored yet, in company. Returns the number of chunks that were new."""
    limits = [limit for limit in (parts.facts.max_positions, parts.facts.exact_limit) if limit is not None]
    longest = min(limits, default=None)
    fitting = [tokens for tokens in documents if longest is None or len(head) + len(tokens) <= longest]
    if len(fitting) < len(documents):
        warnings.warn(
            f"{len(documents) - len(fitting)} of {len(documents)} documents do not fit behind the head into the "
            f"{longest} tokens that this model reads; they are left out: cut them into parts",
            stacklevel=3,
        )
    documents = fitting
    missing = [not parts.reader.knows(tokens) for tokens in documents]
    groups = groups_in_company(
        documents, missing, head=head, company=company, most_tokens=min([_MAX_IN_COMPANY, *limits])
    )
    new = 0
    with tqdm(total=sum(missing), unit="doc", desc="reading", disable=not progress, delay=2) as bar:
        for tokens, ends, count in groups:
            new += warm(tokens, ends)
            bar.update(count)
    return new


def groups_in_company(
    documents: Sequence[list[int]], missing: Sequence[bool], *, head: Sequence[int], company: int, most_tokens: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Prompts that hold each missing document behind ``company`` others: tokens, boundaries, how many are new in it.

    Each prompt is the head, the ``company`` documents before the new ones (the last ones for the very first), and
    the missing documents that follow while there is room for ``most_tokens``. Nothing stands twice in one prompt. A
    document that fits in no company comes alone behind the head, however long it is.
    """
    count = len(documents)
    index = 0
    while index < count:
        if not missing[index]:
            index += 1
            continue
        room = most_tokens - len(head) - len(documents[index])
        numbers: list[int] = []
        for back in range(min(company, count - 1), 0, -1):
            other = (index - back) % count
            if len(documents[other]) <= room:
                numbers.append(other)
                room -= len(documents[other])
        new = [index]
        for following in range(index + 1, count):
            if not missing[following] or following in numbers or len(documents[following]) > room:
                break
            new.append(following)
            room -= len(documents[following])
        tokens, ends = list(head), [len(head)] if head else []
        for number in [*numbers, *new]:
            tokens += documents[number]
            ends.append(len(tokens))
        yield tokens, ends, len(new)
        index += len(new)
