"""Reads documents in company, so that they fit wherever they turn up later.

Called by :meth:`KVBoost.warm_documents`. A document read behind the head and a few others is far closer to
what a later prompt needs than one read alone (docs/results/repair.md), and costs hardly more: each group of
documents is one growing prompt, of which only the newest document is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.engine.assembly import Assembly

_MOST_IN_COMPANY = 2048  # tokens read as one prompt


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
    missing = [tokens for tokens in documents if not parts.reader.knows(tokens)]
    limits = [limit for limit in (parts.facts.max_positions, parts.facts.exact_limit) if limit is not None]
    groups = groups_in_company(missing, head=head, company=company, most_tokens=min([_MOST_IN_COMPANY, *limits]))
    new = 0
    with tqdm(total=len(missing), unit="doc", desc="reading", disable=not progress, delay=2) as bar:
        for tokens, ends, count in groups:
            new += warm(tokens, ends)
            bar.update(count)
    return new


def groups_in_company(
    documents: Sequence[list[int]], *, head: Sequence[int], company: int, most_tokens: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Prompts that hold each document behind ``company`` others: tokens, boundaries, and how many are new in it.

    Each prompt is the head, the ``company`` documents before the new ones (those after them for the very first),
    and new documents while there is room for ``most_tokens``. A document that fits in no company comes alone
    behind the head, however long it is.
    """
    index = 0
    while index < len(documents):
        before = documents[max(0, index - company) : index]
        if not before:
            before = documents[index + 1 : index + 1 + company]
        parts = [list(head)] if head else []
        for other in before:
            if sum(map(len, parts)) + len(other) + len(documents[index]) <= most_tokens:
                parts.append(other)
        new = 0
        while index + new < len(documents):
            document = documents[index + new]
            if new and sum(map(len, parts)) + len(document) > most_tokens:
                break
            parts.append(document)
            new += 1
        tokens: list[int] = []
        ends: list[int] = []
        for part in parts:
            tokens.extend(part)
            ends.append(len(tokens))
        yield tokens, ends, new
        index += new
