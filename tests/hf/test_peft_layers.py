"""Adapters that PEFT merges into the weights, in place and without a trace in the tensors."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import HiraConfig, LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from kvboost import KVBoost
from kvboost.core.verify import same_bits
from kvboost.hf import weights
from kvboost.hf.adapters import Adapters
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model
from tests.helpers.packing import pack_all

pytestmark = pytest.mark.filterwarnings("ignore:Already following adapters were merged")

_PROMPT = [(7 * i * i + i) % 61 + 3 for i in range(120)]
_WIDE = {"hidden_size": 256, "intermediate_size": 512}


def _two_adapters(base: Any = None, **settings: Any) -> Any:
    """A model with the adapters first and second, of which the first is active."""
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, **settings}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(base or tiny_model("llama"), LoraConfig(**settings), adapter_name="first")
        model.add_adapter("second", LoraConfig(**settings))
    return model.eval()


def _engine(model: Any) -> KVBoost:
    return KVBoost(model, None, chunk_size=8, chunking="fixed")


@torch.no_grad()
def _plain(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([_PROMPT])).logits[0, -1]
    return logits


def _check(engine: KVBoost, model: Any, *, reused: int = 0) -> torch.Tensor:
    """The engine answers as the model does, and finds KV of this model alone."""
    found = engine.prefill(_PROMPT)
    assert found.reuse.exact_tokens == reused
    plain = _plain(model)
    assert (found.logits - plain).abs().max() <= 1e-4 * plain.abs().max()
    return found.logits


def _same_as_a_new_engine(engine: KVBoost, model: Any) -> torch.Tensor:
    found = engine.prefill(_PROMPT)
    assert found.reuse.exact_tokens == 0
    with _engine(copy.deepcopy(model)) as new:
        assert same_bits(found.logits, new.prefill(_PROMPT).logits)
    return found.logits


def weights_digest(model: Any) -> str:
    """As a new engine would have it."""
    return str(ModelIdentity(model, probe_model(model).layout).snapshot().fields["weights"])


@pytest.mark.parametrize(
    ("settings", "safe"), [({}, False), ({}, True), ({"use_dora": True}, False)], ids=["lora", "safe", "dora"]
)
def test_kv_of_a_merged_adapter_is_not_used_for_another(settings: dict[str, Any], safe: bool) -> None:
    model = _two_adapters(**settings)
    engine = _engine(model)
    model.merge_adapter(["second"], safe_merge=safe)
    under_second = _check(engine, model)
    _check(engine, model, reused=len(_PROMPT) - 1)
    model.unmerge_adapter()
    model.merge_adapter(["first"], safe_merge=safe)
    assert (_check(engine, model) - under_second).abs().max() > 1e-2
    model.merge_adapter(["second"], safe_merge=safe)
    _check(engine, model)


@pytest.mark.parametrize("looked", [False, True])
def test_an_undone_merge_is_another_model(looked: bool) -> None:
    """What is subtracted is not what was added: the last bits of the weights differ."""
    model = _two_adapters()
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    engine, before = _engine(model), weight.detach().clone()
    engine.prefill(_PROMPT)
    place = weight.data_ptr(), weight.grad_fn
    model.merge_adapter(["first"])
    if looked:
        _check(engine, model)
    model.unmerge_adapter()
    assert (weight.data_ptr(), weight.grad_fn) == place, "PEFT now shows what it writes"
    assert not torch.equal(weight, before)
    _same_as_a_new_engine(engine, model)
    _check(engine, model, reused=len(_PROMPT) - 1)


def test_adapters_merged_in_another_order_or_strength_are_another_model() -> None:
    fields: list[dict[str, str]] = []
    for names, scale in ((["first", "second"], 1.0), (["second", "first"], 1.0), (["first"], 1.0), (["first"], 3.0)):
        model = _two_adapters()
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.set_scale("first", scale)
        identity = ModelIdentity(model, probe_model(model).layout)
        model.merge_adapter(names)
        fields.append(dict(identity.snapshot().fields))
        assert identity.snapshot() is identity.snapshot()
    assert len({one["adapter"] for one in fields}) == len(fields)
    assert len({one["weights"] for one in fields}) == len(fields)


def test_the_same_merge_has_the_same_key_under_another_name() -> None:
    def fields(**named: str) -> dict[str, str]:
        model = _two_adapters()
        for old, new in named.items():
            model.add_adapter(new, model.peft_config[old])
            state = {k: v for k, v in model.state_dict().items() if f".{old}." in k}
            model.load_state_dict({k.replace(f".{old}.", f".{new}."): v for k, v in state.items()}, strict=False)
            model.set_adapter(new)
            model.delete_adapter(old)
        model.merge_adapter()
        return dict(ModelIdentity(model.eval(), probe_model(model).layout).snapshot().fields)

    assert fields(first="renamed") == fields()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_packed_again(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    pack_all(monkeypatch)
    model = _two_adapters(tiny_model("llama", dtype=dtype, **_WIDE))
    engine = _engine(model)
    tiles = engine.parts.runner.tiles
    assert tiles is not None
    assert tiles.packed_bytes
    seen = [engine.prefill(_PROMPT).logits]
    for change in (["first"], None, ["second"], ["first"], None):
        model.unmerge_adapter() if change is None else model.merge_adapter(change)
        seen.append(_same_as_a_new_engine(engine, model))
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))


def test_a_merge_that_peft_undoes_within_a_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's layers unmerge themselves in their first forward with adapters disabled."""
    pack_all(monkeypatch)
    model = _two_adapters(tiny_model("llama", **_WIDE))
    engine = _engine(model)
    model.merge_adapter(["second"])
    engine.prefill(_PROMPT)
    with model.disable_adapter():
        found = engine.prefill(_PROMPT)
        plain = _plain(model)
        assert (found.logits - plain).abs().max() <= 1e-4 * plain.abs().max()
        _same_as_a_new_engine(engine, model)  # KV of the step that changed the weights was not stored
        _check(engine, model, reused=len(_PROMPT) - 1)


def test_layers_that_come_with_a_past_are_hashed() -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model, probe_model(model).layout)
    before = identity.snapshot().fields["weights"]
    adapted = _two_adapters(model)
    adapted.merge_adapter(["second"])
    adapted.unmerge_adapter()
    assert identity.snapshot().fields["weights"] != before


def test_a_loaded_adapter_costs_no_hashing_of_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _two_adapters().save_pretrained(tmp_path)
    model = tiny_model("llama")
    identity = ModelIdentity(model, probe_model(model).layout)
    identity.snapshot()
    hashed: list[str] = []
    right = weights.digest_tensor
    monkeypatch.setattr(weights, "digest_tensor", lambda name, t: hashed.append(name) or right(name, t))
    Adapters(model, identity).load("second", str(tmp_path / "second"))
    identity.snapshot()
    assert hashed
    assert all("lora" in name for name in hashed)


def test_an_unloaded_merge_is_seen() -> None:
    model = _two_adapters()
    identity = ModelIdentity(model, probe_model(model).layout)
    before = identity.snapshot()
    model.merge_and_unload(adapter_names=["second"])
    assert not identity.is_current(before)
    assert identity.snapshot().fields["weights"] != before.fields["weights"]


@pytest.mark.parametrize("kind", ["lora", "hira", "tokens"])
def test_every_change_of_weights_by_any_kind_of_layer_is_hashed(kind: str) -> None:
    """They tell of it in different ways, and some put back the very bits that were there."""
    targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
    if kind == "tokens":
        targets["trainable_token_indices"] = [5, 9]
    config = HiraConfig(r=2, **targets) if kind == "hira" else LoraConfig(r=2, **targets)
    model = get_peft_model(tiny_model("llama"), config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if kind in name:
                weight.add_(0.5)
    identity = ModelIdentity(model, probe_model(model).layout)
    found = []
    for change in (model.merge_adapter, model.unmerge_adapter, model.merge_adapter, model.unmerge_adapter):
        before = identity.snapshot()
        change()
        assert not identity.is_current(before)
        found.append(identity.snapshot().fields["weights"])
        assert found[-1] == weights_digest(model)
    assert found[0] != found[1]


def test_a_snapshot_from_the_middle_of_an_unmerge_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _two_adapters()
    identity = ModelIdentity(model, probe_model(model).layout)
    model.merge_adapter(["first"])
    layer = [module for module in model.modules() if isinstance(module, LoraLayer)][-1]
    right, taken = layer.get_delta_weight, []
    monkeypatch.setattr(layer, "get_delta_weight", lambda name: taken.append(identity.snapshot()) or right(name))
    model.unmerge_adapter()
    assert not identity.is_current(taken[0])
    assert identity.snapshot().fields["weights"] == weights_digest(model)


def test_the_version_of_peft_is_in_the_key_of_adapters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for version in ("1", "2"):
        monkeypatch.setattr(peft, "__version__", version)
        for model in (tiny_model("llama"), _two_adapters()):
            found.append(ModelIdentity(model, probe_model(model).layout).snapshot().fields["adapter"])
    assert found[0] == found[2] == "none"
    assert found[1] != found[3]


def unloaded(base: Any, how: str) -> Any:
    adapted = _two_adapters(base)
    if how == "merge_and_unload":
        return adapted.merge_and_unload(adapter_names=["second"])
    adapted.merge_adapter(["second"])
    return adapted.unload()


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter and unload"])
def test_layers_that_come_and_go_between_two_requests_are_seen(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pack_all(monkeypatch)
    model = tiny_model("llama", **_WIDE)
    engine = _engine(model)
    engine.prefill(_PROMPT)
    place = [weight.data_ptr() for weight in model.parameters()]
    assert unloaded(model, how) is model
    assert [weight.data_ptr() for weight in model.parameters()] == place
    _check(engine, model)
    _check(engine, model, reused=len(_PROMPT) - 1)


_BEFORE_PEFT = """
import sys
from kvboost import KVBoost
from kvboost.hf.loading import ModelSource, load_resident
from tests.helpers.models import tiny_model

tiny_model("llama").save_pretrained("model")
used, loaded = (load_resident(ModelSource("./model")) for _ in range(2))
engine = KVBoost(used, None, chunk_size=8, chunking="fixed")
engine.prefill(list(range(3, 60)))
assert "peft" not in sys.modules
from tests.hf import test_peft_layers as tests
found = tests.weights_digest(tests.unloaded(loaded, sys.argv[1]))
tests.unloaded(used, sys.argv[1])
assert engine.prefill(list(range(3, 60))).reuse.exact_tokens == 0
assert tests.weights_digest(used) == found, "a loaded model's digest was made before its merge"
"""


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter and unload"])
def test_merges_from_before_peft_was_seen_are_taken_for_changes(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KVBOOST_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _BEFORE_PEFT, how]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_watched_model_is_copied_and_saved_as_any_other() -> None:
    model = _two_adapters()
    ModelIdentity(model, probe_model(model).layout).snapshot()
    model.merge_adapter(["second"])
    file = io.BytesIO()
    torch.save(model, file)
    assert b"kvboost" not in file.getvalue()
    copied = copy.deepcopy(model)
    copied.unmerge_adapter()
    assert model.get_model_status().merged_adapters == ["second"]
    assert copied.get_model_status().merged_adapters == []
