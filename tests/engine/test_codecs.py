"""An engine that stores KV in fewer bits: what is kept, what is said of it, and who may use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.approx.test_find import HEAD, ONE, QUESTION, THREE, TWO, distance, engine_for, read, text, warm

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]
_LONG = text(12, 400)


@pytest.mark.parametrize(("bits", "near", "ratio"), [(8, 0.05, 3.0), (4, 0.5, 3.2)])
def test_fewer_bits_take_less_room_stay_near_and_are_not_called_bitwise(
    bits: int, near: float, ratio: float, tiny: Tiny, tmp_path: Path
) -> None:
    full = engine_for(tiny("llama"))
    cold = full.prefill(_LONG)
    small = engine_for(tiny("llama"), kv_cache_bits=bits, disk_cache_dir=tmp_path)
    assert distance(small.prefill(_LONG), cold) == 0.0, "nothing was reused yet"
    small.close()
    again = engine_for(tiny("llama"), kv_cache_bits=bits, disk_cache_dir=tmp_path)
    packed = again.prefill(_LONG)
    assert packed.reuse.exact_tokens > 0.9 * len(_LONG)
    assert not packed.reuse.bitwise
    assert 0.0 < distance(packed, cold) < near
    sizes = [engine.cache_stats()["bytes_by_tier"]["memory"] for engine in (full, again)]
    assert sizes[0] / sizes[1] > ratio  # of float32 here, with scales for heads of eight
    again.close()


def test_codecs_never_meet(tiny: Tiny, tmp_path: Path) -> None:
    for bits in (16, 8, 4):
        with engine_for(tiny("llama"), kv_cache_bits=bits, disk_cache_dir=tmp_path) as engine:
            assert engine.prefill(_LONG).reuse.cached_tokens == 0
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as engine:
        assert engine.prefill(_LONG).reuse.bitwise


def test_packed_chunks_can_be_moved(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), kv_cache_bits=8, quality="high", recompute_ratio=0.0, force_approx=True)
    raw = engine_for(tiny("llama"), quality="high", recompute_ratio=0.0, force_approx=True)
    for one in (engine, raw):
        warm(one, HEAD, ONE, TWO, THREE)
    packed, plain = (read(one, HEAD, THREE, ONE, TWO, QUESTION) for one in (engine, raw))
    assert packed.reuse.moved_tokens == plain.reuse.moved_tokens > 0
    assert 0.0 < distance(packed, plain) < 0.05
