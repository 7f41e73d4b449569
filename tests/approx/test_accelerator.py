"""What non-prefix reuse asks of an accelerator, counted on simulated ones: nothing per layer, nothing per chunk."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.approx.probe import probe_reposition
from kvboost.approx.recompute import RecomputeRunner
from kvboost.approx.reposition import Move
from kvboost.approx.spread import Spread
from kvboost.hf.cache import SlabCache, layout_of, stock_cache
from kvboost.hf.runner import ModelRunner
from tests.helpers.devices import Devices, host, on_device, spread
from tests.helpers.models import tiny_model

_CHUNK = 16


def _text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def _model(*, layers: int, devices: int, **options: Any) -> Any:
    """A model on simulated devices, its layers spread evenly over them, as ``device_map`` would."""
    model = tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=4096, **options)
    return spread(model, layers=layers, devices=devices)


def _engine(model: Any, **options: Any) -> KVBoost:
    settings: dict[str, Any] = {"chunk_size": _CHUNK, "chunking": "fixed", "quality": "high"}
    settings |= {"host_cache_bytes": 0, **options}  # simulated devices have no pinned memory
    if settings["quality"] != "exact":
        settings |= {"force_approx": True, "recompute_ratio": 0.2}
    return KVBoost(model, None, **settings)


def _moved(engine: KVBoost, chunks: int) -> Any:
    """Prefill a text, then the same text behind another beginning."""
    text = _text(1, _CHUNK * chunks)
    engine.prefill(_text(2, _CHUNK) + text)
    yield
    yield engine.prefill(_text(3, 2 * _CHUNK) + text + _text(4, 5))


def _run(*, layers: int, chunks: int, devices: int = 1, **options: Any) -> tuple[Any, Counter[str]]:
    model = _model(layers=layers, devices=devices)
    with Devices() as seen:
        engine = _engine(model, **options)
        steps = _moved(engine, chunks)
        next(steps)
        seen.events.clear()
        result = next(steps)
        assert result.reuse.moved_tokens == _CHUNK * chunks
        return result, seen.counts


@pytest.mark.parametrize(("strategy", "bits"), [("auto", 16), ("cacheblend", 16), ("none", 8), ("auto", 4)])
def test_copies_and_waits_depend_on_neither_layers_nor_chunks(strategy: str, bits: int) -> None:
    options = {"recompute_strategy": strategy, "kv_cache_bits": bits}
    _, few = _run(layers=4, chunks=4, **options)
    _, deep = _run(layers=8, chunks=4, **options)
    _, long = _run(layers=4, chunks=16, **options)
    for kind in ("upload", "wait", "download"):
        assert few[kind] == deep[kind] == long[kind], kind
    assert few["upload"] <= 20
    assert few["wait"] <= 4
    if bits == 16:
        assert long["launch"] == few["launch"]


def test_an_accelerator_gets_the_numbers_of_the_cpu() -> None:
    steps = _moved(_engine(tiny_model("llama", num_hidden_layers=6, max_position_embeddings=4096)), 8)
    next(steps)
    right = next(steps)
    for devices in (1, 2):
        found, _ = _run(layers=6, chunks=8, devices=devices)
        assert found.reuse.recomputed_tokens == right.reuse.recomputed_tokens
        assert found.reuse.error_estimate == pytest.approx(right.reuse.error_estimate, rel=1e-3)
        assert (host(found.logits) - right.logits).abs().max() <= 1e-4 * right.logits.abs().max()


def _repaired_over_two_devices(layers: int) -> Counter[str]:
    """What looking at the attention and recomputing a few positions takes, with a layer that drops some."""
    model = _model(layers=layers, devices=2)
    tokens = _text(1, 120)
    with Devices() as seen:
        layout = _layout(model)
        repositioner, runner = probe_reposition(model, layout), ModelRunner(model)
        cache = SlabCache(layout, capacity=len(tokens))
        runner.append(tokens[:112], cache, logits=False)
        recompute = RecomputeRunner(runner)
        span_ids = torch.zeros(112, dtype=torch.long)

        def drop(layer: int, positions: torch.Tensor, changes: Any) -> torch.Tensor | None:
            return torch.arange(0, len(positions), 2) if layer == layers // 2 + 1 else None

        def work() -> None:
            known = torch.ones(112, dtype=torch.bool)
            recompute.attention_to(tokens[112:], cache, known=known, layers=range(1, layers))
            spread = partial(Spread, repositioner, span_ids=span_ids)
            recompute.recompute_positions(
                tokens[:112], cache, list(range(0, 112, 4)), logits=False, choose=drop, watch=[0], spread=spread
            )

        return seen.during(work)


def test_two_devices_get_each_thing_once() -> None:
    """Masks, angles and positions go to the second device once, not once for each of its layers."""
    few, deep = _repaired_over_two_devices(4), _repaired_over_two_devices(12)
    for kind in ("transfer", "upload", "wait"):
        assert few[kind] == deep[kind], kind
    assert few["transfer"]
    assert not few["wait"]


@pytest.mark.parametrize(("numerics", "exact"), [("bitwise", 96), (None, 100)])
def test_exact_reuse_over_two_devices(numerics: str | None, exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid a prompt resumes with the bits of a cold run; by default to the token, up to rounding."""
    monkeypatch.setattr("kvboost.hf.numerics.choose._GRID_ELSEWHERE", 16)
    model = _model(layers=6, devices=2)
    text = _text(1, 100)
    with Devices():
        engine = _engine(model, quality="exact", numerics=numerics)
        engine.prefill(text)
        warm = engine.prefill([*text, 5, 6, 7])
        engine.clear()
        cold = engine.prefill([*text, 5, 6, 7])
        assert cold.reuse.exact_tokens == 0
        assert (warm.reuse.exact_tokens, warm.reuse.bitwise) == (exact, numerics == "bitwise")
        assert {spec.device.index for spec in warm.cache.layout.slots} == {0, 1}
        assert torch.allclose(host(warm.logits), host(cold.logits), rtol=0, atol=1e-5)
        assert torch.equal(host(warm.logits), host(cold.logits)) or not warm.reuse.bitwise


def _layout(model: Any) -> Any:
    cache = stock_cache()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9).view(1, -1).to("cuda:0"), past_key_values=cache, use_cache=True)
    return layout_of(cache)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("source", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_rotated_together(
    gap: int, source: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks cost what one costs, and each lands as it does alone; those on the host are copied there once."""
    model = _model(layers=2, devices=1, dtype=dtype)
    with Devices() as seen:
        layout = _layout(model)
        repositioner = probe_reposition(model, layout)
        blocks = [
            tuple(
                on_device(torch.randn(len(slots), spec.heads, 8, spec.dim).to(dtype), source) for spec, slots in groups
            )
            for groups in [list(layout.groups.items())] * 12
        ]
        # The last two stand where they stood.
        moves = [Move(block, 30 + (8 + gap) * i, 50 + (8 + gap) * i) for i, block in enumerate(blocks[:10])]
        moves += [Move(block, 300 + (8 + gap) * i, 300 + (8 + gap) * i) for i, block in enumerate(blocks[10:])]
        together, alone = (SlabCache(layout, capacity=512, batch=2) for _ in range(2))  # zeroed
        counts = seen.during(lambda: repositioner.place(together, moves, row=1))
        fewer = seen.during(lambda: repositioner.place(together, [*moves[:2], *moves[10:]], row=1))
        assert counts == fewer
        assert counts["upload"] <= 5
        assert not counts["wait"]
        for move in moves:
            repositioner.place(alone, [move], row=1)
        assert all(torch.equal(host(a), host(b)) for a, b in zip(together.slabs, alone.slabs, strict=True))
        size = sum(tensor.numel() * tensor.element_size() for tensor in blocks[0])
        monkeypatch.setattr("kvboost.approx.reposition._BATCH_BYTES", 3 * size)
        for slab in together.slabs:
            slab.zero_()
        repositioner.place(together, moves, row=1)
        assert all(torch.equal(host(a), host(b)) for a, b in zip(together.slabs, alone.slabs, strict=True))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_tiers_give_back_what_was_packed_on_a_device(bits: int, devices: int, tmp_path: Path) -> None:
    """A block that comes from disk is on the host, and its shapes are checked there."""
    model = _model(layers=4, devices=devices)
    options: dict[str, Any] = {"kv_cache_bits": bits, "disk_cache_dir": tmp_path, "quality": "exact"}
    text = _text(1, 100)
    with Devices():
        with _engine(model, **options) as engine:
            engine.prefill(text)
            from_memory = engine.prefill(text)
            assert set(from_memory.reuse.tiers) == {"memory"}
            logits = host(from_memory.logits)
        with _engine(model, **options) as engine:
            again = engine.prefill(text)
            assert set(again.reuse.tiers) == {"disk"}
            assert again.reuse.exact_tokens == len(text) - 1
            assert torch.equal(host(again.logits), logits)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_no_device_without_streams_gets_64_bit_floats_or_pinned_memory(bits: int) -> None:
    """MPS refuses the first; the second would be in the memory that it has already."""
    model = _model(layers=4, devices=1)
    with Devices() as seen:
        engine = _engine(model, kv_cache_bits=bits)
        *_, result = _moved(engine, 4)
        assert result.reuse.moved_tokens
        engine.generate_batch([_text(5, 40), _text(6, 20)], max_new_tokens=3)
        assert seen.of("launch")
        assert not seen.of("float64")
        assert not seen.of("pin")
