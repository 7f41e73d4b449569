"""The documents of an engine: checked, named and encoded for :mod:`kvboost.approx.documents`.

Called by :class:`kvboost.KVBoost`, and imported only there and on demand: non-prefix reuse is optional.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from kvboost.approx.documents import Document
from kvboost.core.keys import token_array
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.hf.prompt import Prompt, PromptEncoder


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
