"""Named contexts: held against eviction until they are dropped, replaced, or their time is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost import CapacityError, ConfigError, KVBoost

Tiny = Callable[..., Any]
BYTES = 200_000  # a few hundred tokens of the tiny model


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


CONTRACT = text(1, 64)


def read_again(engine: KVBoost, context: list[int], *, others: int = 64, times: int = 1) -> int:
    """How much of a context is not read again, after so much other text that nothing else of before is left.

    Each other text is read so many ``times``: one that comes back is worth more to the store than one that was pinned.
    """
    for seed in range(100, 140):
        for _ in range(times):
            engine.warm(text(seed, others))
    assert engine.cache_stats()["evictions"] > 0
    return engine.prefill([*context, 5, 6]).reuse.exact_tokens


def test_a_context_outlives_other_text(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        engine.warm(CONTRACT)
        assert read_again(engine, CONTRACT) == 0, "the store is too large to show anything"
        pin = engine.save_context("contract", CONTRACT)
        assert (pin.name, pin.tokens) == ("contract", 64)
        assert read_again(engine, CONTRACT) == 64
        assert engine.drop_context("contract")
        assert not engine.drop_context("contract")
        assert engine._store.stats().leased == 0


def test_the_states_of_recurrent_layers_are_held_too(tiny: Tiny) -> None:
    with KVBoost(tiny("qwen3_5_text"), chunk_size=16, cache_bytes=BYTES) as engine:
        engine.save_context("contract", text(1, 300))
        assert read_again(engine, text(1, 300), others=300, times=2) >= 256


def test_a_name_is_given_to_the_newest_prompt(tiny: Tiny) -> None:
    other = text(2, 64)
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        engine.save_context("contract", CONTRACT)
        engine.save_context("contract", other)
        assert read_again(engine, other) == 64
        assert read_again(engine, CONTRACT) == 0
        assert len(engine.pins.listed()) == 1


def test_a_context_is_held_for_its_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    # In this module only: the event loop of a server that runs beside would sleep until the real time comes back.
    monkeypatch.setattr("kvboost.engine.pinning.time", SimpleNamespace(monotonic=lambda: now))
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        engine.save_context("contract", CONTRACT, seconds=60)
        now = 1059.0
        assert len(engine.pins.listed()) == 1
        now = 1060.0
        assert engine.pins.listed() == []
        assert read_again(engine, CONTRACT) == 0


def test_contexts_leave_room_for_others_and_a_refused_one_leaves_the_old_one(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        engine.save_context("contract", CONTRACT)
        refused = 0
        for seed in range(50):
            try:
                engine.save_context(f"more {seed}", text(seed + 10, 64))
            except CapacityError:
                refused += 1
        assert 0 < refused < 50
        assert read_again(engine, CONTRACT) == 64


def test_pins_of_clients_make_room_and_replace_none_of_the_operators(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        for seed in range(8):
            engine.warm(text(seed, 64))
        each = engine.save_context("contract", text(0, 64)).nbytes
        engine.drop_context("contract")
        assert engine.contexts() == []
        capacity = engine._store.stats().capacity_bytes
        most = int(capacity / 4 // each)
        assert 2 <= most < 7, "the sizes show nothing"
        for seed in range(8):
            engine.pins.add(engine.session, text(seed, 64), name=f"client {seed}", client=True)
        assert [pin.name for pin in engine.pins.listed()] == [f"client {seed}" for seed in range(8 - most, 8)]
        engine.save_context("client 7", CONTRACT)
        assert [pin.name for pin in engine.contexts()] == ["client 7"]
        assert len(engine.pins.listed()) == most + 1
        own = int(capacity / 2 // each)
        for seed in range(1, own):
            engine.save_context(f"own {seed}", text(seed + 20, 64))
        assert len(engine.pins.listed()) == len(engine.contexts()) == own, "they go for the operator's"
        assert engine.drop_context("client 7")


def test_the_oldest_pin_of_a_client_goes_whoevers_it_is(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        others = engine.for_tenant("acme")
        for number, tenant in enumerate([engine, *[others] * 7]):
            tenant.warm(text(number, 64))
            engine.pins.add(tenant.session, text(number, 64), name=str(number), client=True)
        held = [(pin.tenant, pin.name) for pin in engine.pins.listed()]
        assert 1 < len(held) < 7
        assert held == [("acme", str(number)) for number in range(8 - len(held), 8)]


def test_a_client_that_asks_for_too_much_takes_nobodys_place(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=BYTES) as engine:
        for number, tokens in enumerate((64, 64, 320)):
            engine.warm(text(number, tokens))
        for number in range(2):
            engine.pins.add(engine.session, text(number, 64), client=True)
        pins = engine.pins.listed()
        with pytest.raises(CapacityError, match="clients' pins may hold"):
            engine.pins.add(engine.session, text(2, 320), client=True)
        assert engine.pins.listed() == pins
        leased = engine._store.stats().leased
        engine.pins.clear()
        assert (leased, engine._store.stats().leased) == (8, 0)


def test_a_tenants_quota_holds_for_its_pins_and_not_for_others(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16, cache_bytes=4 * BYTES, tenant_bytes=BYTES) as engine:
        for name in ("a", "b", "c", "d"):
            view = engine.for_tenant(name)
            for number in range(6):
                view.warm(text(number, 64))
                engine.pins.add(view.session, text(number, 64), name=str(number), client=True)
        pins = engine.pins.listed()
        for name in ("a", "b", "c", "d"):
            held = sum(pin.nbytes for pin in pins if pin.tenant == name)
            assert BYTES / 8 < held <= BYTES / 4


def test_a_restart_finds_it_on_the_disk(tiny: Tiny, tmp_path: Path) -> None:
    place = {"chunk_size": 16, "disk_cache_dir": tmp_path / "cache"}
    with KVBoost(tiny("llama"), **place) as engine:
        engine.save_context("contract", CONTRACT)
    with KVBoost(tiny("llama"), **place) as engine:
        computed: list[int] = []
        hook = engine.model.get_input_embeddings().register_forward_hook(
            lambda layer, ids, out: computed.append(ids[0].numel())
        )
        engine.save_context("contract", CONTRACT)
        hook.remove()
        assert computed == []


def test_tenants_have_contexts_of_their_own_and_clearing_drops_them(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16) as engine:
        acme = engine.for_tenant("acme")
        engine.save_context("contract", CONTRACT)
        acme.save_context("contract", CONTRACT)
        assert len(engine.pins.listed()) == 2
        acme.clear()
        assert [pin.tenant for pin in engine.pins.listed()] == [""]
        assert engine.drop_context("contract")
        acme.save_context("contract", CONTRACT)
        acme.close()
        assert engine.pins.listed() == []


def test_what_cannot_be_held_is_said(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=64) as engine, pytest.raises(ConfigError, match="make it longer"):
        engine.save_context("short", [5])


@pytest.mark.parametrize("seconds", [0, -1, "1h"])
def test_a_time_that_is_none_is_refused(seconds: Any, tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine, pytest.raises(ConfigError, match="is no time to hold a context"):
        engine.save_context("contract", CONTRACT, seconds=seconds)
