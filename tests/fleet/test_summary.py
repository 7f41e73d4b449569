"""What a replica holds, in short: sent and read back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import ConfigError, DamagedRecordError
from kvboost.fleet.summary import KeyUpdate, short_keys


@settings(deadline=None)
@given(st.lists(st.integers(1, 2**64 - 1)), st.lists(st.integers(1, 2**64 - 1)), st.booleans())
def test_an_update_is_read_as_it_was_sent(added: list[int], dropped: list[int], whole: bool) -> None:
    update = KeyUpdate(np.array(added, dtype=np.uint64), np.array(dropped, dtype=np.uint64), whole)
    read = KeyUpdate.from_bytes(update.to_bytes())
    assert (read.added.tolist(), read.dropped.tolist(), read.whole) == (added, dropped, whole)


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, 200))
def test_other_bytes_are_refused(noise: bytes, length: int) -> None:
    sent = KeyUpdate(np.array([5, 6], dtype=np.uint64), np.array([7], dtype=np.uint64), whole=False).to_bytes()
    for data in (noise, sent[:length], sent + noise[:7]):
        if data != sent:
            with pytest.raises(DamagedRecordError, match="ask the replica"):
                KeyUpdate.from_bytes(data)


def test_an_update_with_an_empty_key_is_refused() -> None:
    bad = KeyUpdate(np.array([0], dtype=np.uint64), np.empty(0, dtype=np.uint64), whole=False)
    with pytest.raises(DamagedRecordError, match="names no key"):
        KeyUpdate.from_bytes(bad.to_bytes())


def test_a_key_of_zeros_is_a_key() -> None:
    assert short_keys([bytes(32)]).tolist() == [1]


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        short_keys([b"short"])
