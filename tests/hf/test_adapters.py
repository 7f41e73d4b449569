from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter

from kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.hf.adapters import AS_SET, Adapters
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import probe_model
from tests.helpers.exactness import assert_same_bits
from tests.helpers.models import tiny_model

_IDS = torch.tensor([list(range(3, 20))])
_PROMPT = list(range(3, 40))


def _adapted(seed: int, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
        return get_peft_model(tiny_model("llama"), config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders of two adapters that differ, and of one with an output layer of its own."""
    root: Path = tmp_path_factory.mktemp("adapters")
    _adapted(1).save_pretrained(root / "first")
    _adapted(2).save_pretrained(root / "second")
    model = _adapted(3, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1.0)
    model.save_pretrained(root / "with-head")
    return lambda name: str(root / name)


@pytest.fixture(params=["PeftModel", "Transformers"])
def model(request: pytest.FixtureRequest) -> Any:
    """Both kinds of models with adapters; the wrapped one brings one along, called default."""
    if request.param == "Transformers":
        return tiny_model("llama")
    wrapped = _adapted(0)
    wrapped.base_model.disable_adapter_layers()
    return wrapped


def _adapters(model: Any) -> Adapters:
    return Adapters(model, ModelIdentity(model, probe_model(model).layout))


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(_IDS).logits
    return logits


def test_a_loaded_adapter_waits_to_be_chosen(model: Any, saved: Callable[[str], str]) -> None:
    plain = _logits(model)
    adapters = _adapters(model)
    for name in ("first", "second", "with-head"):
        adapters.load(name, saved(name))
        assert not model.training
        assert not any(module.training for module in model.modules())
    assert set(adapters.names) >= {"first", "second", "with-head"}
    assert adapters.active == ()
    assert torch.equal(_logits(model), plain)


@pytest.mark.parametrize("name", ["first", "with-head"])
def test_a_chosen_adapter_is_the_one_that_was_saved(model: Any, saved: Callable[[str], str], name: str) -> None:
    from peft import PeftModel

    wanted = _logits(PeftModel.from_pretrained(tiny_model("llama"), saved(name)).eval())
    if not isinstance(model, PeftModel):
        alone = tiny_model("llama")
        alone.load_adapter(saved(name), adapter_name="alone")
        if not torch.equal(_logits(alone.eval()), wanted):
            pytest.skip("this Transformers does not load an adapter's own output layer (5.16 does not)")
    plain = _logits(model)
    adapters = _adapters(model)
    for loaded in ("second", name):
        adapters.load(loaded, saved(loaded))
    with adapters.using(name):
        assert adapters.active == (name,)
        assert torch.equal(_logits(model), wanted)
    assert torch.equal(_logits(model), plain)
    adapters.use(name)
    assert torch.equal(_logits(model), wanted)
    with adapters.using(None):
        assert torch.equal(_logits(model), plain)
    with adapters.using("second"), adapters.using("second"):
        assert adapters.active == ("second",)
    assert torch.equal(_logits(model), wanted)
    adapters.load("another", saved("first"))
    assert torch.equal(_logits(model), wanted)
    adapters.use(None)
    assert torch.equal(_logits(model), plain)


def test_a_request_leaves_gradients_as_they_were(model: Any, saved: Callable[[str], str]) -> None:
    adapters = _adapters(model)
    adapters.load("first", saved("first"))
    adapters.load("second", saved("second"))
    adapters.use("first")
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    before = [p.requires_grad for p in model.parameters()]
    with adapters.using("second"):
        pass
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_digest_is_of_what_the_adapter_holds(model: Any, saved: Callable[[str], str]) -> None:
    adapters = _adapters(model)
    one = adapters.load("first", saved("first"))
    other = adapters.load("second", saved("second"))
    same = adapters.load("first again", saved("first"))
    assert one == same != other
    assert adapters.digest("second") == other


def test_what_cannot_work_says_what_to_do(model: Any, saved: Callable[[str], str], tmp_path: Path) -> None:
    adapters = _adapters(model)
    with pytest.raises(ConfigError, match="load_adapter"):
        adapters.use("first")
    with pytest.raises(ConfigError, match="load_adapter"), adapters.using("first"):
        pass
    with pytest.raises(ConfigError, match="load_adapter"):
        adapters.digest("first")
    with pytest.raises(ConfigError, match="load_adapter"):
        adapters.load("first", saved("first"), replace=True)
    with pytest.raises(ConfigError, match="holds no adapter_config.json; give the folder"):
        adapters.load("first", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder .*gone; check the path"):
        adapters.load("first", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"cannot load adapter 'first' from a/b \(no folder here\) on the hub"):
        adapters.load("first", "a/b")
    adapters.load("first", saved("first"))
    with pytest.raises(ConfigError, match="replace=True"):
        adapters.load("first", saved("second"))
    with adapters.using("first"):
        with pytest.raises(ConfigError, match="end it"), adapters.using(None):
            pass
        with pytest.raises(ConfigError, match="end the request"):
            adapters.use(None)


def test_merged_adapters_are_not_switched() -> None:
    model = _adapted(0)
    adapters = _adapters(model)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"), adapters.using(None):
        pass
    model.unmerge_adapter()
    with adapters.using(None):
        assert adapters.active == ()


def _tensors(model: Any) -> list[tuple[int, int, int]]:
    return [(id(p), p._version, p.data_ptr()) for p in model.parameters()]


def test_an_adapter_swapped_in_place_gets_another_key(saved: Callable[[str], str]) -> None:
    model = _adapted(0)
    model.load_adapter(saved("first"), adapter_name="first")
    model.set_adapter("first")
    identity = ModelIdentity(model, probe_model(model).layout)
    adapters = Adapters(model, identity)
    under_a, digest = identity.snapshot(), adapters.digest("first")
    before = _tensors(model)
    adapters.load("first", saved("second"), replace=True)
    assert _tensors(model) == before, "PEFT now shows what it swaps: this test shows nothing any more"
    under_b = identity.snapshot()
    assert {name for name in under_a.fields if under_a.fields[name] != under_b.fields[name]} == {"adapter"}
    assert adapters.digest("first") != digest
    hotswap_adapter(model, saved("first"), adapter_name="first")  # behind our back
    assert identity.is_current(under_b), "what cannot be seen must be told"
    adapters.weights_changed()
    assert identity.snapshot().fields == under_a.fields


def test_kv_of_a_swapped_adapter_is_not_used(saved: Callable[[str], str]) -> None:
    model = _adapted(0)
    model.load_adapter(saved("first"), adapter_name="first")
    model.set_adapter("first")
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    adapters = engine.parts.owned_adapters()
    engine.warm(_PROMPT)
    first = engine.prefill(_PROMPT)
    assert first.reuse.exact_tokens == 36
    adapters.load("first", saved("second"), replace=True)
    swapped = engine.prefill(_PROMPT)
    assert swapped.reuse.exact_tokens == 0
    assert not torch.equal(swapped.logits, first.logits)
    adapters.load("first", saved("first"), replace=True)
    again = engine.prefill(_PROMPT)
    assert again.reuse.exact_tokens == 36
    assert torch.equal(again.logits, first.logits)


def test_layers_of_an_adapter_that_came_later_are_bit_identical_too(tmp_path: Path) -> None:
    """Its small layers round differently for a few rows, so they too must run in sizes that were tested."""
    wide = {"hidden_size": 256, "intermediate_size": 512}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(tiny_model("llama", **wide), config).save_pretrained(tmp_path)
    engine = KVBoost(tiny_model("llama", **wide), None, chunk_size=8, chunking="fixed")
    engine.parts.owned_adapters().load("late", str(tmp_path))
    cold = engine.prefill(_PROMPT, adapter="late")
    warm = engine.prefill(_PROMPT, adapter="late")
    assert warm.reuse.exact_tokens == 36
    assert_same_bits(warm, cold, len(_PROMPT))


def _run(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_requests_of_one_adapter_overlap_and_those_of_another_wait(model: Any, saved: Callable[[str], str]) -> None:
    adapters = _adapters(model)
    adapters.load("first", saved("first"))
    adapters.load("second", saved("second"))
    both = threading.Barrier(2, timeout=20)
    seen: list[tuple[str, ...]] = []
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with adapters.using("first"):
            both.wait()
            entered.set()
            assert leave.wait(20)
            seen.append(adapters.active)

    def together() -> None:
        with adapters.using("first"):
            both.wait()

    def other() -> None:
        with adapters.using("second"):
            seen.append(adapters.active)

    threads = [_run(first), _run(together)]
    assert entered.wait(20), "two requests of one adapter did not run together"
    threads.append(_run(other))
    threads[-1].join(0.2)
    assert threads[-1].is_alive()
    late = _run(lambda: adapters.using("first").__enter__())
    late.join(0.2)
    assert late.is_alive(), "a later request of the running adapter overtook the one that waits"
    leave.set()
    threads[-1].join(20)
    assert seen == [("first",), ("second",)]


def test_many_threads_never_see_anothers_adapter(model: Any, saved: Callable[[str], str]) -> None:
    adapters = _adapters(model)
    wanted = {None: _logits(model), AS_SET: _logits(model)}
    for name in ("first", "second"):
        adapters.load(name, saved(name))
        with adapters.using(name):
            wanted[name] = _logits(model)
    assert not torch.equal(wanted["first"], wanted["second"])
    wrong: list[Any] = []

    def work(name: Any) -> None:
        for _ in range(8):
            with adapters.using(name):
                if not torch.equal(_logits(model), wanted[name]):
                    wrong.append(name)

    threads = [_run(lambda name=name: work(name)) for name in ("first", "second", None, AS_SET, "first", "second")]  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert adapters.active == ()


def test_a_request_that_fails_gives_its_turn_back(model: Any, saved: Callable[[str], str]) -> None:
    adapters = _adapters(model)
    adapters.load("first", saved("first"))
    with pytest.raises(RuntimeError, match="own mistake"), adapters.using("first"):
        raise RuntimeError("the user's own mistake")
    assert adapters.active == ()
    done = _run(lambda: adapters.use("first"))
    done.join(20)
    assert adapters.active == ("first",)
