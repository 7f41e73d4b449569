"""The default order: the block that is least expected back goes first, and is not let in where others promise more.

Whether a block comes back, and how soon, is learnt while serving (:mod:`kvboost.store.eviction.returns`) for kinds of
blocks: how often it came back so far, after how long as a rule, where in its prompt it stands, and whether that
prompt ended with it. Time is counted in prompts. The victim is the leaf that promises the fewest returns per prompt of
waiting, out of 32 drawn from all leaves by a seeded generator: the same calls give the same victims. A new block that
promises clearly less than the victim is refused, if refusing has paid so far (:class:`Duels`),
and watched from outside: if it comes back, that counts for it. So does the return of its text behind other text, under
another key: a ghost is found by its content too.

O(1) per operation; about 600 bytes per stored key, and 450 per ghost (a key that was evicted and not forgotten:
eight for every stored one in a small store, one for one in a large one).
"""

from __future__ import annotations

import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvboost.store.eviction.returns import INSIDE, Block, Kind, Watch, rate_at

_MOST_IN_DUELS = 1024  # keys in duels, two each
_FADE = 0.98  # of earlier results with each new one: the last fifty or so count
_PAYS = 0.5  # the mean result from which on refusals are made: three in four are right
_DRAWN = 32
_DRAWS = 4  # before every leaf is looked at: blocks under a lease may be drawn
_GHOSTS_EACH, _GHOSTS = 8, 32768  # eight for every stored block; above 32,768 of them, one for every stored block
_WATCH_ALL = 1024  # stored blocks up to which every one is watched; of n times as many, every n-th
_MAX_USES = 5
_CLEARLY = 1.2  # times what a new block promises: a victim that promises more than that keeps its place


class Duels:
    """Whether refusing pays: of each refused block and the one it would have replaced, which is used first.

    Duels are held whether or not refusals are made, so a wrong opinion changes with what is seen. O(1) per call.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._mean = 0.0  # 1: every holder came first

    @property
    def refusing_pays(self) -> bool:
        """Whether holders came first clearly more often than the blocks that would have replaced them."""
        return self._mean > _PAYS

    def start(self, *, newcomer: bytes, holder: bytes) -> None:
        """``newcomer`` seems worth less than ``holder``. No more than one duel at a time for either."""
        if newcomer in self._open or holder in self._open or newcomer == holder:
            return
        self._open[newcomer] = (holder, -1.0)
        self._open[holder] = (newcomer, 1.0)
        while len(self._open) > _MOST_IN_DUELS:
            _, (other, _) = self._open.popitem(last=False)
            del self._open[other]

    def end(self, key: bytes) -> None:
        """``key`` is used: if it is in a duel, it has won."""
        duel = self._open.pop(key, None)
        if duel is not None:
            other, result = duel
            del self._open[other]
            self._mean = _FADE * self._mean + (1 - _FADE) * result


class LeastExpected:
    """Evicts what is least expected back, by what this store has seen of blocks of the same kind."""

    def __init__(self, *, seed: int = 0) -> None:
        self._watch = Watch()
        self._kinds: dict[tuple[int, ...], Kind] = {}
        self._blocks: dict[bytes, Block] = {}
        self._ghosts: OrderedDict[bytes, Block] = OrderedDict()
        self._ghost_of: dict[bytes, bytes] = {}  # content -> the key of its newest ghost
        self._leaves: list[Block] = []
        self._draw = random.Random(seed).random
        self._chosen: bytes | None = None
        self._bar = -1.0  # the rate of the last victim that was drawn
        self._next: Block | None = None  # what it stood behind
        self._admitted: Block | None = None  # about to be inserted
        self._duels = Duels()

    def inserted(
        self, key: bytes, *, parent: bytes | None = None, nbytes: int = 1, content: bytes | None = None
    ) -> None:
        """A block is new, or comes back after its eviction. Its size does not matter: so much stored, so much saved."""
        above = self._blocks.get(parent) if parent is not None else None
        block = self._newcomer(key, content, above)
        self._blocks[key] = block
        if above is not None:
            if not above.children:
                self._drop_leaf(above)
            above.children += 1
        block.parent = above
        self._add_leaf(block)
        self._wait_for(block)

    def found(self, chain: Sequence[bytes]) -> None:
        """One more prompt; these blocks came back with it."""
        factor = self._watch.tick()
        if factor is not None:
            for kind in (self._watch.everything, *self._kinds.values()):
                kind.forget(factor)
        now = self._watch.now
        for key in chain:
            block = self._blocks.get(key)
            if block is not None:
                self._watch.came_back(block)
                self._duels.end(key)
                block.came_back(now)
                block.turned_away = False
                self._wait_for(block)

    def used(self, chain: Sequence[bytes]) -> None:
        """The whole of a prompt: now its end is known, and where its new blocks stand."""
        inside = len(chain) - INSIDE
        for position, key in enumerate(chain):
            block = self._blocks.get(key)
            if block is None or (block.placed and position < inside):
                continue
            if not block.placed:
                block.placed = True
                block.position = position
            block.behind = min(INSIDE, len(chain) - 1 - position)
            self._watch.change_kind(block, self._kind_of(block))

    def removed(self, key: bytes) -> None:
        """Forget ``key``; if it was evicted, its past is kept for a while."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        if block.place >= 0:
            self._drop_leaf(block)
        above, block.parent = block.parent, None
        self._next = None
        if above is not None:
            above.children -= 1
            if not above.children and self._blocks.get(above.key) is above:
                self._add_leaf(above)
                self._next = above
        if key == self._chosen:
            block.children = 0
            self._remember(block)
        self._chosen = None

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Of some leaves the one least expected back. None only if no leaf at all may go."""
        block = self._next
        # A prompt is evicted from its end on: what stood before the last victim is as little expected, as a rule.
        if block is None or block.place < 0 or self._rate(block) > self._bar or not evictable(block.key):
            block = self._drawn(evictable)
        self._chosen = block.key if block is not None else None
        return self._chosen

    def admits(
        self, key: bytes, *, parent: bytes | None, nbytes: int, victim: bytes, content: bytes | None = None
    ) -> bool:
        """Whether a new block promises as much as ``victim``, more or less. If not, it is watched as a ghost is."""
        holder = self._blocks.get(victim)
        if holder is None:
            return True
        block = self._newcomer(key, content, self._blocks.get(parent) if parent is not None else None)
        now, weight = self._watch.now, self._watch.weight
        admitted = _CLEARLY * self._kind_of(block).index(now, weight)[0] >= self._rate(holder)
        if not admitted:
            self._duels.start(newcomer=key, holder=victim)
            admitted = not self._duels.refusing_pays
        if admitted:
            self._admitted = block
        else:
            block.turned_away = True
            self._wait_for(block)
            self._remember(block)
        return admitted

    def _newcomer(self, key: bytes, content: bytes | None, above: Block | None) -> Block:
        """What is known of a block that is not stored, or of its content where it stood elsewhere."""
        block, self._admitted = self._admitted, None
        if block is not None and block.key == key:
            return block
        block = self._ghost(key, content)
        if block is not None:
            self._watch.came_back(block)
            self._duels.end(block.key)
            block.key = key
            block.came_back(self._watch.now)
            block.placed = False
        else:
            every = 1 + len(self._blocks) // _WATCH_ALL
            block = Block(key, content, self._watch.everything, watched=zlib.crc32(key) % every == 0)
            if above is not None and above.turned_away and above.time == self._watch.now:
                # Its beginning was refused before it could be seen itself: it was there too, as a rule.
                block.uses, block.mean, block.turned_away = above.uses, above.mean, True
        if above is not None:
            block.position = above.position + 1
        return block

    def _remember(self, block: Block) -> None:
        self._ghosts[block.key] = block
        if block.content is not None:
            self._ghost_of[block.content] = block.key
        stored = len(self._blocks)
        while len(self._ghosts) > max(stored, min(_GHOSTS_EACH * stored, _GHOSTS)):
            self._forget_content(self._ghosts.popitem(last=False)[1])

    def _ghost(self, key: bytes, content: bytes | None) -> Block | None:
        """Take the ghost of this key; or of this content, which came back behind other text."""
        block = self._ghosts.pop(key, None)
        if block is None and content is not None and content in self._ghost_of:
            block = self._ghosts.pop(self._ghost_of[content])
        if block is not None:
            self._forget_content(block)
        return block

    def _forget_content(self, ghost: Block) -> None:
        if ghost.content is not None and self._ghost_of.get(ghost.content) == ghost.key:
            del self._ghost_of[ghost.content]

    def _drawn(self, evictable: Callable[[bytes], bool]) -> Block | None:
        leaves, draw = self._leaves, self._draw
        count = len(leaves)
        self._next = None
        if count > _DRAWN:
            for _ in range(_DRAWS):
                block = self._least([leaves[int(draw() * count)] for _ in range(_DRAWN)], evictable)
                if block is not None:
                    return block
        return self._least(leaves, evictable)

    def _least(self, blocks: list[Block], evictable: Callable[[bytes], bool]) -> Block | None:
        least = None
        for block in blocks:
            rate = self._rate(block)
            older = least is not None and rate == self._bar and block.time < least.time
            if (least is None or rate < self._bar or older) and evictable(block.key):
                least, self._bar = block, rate
        return least

    def _rate(self, block: Block) -> float:
        now = self._watch.now
        return rate_at(block.kind.index(now, self._watch.weight), now - block.time)

    def _wait_for(self, block: Block) -> None:
        block.time = self._watch.now
        block.kind = self._kind_of(block)
        if block.watched:
            self._watch.start(block)

    def _kind_of(self, block: Block) -> Kind:
        position, uses = block.position, block.uses
        some = uses if uses < _MAX_USES else min(3 + uses.bit_length(), 9)
        away = min((int(block.mean) + 1).bit_length() + 1, 19) // 2 if uses else 0
        where = position if position < 4 else min(position.bit_length() + 1, 9)
        code = (some, block.behind, away, where)
        kind = self._kinds.get(code)
        if kind is None:
            known = self._kind((min(uses, _MAX_USES), block.behind), self._watch.everything)
            kind = self._kind(code, self._kind(code[:3], known))
        return kind

    def _kind(self, code: tuple[int, ...], above: Kind) -> Kind:
        """The kind of this code, made if there is none. Codes of different length never meet."""
        kind = self._kinds.get(code)
        if kind is None:
            kind = self._kinds[code] = Kind(above)
        return kind

    def _add_leaf(self, block: Block) -> None:
        block.place = len(self._leaves)
        self._leaves.append(block)

    def _drop_leaf(self, block: Block) -> None:
        last = self._leaves.pop()
        if last is not block:
            self._leaves[block.place] = last
            last.place = block.place
        block.place = -1
