"""The order of documents that extends a path already served.

Called by :meth:`kvboost.KVBoost.arrange`. A trie holds the orders in which documents stood behind each head.
Invariants: every document is placed once; no order begins with fewer served tokens than the order as sent; memory is
bounded.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_MAX_NODES = 2**16
_MAX_VISITED = 2**12
"""Nodes that one search looks at. It starts from the order as sent, so a search cut short never loses to that."""


@dataclass(frozen=True)
class Order:
    """An order of documents, and how much of it was served before."""

    indexes: tuple[int, ...]
    """For each position the document's index as sent."""
    served_documents: int
    """The leading documents that stood in this order before, behind the same head."""
    served_tokens: int
    """Their tokens."""


class _Node:
    """A document behind the documents of its ancestors."""

    __slots__ = ("children", "key", "parent", "tokens")

    def __init__(self, parent: _Node | None, key: bytes, tokens: int) -> None:
        self.parent, self.key, self.tokens = parent, key, tokens
        self.children: dict[bytes, _Node] = {}


class ServedPaths:
    """The orders that were served, least recently used ones forgotten. Thread-safe."""

    def __init__(self, *, max_nodes: int = _MAX_NODES) -> None:
        self._max_nodes = max_nodes
        self._lock = threading.Lock()
        self._root = _Node(None, b"", 0)
        self._recent: OrderedDict[_Node, None] = OrderedDict()
        """Least recent first. A parent is used whenever a child is, and counts as used later: the first is a leaf."""
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        """The length of each document; least recent first."""

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._root.children.clear()
            self._recent.clear()
            self._tokens.clear()

    def arrange(
        self,
        head: bytes,
        documents: Sequence[bytes],
        *,
        tokens: Callable[[int], int],
        keep_first: int = 0,
        keep_last: int = 0,
    ) -> Order:
        """The order of ``documents`` behind ``head`` that begins with most served tokens; it counts as served now.

        ``head`` and ``documents`` are digests. ``tokens`` gives the length of a document by its index; it is asked only
        for documents not seen before. The first and last few keep their positions. Documents behind the served path
        stay in the order as sent; sorting them by how often they came was tried and gained nothing.
        """
        with self._lock:
            known = [self._tokens.get(key) for key in documents]
        # Not in the lock: to count a document's tokens is to encode it.
        sizes = [tokens(index) if size is None else size for index, size in enumerate(known)]
        with self._lock:
            for key, size in zip(documents, sizes, strict=True):
                self._tokens[key] = size
                self._tokens.move_to_end(key)
            middle = range(keep_first, max(keep_first, len(documents) - keep_last))
            fixed = range(middle.stop, len(documents))
            node = self._root.children.get(head)
            first = list(range(min(keep_first, len(documents))))
            for index in first:
                node = node.children.get(documents[index]) if node is not None else None
            path = [] if node is None else self._longest(node, documents, middle, fixed)
            placed = {*first, *path}
            order = [*first, *path, *(index for index in (*middle, *fixed) if index not in placed)]
            served = self._served(head, [documents[index] for index in order])
            self._record(head, [(documents[index], sizes[index]) for index in order])
            return Order(tuple(order), served, sum(sizes[index] for index in order[:served]))

    def _longest(self, start: _Node, documents: Sequence[bytes], middle: range, fixed: range) -> list[int]:
        """Indexes along the path below ``start`` with most tokens; the order as sent wins a tie."""
        left = Counter(documents[index] for index in middle)
        keys = list(left)
        best, best_tokens = start, 0
        for index in (*middle, *fixed):
            if documents[index] not in best.children:
                break
            best = best.children[documents[index]]
            best_tokens += best.tokens
        stack: list[tuple[_Node, int, int, bool]] = [(start, 0, 0, False)]
        visited = 0
        while stack:
            node, tokens, depth, leaving = stack.pop()
            if leaving:
                left[node.key] += 1
                continue
            visited += 1
            if visited > _MAX_VISITED:
                break
            if 0 < depth <= len(middle):
                left[node.key] -= 1
                stack.append((node, tokens, depth, True))
            if tokens > best_tokens:
                best, best_tokens = node, tokens
            if depth < len(middle):
                following = [key for key in keys if left[key] > 0 and key in node.children]
            else:
                following = [documents[index] for index in fixed[depth - len(middle) :][:1]]
            for key in reversed(following):
                if (child := node.children.get(key)) is not None:
                    stack.append((child, tokens + child.tokens, depth + 1, False))
        path = []
        while best is not start and best.parent is not None:
            path.append(best.key)
            best = best.parent
        return _take(path[::-1], documents, [*middle, *fixed])

    def _served(self, head: bytes, keys: Sequence[bytes]) -> int:
        """How many of the leading documents are a path below ``head``."""
        node, count = self._root.children.get(head), 0
        for key in keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            count += 1
        return count

    def _record(self, head: bytes, path: Sequence[tuple[bytes, int]]) -> None:
        nodes = []
        node = self._root
        for key, tokens in ((head, 0), *path):
            if key not in node.children:
                node.children[key] = _Node(node, key, tokens)
            node = node.children[key]
            nodes.append(node)
        for node in reversed(nodes):  # the head last: it is the most recent
            self._recent[node] = None
            self._recent.move_to_end(node)
        for node in self._overflow():
            assert node.parent is not None
            del node.parent.children[node.key]
        while len(self._tokens) > self._max_nodes:
            self._tokens.popitem(last=False)

    def _overflow(self) -> Iterator[_Node]:
        while len(self._recent) > self._max_nodes:
            yield self._recent.popitem(last=False)[0]


def _take(keys: Sequence[bytes], documents: Sequence[bytes], indexes: Sequence[int]) -> list[int]:
    """For each key an index of it, each index once: the same document may be there twice."""
    places: dict[bytes, list[int]] = {}
    for index in reversed(indexes):
        places.setdefault(documents[index], []).append(index)
    return [places[key].pop() for key in keys]
