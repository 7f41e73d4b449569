"""What every eviction policy must do, whatever order it prefers.

Subclass :class:`EvictionPolicyContract` in a pytest file. Invariant: no rule here names an order, so
that a policy which values size, cost or frequency passes as well as one that values recency.
"""

from __future__ import annotations

import random

from kvboost.extend import EvictionPolicy


def _keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


class EvictionPolicyContract:
    """The rules of :class:`kvboost.extend.EvictionPolicy`. Override :meth:`make_policy`."""

    def make_policy(self) -> EvictionPolicy:
        """A new policy that knows no key."""
        raise NotImplementedError("return the policy under test")

    def policy_with(self, keys: list[bytes]) -> EvictionPolicy:
        """A policy that was told of ``keys``, and that they served one prompt."""
        policy = self.make_policy()
        policy.found([])
        for key in keys:
            policy.inserted(key)
        policy.used(keys)
        return policy

    def test_is_an_eviction_policy(self) -> None:
        """It has every method of the Protocol."""
        assert isinstance(self.make_policy(), EvictionPolicy), "a method of EvictionPolicy is missing"

    def test_an_empty_policy_has_no_victim(self) -> None:
        """None, not an error: a store that holds only what does not fit asks too."""
        assert self.make_policy().victim(lambda key: True) is None, "a victim although nothing was inserted"

    def test_nothing_evictable_means_no_victim(self) -> None:
        """Every block may be leased at once; then nothing may go."""
        policy = self.policy_with(_keys(5))
        assert policy.victim(lambda key: False) is None, "a victim that evictable() did not allow"

    def test_the_victim_is_evictable(self) -> None:
        """Whichever single key may go is the one that is found."""
        keys = _keys(8)
        policy = self.policy_with(keys)
        for allowed in keys:
            victim = policy.victim({allowed}.__contains__)
            assert victim == allowed, f"only {allowed.hex()} may go, got {victim.hex() if victim else None}"

    def test_asking_removes_nothing(self) -> None:
        """The store may ask and then not evict: the key must be there the next time."""
        keys = _keys(4)
        policy = self.policy_with(keys)
        for _ in range(3 * len(keys)):
            assert policy.victim(lambda key: True) in keys, "victim() forgot a key by itself"

    def test_only_stored_keys_are_offered(self) -> None:
        """``evictable`` looks keys up in the store: one that is not there would be an error inside it."""
        keys = _keys(6)
        policy = self.policy_with(keys)
        policy.removed(keys[2])
        policy.found([keys[2], b"never inserted"])
        policy.used([keys[2], b"never inserted"])
        offered: set[bytes] = set()

        def allow_none(key: bytes) -> bool:
            offered.add(key)
            return False

        policy.victim(allow_none)
        assert offered <= set(keys) - {keys[2]}, "evictable() was asked about a key that is not stored"

    def test_a_removed_key_is_never_the_victim(self) -> None:
        """Removing the victim each time empties the policy, every key once."""
        keys = _keys(16)
        policy = self.policy_with(keys)
        gone: list[bytes] = []
        for _ in keys:
            victim = policy.victim(lambda key: True)
            assert victim is not None, f"no victim although {len(keys) - len(gone)} keys are left"
            assert victim not in gone, "a key that was removed came back"
            policy.removed(victim)
            gone.append(victim)
        assert policy.victim(lambda key: True) is None, "a victim although every key was removed"

    def test_a_key_may_come_back(self) -> None:
        """A prompt that was evicted and is read again is stored again under the same key."""
        key = _keys(1)[0]
        policy = self.policy_with([key])
        policy.removed(key)
        policy.inserted(key)
        assert policy.victim(lambda key: True) == key, "a key that was stored again is not found"

    def test_used_with_unknown_keys_is_harmless(self) -> None:
        """A prompt may have been evicted between its reading and the message that it was used."""
        keys = _keys(4)
        policy = self.make_policy()
        for tell in (policy.used, policy.found):
            tell([])
            tell(keys)
            assert policy.victim(lambda key: True) is None, f"{tell.__name__}() inserted a key"
            policy.inserted(keys[0])
            tell(keys)
            policy.removed(keys[0])
            tell(keys)
            assert policy.victim(lambda key: True) is None, f"{tell.__name__}() brought a removed key back"

    def test_the_end_of_a_prompt_is_offered(self) -> None:
        """Where only the last chunk of each prompt may go, as in a store, every prompt goes from its end on."""
        keys = _keys(60)
        policy = self.make_policy()
        parents: dict[bytes, bytes | None] = {}
        for start in range(0, len(keys), 6):
            policy.found([])
            chain = keys[start : start + 6]
            for parent, key in zip([None, *chain], chain, strict=False):
                policy.inserted(key, parent=parent, nbytes=1 + start)
                parents[key] = parent
            policy.used(chain)
            policy.found(chain[:3])
        while parents:
            victim = policy.victim(lambda key: key not in parents.values())
            assert victim in parents, f"no leaf is offered although {len(parents)} keys are stored"
            assert victim not in parents.values(), "the victim still has a successor"
            policy.removed(victim)
            del parents[victim]

    def test_admitting_changes_nothing(self) -> None:
        """Whatever it says of a new block: the victim stays where it is, and the new block is not stored by asking."""
        keys = _keys(6)
        policy = self.policy_with(keys)
        policy.found([])
        victim = policy.victim(lambda key: True)
        assert victim in keys, "no victim although keys are stored"
        answer = policy.admits(b"new", parent=keys[0], nbytes=1, victim=victim)
        assert isinstance(answer, bool), "admits() must say True or False"
        left: set[bytes] = set()
        while (gone := policy.victim(lambda key: True)) is not None:
            left.add(gone)
            policy.removed(gone)
        assert left == set(keys), "asking whether a block is admitted stored or removed one"

    def test_the_same_calls_give_the_same_victims(self) -> None:
        """A policy that draws lots draws the same ones every time."""
        order: list[list[bytes]] = []
        for _ in range(2):
            policy = self.policy_with(_keys(200))
            policy.found(_keys(100)[::3])
            order.append([])
            while (victim := policy.victim(lambda key: True)) is not None:
                policy.removed(victim)
                order[-1].append(victim)
        assert order[0] == order[1], "two policies that were told the same evict in different orders"

    def test_a_long_random_life(self) -> None:
        """After any mix of calls: a victim if and only if an evictable key is stored, and then such a key."""
        keys = _keys(20)
        chooser = random.Random(0)
        policy, stored = self.make_policy(), set[bytes]()
        for _ in range(500):
            key = chooser.choice(keys)
            match chooser.randrange(4):
                case 0 if key not in stored:
                    policy.inserted(key)
                    stored.add(key)
                case 1 if key in stored:
                    policy.removed(key)
                    stored.remove(key)
                case 2:
                    policy.found(chooser.sample(keys, 5))
                case _:
                    policy.used(chooser.sample(keys, 5))
            allowed = set(chooser.sample(keys, 10))
            victim = policy.victim(allowed.__contains__)
            if stored & allowed:
                assert victim in stored & allowed, "the victim is not stored or not evictable"
            else:
                assert victim is None, "a victim although no stored key is evictable"
