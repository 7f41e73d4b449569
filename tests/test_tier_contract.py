"""The tier contract: a third party's tier of forty lines passes it, and every rule finds the tier that breaks it."""

from __future__ import annotations

import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from kvboost.extend import Tier
from kvboost.types import BlockInfo, KVBlock, Namespace, PutOutcome, StoreStats
from tests.contracts import TierContract
from tests.test_contracts import broken_rules, rules


class DictTier:
    """What a third party writes: blocks in a dict, the next to go first."""

    name, outlives_process = "dict", False

    def __init__(self, capacity_bytes: int, namespace: Namespace) -> None:
        self.capacity, self.blocks, self.counts = capacity_bytes, dict[bytes, KVBlock](), Counter[str]()
        self.lock = threading.RLock()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        with self.lock:
            found = [[b for b in self.blocks.values() if b.content_key == key][-8:] for key in content_keys]
        return [[BlockInfo(**{n: getattr(b, n) for n in BlockInfo.__slots__}) for b in some] for some in found]

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        for key in keys:
            self.counts["misses" if key not in self.blocks else "hits"] += 1
            yield self.blocks.get(key)

    def store(self, block: KVBlock) -> PutOutcome:
        with self.lock:
            outcome = PutOutcome.PRESENT if block.key in self.blocks else self.make_room(block)
            if outcome is PutOutcome.STORED:
                self.blocks[block.key] = block
            self.counts[outcome.value] += 1
            return outcome

    def make_room(self, block: KVBlock) -> PutOutcome:
        while self.held() + block.nbytes > self.capacity:
            needed = {b.parent_key for b in [*self.blocks.values(), block]}
            victim = next((key for key in self.blocks if key not in needed), None)
            if victim is None or block.nbytes > self.capacity:
                return PutOutcome.REFUSED
            self.evict(victim)
        return PutOutcome.STORED

    def evict(self, key: bytes) -> None:
        del self.blocks[key]
        self.counts["evictions"] += 1

    def held(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    def used(self, chain: Sequence[bytes]) -> None:
        with self.lock:
            for key in reversed([key for key in chain if key in self.blocks]):
                self.blocks[key] = self.blocks.pop(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            for key in keys:
                self.blocks.pop(key, None)

    def clear(self) -> None:
        self.remove(list(self.blocks))

    def stats(self) -> StoreStats:
        with self.lock:
            c, (chunks, held) = self.counts, (len(self.blocks), self.held())
            return StoreStats(
                self.name, chunks, held, self.capacity, c["hits"], c["misses"], 0, c["evictions"], c["refused"], 0
            )

    def flush(self) -> None: ...

    def close(self) -> None: ...


def contract(make: Callable[[int, Namespace], Any]) -> TierContract:
    class Contract(TierContract):
        def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
            return make(capacity_bytes, namespace)  # type: ignore[no-any-return]

    return Contract()


def shared(kind: type[DictTier]) -> Callable[[], Callable[[int, Namespace], DictTier]]:
    """Tiers of a kind that see the same blocks, as if they outlived their process; new ones for every rule."""

    def fresh() -> Callable[[int, Namespace], DictTier]:
        places: defaultdict[Any, dict[bytes, KVBlock]] = defaultdict(dict)

        def make(capacity_bytes: int, namespace: Namespace) -> DictTier:
            tier = kind(capacity_bytes, namespace)
            tier.outlives_process = True
            tier.blocks = places[tier.place(namespace) if hasattr(tier, "place") else namespace]
            return tier

        return make

    return fresh


def test_forty_lines_of_a_third_party_pass() -> None:
    source = inspect.getsource(DictTier)
    lines = [line for line in source.splitlines() if line.strip() and not line.strip().startswith(('"""', "def "))]
    assert len(lines) <= 40, f"{len(lines)} lines besides the signatures"
    assert broken_rules(contract(DictTier)) == set()


def test_a_tier_that_others_share_passes() -> None:
    for rule in rules(TierContract):
        getattr(contract(shared(DictTier)()), rule)()


# One broken tier for every rule


class Nameless(DictTier):
    name = ""


class Reordering(DictTier):
    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        yield from [self.blocks[key] for key in sorted(set(keys)) if key in self.blocks]


class Rounding(DictTier):
    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        for block in super().load(keys):
            yield block and replace(block, tensors=tuple(torch.nan_to_num(t) for t in block.tensors))


class Raising(DictTier):
    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        return iter([self.blocks[key] for key in keys])


class Stuck(DictTier):
    """A load that is given up leaves its mark."""

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        try:
            yield from super().load(keys)
        except GeneratorExit:
            self.blocks.clear()


class Lending(DictTier):
    """Writes over what it lent."""

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for tensor in self.blocks[key].tensors if key in self.blocks else ():
                tensor.zero_()
        super().remove(keys)


class OldestLast(DictTier):
    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        return [found[::-1] for found in super().variants(content_keys)]


class Talkative(DictTier):
    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        found = super().variants(content_keys)
        return [some * 8 if len(some) == 8 else some for some in found]


class Again(DictTier):
    def store(self, block: KVBlock) -> PutOutcome:
        self.blocks.pop(block.key, None)
        return super().store(block)


class Wasteful(DictTier):
    def make_room(self, block: KVBlock) -> PutOutcome:
        if block.nbytes > self.capacity:
            self.blocks.clear()
        return super().make_room(block)


class AtLeastOne(DictTier):
    def make_room(self, block: KVBlock) -> PutOutcome:
        return super().make_room(block) if self.blocks else PutOutcome.STORED


class Overfull(DictTier):
    def make_room(self, block: KVBlock) -> PutOutcome:
        return super().make_room(block) if self.held() > self.capacity else PutOutcome.STORED


class RootFirst(DictTier):
    def make_room(self, block: KVBlock) -> PutOutcome:
        while self.held() + block.nbytes > self.capacity and block.nbytes <= self.capacity:
            victim = next((key for key in self.blocks if key != block.parent_key), None)
            if victim is None:
                return PutOutcome.REFUSED
            self.evict(victim)
        return super().make_room(block)


class Parricide(DictTier):
    def make_room(self, block: KVBlock) -> PutOutcome:
        return super().make_room(replace(block, parent_key=None))


class CountingUses(DictTier):
    def used(self, chain: Sequence[bytes]) -> None:
        self.counts["hits"] += len(chain)


class Hoarding(DictTier):
    def remove(self, keys: Sequence[bytes]) -> None: ...


class Forgetless(DictTier):
    def clear(self) -> None:
        self.remove(list(self.blocks)[1:])


class Flushing(DictTier):
    def flush(self) -> None:
        self.blocks.clear()


class Open(DictTier):
    def place(self, namespace: Namespace) -> bytes:
        return namespace.root


class Private(DictTier):
    def place(self, namespace: Namespace) -> object:
        return object()


class Miscounting(DictTier):
    def evict(self, key: bytes) -> None:
        del self.blocks[key]


class Racing(DictTier):
    """Hands out the block that another thread asked for."""

    last: ClassVar[dict[int, Sequence[bytes]]] = {}

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        self.wanted = keys
        threading.Event().wait(0.0005)
        wanted = self.wanted
        for block in super().load(keys):
            yield self.blocks.get(wanted[0]) if wanted is not keys else block


BROKEN = [
    (Nameless, "test_is_a_tier"),
    (Reordering, "test_what_was_stored_is_loaded"),
    (Rounding, "test_every_dtype_shape_and_field_survives"),
    (Raising, "test_nothing_is_found_in_an_empty_tier"),
    (Stuck, "test_a_load_may_be_given_up"),
    (Lending, "test_blocks_stay_whole_after_they_are_gone"),
    (OldestLast, "test_content_is_found_wherever_it_was_computed"),
    (Talkative, "test_only_a_few_variants_are_named"),
    (Again, "test_the_same_block_twice_is_present"),
    (Wasteful, "test_a_block_larger_than_the_tier_is_refused"),
    (AtLeastOne, "test_a_tier_without_capacity_keeps_nothing"),
    (Overfull, "test_the_byte_budget_is_never_exceeded"),
    (RootFirst, "test_successors_are_evicted_before_what_they_follow"),
    (Parricide, "test_making_room_never_evicts_the_parent"),
    (CountingUses, "test_used_is_no_lookup"),
    (Hoarding, "test_what_was_removed_is_gone"),
    (Forgetless, "test_clear_forgets"),
    (Flushing, "test_flush_loses_nothing"),
    (Open, "test_others_see_nothing"),
    (Private, "test_the_next_process_finds_what_this_one_stored"),
    (Miscounting, "test_the_counters_add_up"),
    (Racing, "test_many_threads"),
]


@pytest.mark.parametrize(("kind", "rule"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_tier_is_found(kind: type[DictTier], rule: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        getattr(contract(shared(kind)()), rule)()


def test_no_rule_is_empty() -> None:
    assert {rule for _, rule in BROKEN} == set(rules(TierContract))
