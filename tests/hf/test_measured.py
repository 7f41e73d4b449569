"""Making an engine is not silent where it takes long, and what it found is found once."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.hf import attention, device_memory, measured, probe, weights
from kvboost.hf.cache import SlabCache
from kvboost.hf.numerics import choose, tiles
from kvboost.hf.runner import ModelRunner
from tests.helpers.models import VOCAB, tiny_model
from tests.helpers.packing import pack_all


@pytest.mark.parametrize("seconds", [0.0, 1.2])
def test_a_bar_is_shown_once_it_takes_over_a_second(
    seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = measured.probe_model

    def slow(model: Any, **given: Any) -> Any:
        time.sleep(seconds)
        return probe(model, **given)

    monkeypatch.setattr(measured, "probe_model", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    found = measured.measure_model(tiny_model("llama").eval(), numerics=None)
    assert found.identity.snapshot().fields["numerics"].endswith(found.numerics.spec)
    shown = capsys.readouterr().err
    assert ("testing how its kernels round (2 of 3" in shown) == (seconds > 1)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_hashing_shows_how_far_it_is_once_it_takes_over_a_second(
    seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = weights.digest_tensor

    def slow(name: str, tensor: torch.Tensor) -> bytes:
        time.sleep(seconds * torch.get_num_threads())
        return digest(name, tensor)

    monkeypatch.setattr(weights, "digest_tensor", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    weights.digest_weights(model := tiny_model("llama", num_hidden_layers=4), weights.weights_by_owner(model)[None])
    assert ("hashing the weights" in capsys.readouterr().err) == (seconds > 0)


def _fields_beside(free: int, patch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The identity of one model, with so many bytes free of 10 GB."""
    found = {"MemAvailable": free // 1024, "memory.max": 10**10, "memory.current": 10**10 - free, "inactive_file": 0}
    patch.setattr(
        device_memory,
        "_number",
        lambda file, pattern: next((value for name, value in found.items() if name in f"{file} {pattern}"), None),
    )
    assert device_memory.memory_available() == free // 1024 * 1024
    made = measured.measure_model(
        tiny_model("llama", hidden_size=256, intermediate_size=512), numerics=None, **settings
    )
    assert made.numerics.tiles is not None
    return made.identity.snapshot().fields, made.numerics.tiles.packed_bytes


def test_free_memory_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server that starts beside its predecessor finds its cache, and its fleet's."""
    pack_all(monkeypatch, anew=False)
    caplog.set_level(logging.INFO, logger="kvboost.hf.numerics")
    alone, packed = _fields_beside(9 * 10**9, monkeypatch)
    assert packed
    [line] = [line for line in caplog.messages if "packed_bytes allows" in line]
    assert f"take {packed / 1e6:.1f} MB" in line
    assert _fields_beside(10**6, monkeypatch) == (alone, packed)


def test_what_may_be_packed_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_all(monkeypatch, anew=False)
    every, packed = _fields_beside(9 * 10**9, monkeypatch)
    some, less = _fields_beside(9 * 10**9, monkeypatch, packed_bytes=packed - 1)
    none, nothing = _fields_beside(9 * 10**9, monkeypatch, packed_bytes=0)
    assert packed > less > nothing == 0
    assert len({fields["numerics"] for fields in (every, some, none)}) == 3


_WIDE = {"hidden_size": 128, "intermediate_size": 256}
_TOKENS = 150


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run to measure a model."""
    found: list[str] = []

    def count(module: Any, name: str) -> None:
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **given: found.append(name) or right(*args, **given))

    for module, name in ((probe, "_check_forward"), (choose, "key_granule"), (choose, "_check"), (tiles, "_choose")):
        count(module, name)
    return found


def _measure(model: Any = None, *, dtype: torch.dtype = torch.float32, **settings: Any) -> measured.Measured:
    if model is None:
        model = tiny_model("llama", dtype=dtype, **_WIDE).eval()
    return measured.measure_model(model, numerics=None, **settings)


def _bits(made: measured.Measured, model: Any) -> list[bytes]:
    """The KV of some text in steps of sizes that no measurement tests."""
    runner, cache = ModelRunner(model, made.numerics.tiles), SlabCache(made.facts.layout, capacity=_TOKENS)
    ids = [(7919 * i + 3) % VOCAB for i in range(_TOKENS)]
    for start, end in ((0, 7), (7, 109), (109, _TOKENS)):
        runner.append(ids[start:end], cache, logits=False)
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in cache.extract(0, _TOKENS)]


def _kept() -> list[Path]:
    return sorted(Path(os.environ["KVBOOST_CACHE_HOME"]).glob("measured/*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_second_start_runs_nothing_and_has_the_same_key_and_bits(
    family: str, dtype: torch.dtype, packed: bool, tested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        pack_all(monkeypatch, anew=False)
    products: list[Any] = []
    right = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: products.append(1) or right(*given))
    first, second = (tiny_model(family, dtype=dtype, **_WIDE).eval() for _ in range(2))
    made = _measure(first)
    assert {"_check_forward", "key_granule", "_check"} <= set(tested)
    assert products
    tested.clear()
    products.clear()
    kept = _measure(second)
    assert (tested, products) == ([], [])
    assert kept.facts == made.facts
    assert kept.identity.snapshot().fields == made.identity.snapshot().fields
    assert kept.numerics.rule.spec == made.numerics.rule.spec
    ours, known = made.numerics.tiles, kept.numerics.tiles
    assert ours is not None
    assert known is not None
    assert (known.choices, known.packed_bytes) == (ours.choices, ours.packed_bytes)
    assert (ours.packed_bytes > 0) == packed
    experts = {pack for name, (_, pack) in known.choices.items() if name.startswith("own:")}
    assert experts == ({packed and dtype == torch.float32} if family == "qwen3_moe" else set())
    assert _bits(kept, second) == _bits(made, first)


def test_sizes_that_a_kept_measurement_lacks_are_tested_when_they_are_wanted() -> None:
    made, kept = _measure(), _measure()
    assert made.numerics.tiles is not None
    assert kept.numerics.tiles is not None
    for name, (sizes, _) in kept.numerics.tiles.choices.items():
        right = made.numerics.tiles.choices[name][0]
        assert sizes.tested == right.tested
        assert [sizes.allows(rows) for rows in (1, 7, 33, 50, 63, 101, 1280)] == [
            right.allows(rows) for rows in (1, 7, 33, 50, 63, 101, 1280)
        ]
        assert len(sizes.tested) > len(right.larger)


def test_a_model_that_was_refused_is_refused_again(tested: list[str]) -> None:
    """What a measurement could not find is no finding."""
    for _ in range(2):
        broken = tiny_model("llama", **_WIDE).eval()
        with torch.no_grad():
            broken.model.norm.weight.fill_(torch.nan)
        with pytest.raises(UnsupportedModelError):
            _measure(broken)
    assert tested == ["_check_forward"] * 2


def _half(whole: str) -> str:
    return whole[: len(whole) // 2]


def _other_granule(whole: str) -> str:
    content = json.loads(whole)
    content["found"]["granule"] *= 2
    return json.dumps(content)


def _of_another_machine(whole: str) -> str:
    content = json.loads(whole)
    content["depends_on"]["numerics"] += "|another"
    return json.dumps({**content, "digest": measured._digest([content["depends_on"], content["found"]])})


@pytest.mark.parametrize(
    "damage", [lambda _: "", lambda _: "[]", lambda _: '{"found": 3}', _half, _other_granule, _of_another_machine]
)
def test_a_damaged_or_foreign_measurement_is_made_anew(damage: Callable[[str], str], tested: list[str]) -> None:
    _measure()
    (file,) = _kept()
    whole = file.read_text()
    file.write_text(damage(whole))
    tested.clear()
    _measure()
    assert "_check" in tested
    assert file.read_text() == whole
    assert file.stat().st_mode & 0o077 == 0


def _threads(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(torch, "get_num_threads", lambda: 3)


def _version(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(torch, "__version__", "1.0")


def _code(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr("kvboost.hf.fingerprint.code_digest", lambda: "other")


def _variable(patch: pytest.MonkeyPatch) -> Any:
    patch.setenv("MKL_DYNAMIC", "FALSE")


def _kernel(patch: pytest.MonkeyPatch) -> Any:
    right = attention.flash
    patch.setattr("kvboost.hf.numerics.choose.flash", lambda *given: right(*given) * (1 + 2**-22))


def _weights(patch: pytest.MonkeyPatch) -> Any:
    return tiny_model("llama", seed=1, **_WIDE).eval()


def _type(patch: pytest.MonkeyPatch) -> Any:
    return tiny_model("llama", dtype=torch.bfloat16, **_WIDE).eval()


def _hook(patch: pytest.MonkeyPatch) -> Any:
    model = tiny_model("llama", **_WIDE).eval()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


def _forward(patch: pytest.MonkeyPatch) -> Any:
    model = tiny_model("llama", **_WIDE).eval()
    right = model.model.forward
    model.model.forward = lambda *args, **given: right(*args, **given)
    return model


@pytest.mark.parametrize("change", [_threads, _version, _code, _variable, _kernel, _weights, _type, _hook, _forward])
def test_a_measurement_of_other_conditions_is_not_used(
    change: Callable[[pytest.MonkeyPatch], Any], tested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _measure()
    tested.clear()
    _measure()
    assert tested == []
    _measure(change(monkeypatch))
    assert "_check_forward" in tested


def test_other_settings_have_a_measurement_of_their_own(tested: list[str]) -> None:
    _measure(packed_bytes=0)
    tested.clear()
    _measure(packed_bytes=1)
    assert "_check_forward" in tested
    tested.clear()
    measured.measure_model(tiny_model("llama", **_WIDE).eval(), numerics="fast", packed_bytes=0)
    assert tested == ["_check_forward"]


def test_a_model_without_tiles_is_told_why_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", attn_implementation="eager", **_WIDE).eval()
    made, kept = _measure(model), _measure(model)
    assert made.numerics == kept.numerics
    assert "eager" in str(kept.numerics.reason)


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv("KVBOOST_CACHE_HOME", str(tmp_path / "blocked"))
    with caplog.at_level(logging.DEBUG, logger="kvboost"):
        _measure()
    assert "cannot be kept" in caplog.text
