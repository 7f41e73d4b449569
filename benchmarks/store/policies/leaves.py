"""Which stored blocks have no stored successors, and among those the one with the lowest rank.

Used by the policies of this package. Invariant: a key is offered only while it is stored and none of the keys that
were inserted behind it is, so a store that forbids evicting a block before its successors is never asked in vain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

_SLACK = 64  # outdated heap entries that are not worth a cleaning


class Node:
    """A stored key: its parent, how many stored successors it has, and its rank among the leaves of its heap."""

    __slots__ = ("children", "entry", "key", "nbytes", "parent", "rank", "uses", "where")

    def __init__(self, key: bytes, *, parent: Node | None, nbytes: int) -> None:
        self.key = key
        self.parent = parent
        self.nbytes = nbytes
        self.children = 0
        self.rank = 0.0
        self.entry = 0
        """Number of its one valid entry in the heap: it may have been pushed before with the same rank."""
        self.uses = 0
        """How often it was found; a policy may cap or lower it."""
        self.where: LeafHeap | None = None
        """The heap that offers it whenever it is a leaf."""


class LeafHeap:
    """The nodes of one queue that are leaves, lowest rank first. Outdated entries stay until they come up."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Node]] = []
        self._pushed = 0  # breaks ties by age, and keeps nodes from being compared
        self.nbytes = 0
        """Of every node that belongs here, leaf or not."""
        self.nodes = 0

    def put(self, node: Node, rank: float) -> None:
        """Make ``node`` belong here with ``rank``, wherever it was."""
        if node.where is not self:
            if node.where is not None:
                node.where.nbytes -= node.nbytes
                node.where.nodes -= 1
            node.where = self
            self.nbytes += node.nbytes
            self.nodes += 1
        node.rank = rank
        if not node.children:
            self.offer(node)

    def offer(self, node: Node) -> None:
        """``node`` became a leaf, or its rank changed."""
        self._pushed += 1
        node.entry = self._pushed
        heapq.heappush(self._entries, (node.rank, self._pushed, node))
        if len(self._entries) > 2 * self.nodes + _SLACK:
            self._entries = [entry for entry in self._entries if self._valid(entry)]
            heapq.heapify(self._entries)

    def drop(self, node: Node) -> None:
        """``node`` is stored no longer."""
        node.where = None
        self.nbytes -= node.nbytes
        self.nodes -= 1

    def lowest(self, evictable: Callable[[bytes], bool]) -> Node | None:
        """The leaf of the lowest rank that may go; it stays."""
        refused: list[tuple[float, int, Node]] = []
        found = None
        while self._entries and found is None:
            entry = self._entries[0]
            if not self._valid(entry):
                heapq.heappop(self._entries)
            elif evictable(entry[2].key):
                found = entry[2]
            else:  # leased, as a rule: as many as there are requests under way
                refused.append(heapq.heappop(self._entries))
        for entry in refused:
            heapq.heappush(self._entries, entry)
        return found

    def _valid(self, entry: tuple[float, int, Node]) -> bool:
        _, number, node = entry
        return node.where is self and not node.children and node.entry == number


class Forest:
    """Every stored key with its parent."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}

    def add(self, key: bytes, *, parent: bytes | None, nbytes: int) -> Node:
        """A node for ``key``, behind ``parent`` if that is stored."""
        above = self.nodes.get(parent) if parent is not None else None
        node = self.nodes[key] = Node(key, parent=above, nbytes=nbytes)
        if above is not None:
            above.children += 1
        return node

    def remove(self, key: bytes) -> Node | None:
        """Forget ``key``; its parent may be a leaf now. None if it is not known."""
        node = self.nodes.pop(key, None)
        if node is None:
            return None
        if node.where is not None:
            node.where.drop(node)
        above, node.parent = node.parent, None
        if above is not None:
            above.children -= 1
            if not above.children and above.where is not None:
                above.where.offer(above)
        return node
