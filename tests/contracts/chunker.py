"""What every chunker must do, wherever it likes to cut.

Subclass :class:`ChunkerContract` in a pytest file. The rule that matters most is that a cut looks back
only: where it is broken, the same text gets other keys as soon as something else follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvboost.errors import ConfigError
from kvboost.extend import Chunker, TokenArray


class ChunkerContract:
    """The rules of :class:`kvboost.extend.Chunker`. Override :meth:`make_chunker`."""

    def make_chunker(self) -> Chunker:
        """The chunker under test; the same parameters in every call."""
        raise NotImplementedError("return the chunker under test")

    def texts(self) -> Iterator[TokenArray]:
        """Token sequences to cut, long enough for several chunks. Read-only: a chunker has no side effects."""
        length = max(300, 6 * self.make_chunker().min_tokens)
        source = np.random.default_rng(0)
        phrases = np.tile(source.integers(0, 50_000, 37), length // 37 + 1)[:length]
        for ids in (
            source.integers(0, 50_000, length),
            source.integers(0, 2**32, length),
            source.integers(0, 3, length),
            phrases,
            np.zeros(length),  # one token for ever: a rule that waits for a rare event must still be bounded
            np.full(length, 2**32 - 1),
            source.integers(0, 50_000, 1),
            np.zeros(0),
        ):
            tokens = ids.astype(np.uint32)
            tokens.flags.writeable = False
            yield tokens

    def cases(self) -> Iterator[tuple[TokenArray, list[int]]]:
        """Texts with a caller's boundaries: none, scattered, crowded, at both ends."""
        source = np.random.default_rng(1)
        for tokens in self.texts():
            n = len(tokens)
            scattered = sorted({int(b) for b in source.integers(1, n + 1, 5)}) if n else []
            crowded = [b for b in (1, 2, 3, n // 2, n // 2 + 1) if 0 < b <= n]
            for boundaries in ([], scattered, sorted(set(crowded)), [0, n]):
                yield tokens, boundaries

    def test_is_a_chunker(self) -> None:
        """It has every member of the Protocol, and chunks are not empty."""
        chunker = self.make_chunker()
        assert isinstance(chunker, Chunker), "a member of Chunker is missing"
        assert chunker.min_tokens >= 1, f"min_tokens is {chunker.min_tokens}; a chunk has at least one token"

    def test_ends_ascend_within_the_text(self) -> None:
        """No chunk is empty, none reaches past the text."""
        chunker = self.make_chunker()
        for tokens, boundaries in self.cases():
            ends = chunker.cut(tokens, boundaries)
            assert all(a < b for a, b in pairwise([0, *ends])), f"ends do not ascend from 1: {ends}"
            assert not ends or ends[-1] <= len(tokens), f"end {ends[-1]} is past the text's {len(tokens)} tokens"

    def test_every_boundary_is_an_end(self) -> None:
        """A caller who marks a document's start gets a chunk that starts there. 0 is no end of anything."""
        chunker = self.make_chunker()
        for tokens, boundaries in self.cases():
            missing = {b for b in boundaries if b > 0} - set(chunker.cut(tokens, boundaries))
            assert not missing, f"boundaries {sorted(missing)} are not ends"

    def test_equal_prefixes_have_equal_cuts(self) -> None:
        """What follows a text does not change where it is cut: neither tokens nor boundaries."""
        chunker = self.make_chunker()
        source = np.random.default_rng(2)
        for tokens, boundaries in self.cases():
            whole = chunker.cut(tokens, boundaries)
            # The places next to a cut are where a rule that looks ahead gives itself away.
            near = [t for end in whole[:20] for t in (end - 1, end, end + 1) if t <= len(tokens)]
            for t in {0, len(tokens), *near, *(int(t) for t in source.integers(0, len(tokens) + 1, 20))}:
                part = chunker.cut(tokens[:t], [b for b in boundaries if b <= t])
                expected = [end for end in whole if end <= t]
                assert part == expected, f"the first {t} tokens alone are cut at {part}, with more behind at {expected}"

    def test_chunks_have_at_least_min_tokens(self) -> None:
        """Only a caller's boundary may end a chunk early."""
        chunker = self.make_chunker()
        for tokens, boundaries in self.cases():
            for start, end in pairwise([0, *chunker.cut(tokens, boundaries)]):
                assert end in boundaries or end - start >= chunker.min_tokens, (
                    f"chunk {start}..{end} is shorter than min_tokens={chunker.min_tokens} and no boundary ends it"
                )

    def test_chunks_have_at_most_max_tokens(self) -> None:
        """For a chunker that declares ``max_tokens``: no chunk and no tail is longer."""
        chunker = self.make_chunker()
        longest: int | None = getattr(chunker, "max_tokens", None)
        if longest is None:
            return
        for tokens, boundaries in self.cases():
            for start, end in pairwise([0, *chunker.cut(tokens, boundaries), len(tokens)]):
                assert end - start <= longest, f"{start}..{end} is longer than max_tokens={longest}"

    def test_calls_leave_no_state(self) -> None:
        """The same call gives the same cuts, whatever was cut in between."""
        chunker, cases = self.make_chunker(), list(self.cases())
        first = [chunker.cut(tokens, boundaries) for tokens, boundaries in cases]
        again = [chunker.cut(tokens, boundaries) for tokens, boundaries in reversed(cases)]
        assert first == again[::-1], "the second cut of a text differs from the first"

    def test_equal_spec_means_equal_cuts(self) -> None:
        """Two chunkers made alike share keys in the cache, so they must agree; using one changes no name."""
        one, other = self.make_chunker(), self.make_chunker()
        spec = one.spec
        assert spec, "spec is empty: it could not tell this rule from another"
        assert spec == other.spec, f"made alike, named differently: {spec!r} and {other.spec!r}"
        for tokens, boundaries in self.cases():
            assert one.cut(tokens, boundaries) == other.cut(tokens, boundaries), f"two {spec!r} cut differently"
        assert one.spec == spec, f"spec changed from {spec!r} to {one.spec!r} by cutting"

    def test_a_boundary_outside_the_text_is_refused(self) -> None:
        """A caller's mistake is named, not rounded to something that seems to work."""
        chunker = self.make_chunker()
        for tokens in self.texts():
            for bad in (-1, len(tokens) + 1):
                assert _refuses(chunker, tokens, [bad]), f"boundary {bad} of {len(tokens)} tokens: no ConfigError"


def _refuses(chunker: Chunker, tokens: TokenArray, boundaries: Sequence[int]) -> bool:
    try:
        chunker.cut(tokens, boundaries)
    except ConfigError:
        return True
    return False
