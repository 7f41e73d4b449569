"""Names and prefills documents behind other documents, and has later prompts searched for them.

Called by :meth:`KVBoost.add_documents`. The KV of a document prefilled behind the head and a few others is far
closer to what a later prompt needs than that of one prefilled alone (docs/results/recompute.md). Each group of
documents is one prompt. Its context documents are prefilled and stored again in it. Invariant: a document has the same
cuts in its own prompt, in the registry, and where it is asked whether it is stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.approx.find import ApproxReuse
from kvboost.approx.registry import DocumentRegistry
from kvboost.core.keys import token_array
from kvboost.core.session import Session
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.hf.prompt import Prompt, PromptEncoder

MAX_GROUP_TOKENS = 2048
"""Prefilled as one prompt."""


@dataclass(frozen=True)
class Document:
    """A document to be found."""

    name: Hashable
    tokens: list[int]
    cuts: Sequence[int]
    """The ends of its chunks, wherever it stands."""


def named_documents(
    texts: Iterable[Prompt],
    encoder: PromptEncoder,
    chunker: Chunker,
    *,
    ids: Iterable[str] | None,
    key: Callable[[Prompt], Any] | None,
) -> list[Document]:
    """The documents with their names and cuts, in the order of ``key``."""
    given = _listed(texts)
    names = document_names(encoder, given if ids is None else _listed(ids))
    if len(names) != len(given):
        raise ConfigError(f"{len(names)} ids for {len(given)} documents; give one for each")
    if ids is not None and len(set(names)) < len(names):
        raise ConfigError("two documents have the same id; give each its own")
    order = range(len(given)) if key is None else sorted(range(len(given)), key=lambda index: key(given[index]))

    def document(index: int) -> Document:
        tokens, edges = encoder.encode_document(given[index])
        return Document(names[index], tokens, chunker.cut(token_array(tokens), [*edges, len(tokens)]))

    return [document(index) for index in order]


def document_names(encoder: PromptEncoder, ids: Iterable[Prompt]) -> list[Hashable]:
    """The names of documents by their ids, or by themselves where they were added without."""
    return [name if isinstance(name, str) else tuple(encoder.encode(name)) for name in _listed(ids)]


def _listed(items: Iterable[Prompt]) -> list[Prompt]:
    if isinstance(items, str):
        raise ConfigError("documents and their ids come as lists; put this text into one")
    return list(items)


def add_documents(
    documents: Sequence[Document],
    session: Session,
    *,
    head: list[int],
    context_documents: int,
    warm: Callable[[list[int], list[int]], int],
    progress: bool,
) -> int:
    """Register the documents and prefill those not stored yet, each behind others. Returns the number of new chunks.

    ``warm`` prefills the given tokens with the given boundaries.
    """
    max_tokens = session.limits.longest_reused
    known = [document for document in documents if max_tokens is None or len(head) + len(document.tokens) <= max_tokens]
    if len(known) < len(documents):
        warnings.warn(
            f"{len(documents) - len(known)} of {len(documents)} documents do not fit behind the head into the "
            f"{max_tokens} tokens this model accepts; they are skipped: split them",
            stacklevel=3,
        )
    missing = [not stored for stored in session.prefiller.knows((one.tokens, one.cuts) for one in known)]
    lengths = [len(document.tokens) for document in known]
    limit = MAX_GROUP_TOKENS if max_tokens is None else min(MAX_GROUP_TOKENS, max_tokens)
    new = 0
    try:
        with tqdm(total=sum(missing), unit="doc", desc="prefilling", disable=not progress, delay=2) as bar:
            for context, added in plan_groups(
                lengths, missing, head_tokens=len(head), context_documents=context_documents, max_tokens=limit
            ):
                new += warm(*join_group([known[number] for number in [*context, *added]], head=head))
                bar.update(len(added))
    finally:  # not before: a document is cut as on its own, not as another that is much like it
        for document in known:
            registry_of(session).add(document.name, document.tokens, document.cuts)
    return new


def registry_of(session: Session) -> DocumentRegistry:
    """The documents of one tenant."""
    approx = session.prefiller.approx
    assert isinstance(approx, ApproxReuse)
    return approx.documents


def join_group(documents: Iterable[Document], *, head: Sequence[int]) -> tuple[list[int], list[int]]:
    """One prompt of the head and these documents, and where it is cut: where each of them is."""
    tokens, boundaries = list(head), [len(head)] if head else []
    for document in documents:
        boundaries += [len(tokens) + cut for cut in document.cuts]
        tokens += document.tokens
    return tokens, boundaries


def plan_groups(
    lengths: Sequence[int], missing: Sequence[bool], *, head_tokens: int, context_documents: int, max_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Which documents are prefilled in one prompt, by their numbers: those that stand before, and the missing ones.

    The documents before the new ones are those before it in the given order (the last ones for the very first). The
    missing documents that follow come in up to ``max_tokens``. No document appears twice in one prompt. A document
    that fits behind no other follows the head alone, however long it is.
    """
    count = len(lengths)
    index = 0
    while index < count:
        if not missing[index]:
            index += 1
            continue
        left = max_tokens - head_tokens - lengths[index]
        context: list[int] = []
        for back in range(min(context_documents, count - 1), 0, -1):
            other = (index - back) % count
            if lengths[other] <= left:
                context.append(other)
                left -= lengths[other]
        new = [index]
        for following in range(index + 1, count):
            if not missing[following] or following in context or lengths[following] > left:
                break
            new.append(following)
            left -= lengths[following]
        yield context, new
        index += len(new)
