"""One snapshot per request: the key and the state it stands for come from the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf import fingerprint
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model

_PROMPT = list(range(3, 40))


def _engine(model: Any) -> KVBoost:
    return KVBoost(model, None, chunk_size=8, chunking="fixed")


def _exact(engine: KVBoost) -> int:
    return engine.prefill(_PROMPT).reuse.exact_tokens


def _with_lora(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
        return get_peft_model(tiny_model("llama"), config).eval()


def test_an_adapter_switched_while_the_key_is_made_does_not_mislabel_later_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _with_lora()
    engine = _engine(model)
    with model.disable_adapter():
        plain = engine.prefill(_PROMPT).logits
    engine.warm(_PROMPT)
    adapted = engine.prefill(_PROMPT).logits
    model.base_model.set_adapter("default")
    settings = fingerprint.NumericEnvironment.settings
    # Another thread leaves disable_adapter() between the moment the state is read and the moment fields are made.
    armed = [True]

    def meanwhile(environment: Any) -> str:
        if armed[0]:
            armed[0] = False
            model.base_model.enable_adapter_layers()
        return settings(environment)

    model.base_model.disable_adapter_layers()
    monkeypatch.setattr(fingerprint.NumericEnvironment, "settings", meanwhile)
    engine.prefill(_PROMPT)
    with model.disable_adapter():
        again = engine.prefill(_PROMPT).logits
    assert torch.equal(again, plain), "the plain model's requests run under the adapter's key"
    assert torch.equal(engine.prefill(_PROMPT).logits, adapted)


def test_layers_that_swap_their_scalings_have_other_keys() -> None:
    model = _with_lora()
    first, second = (model.base_model.model.model.layers[i].self_attn.q_proj for i in (0, 1))
    first.scaling["default"], second.scaling["default"] = 1.0, 2.0
    engine = _engine(model)
    engine.warm(_PROMPT)
    assert _exact(engine) == 36
    first.scaling["default"], second.scaling["default"] = 2.0, 1.0
    assert _exact(engine) == 0


def test_data_at_dead_datas_address_is_other_data() -> None:
    model = tiny_model("llama")
    weight = model.model.layers[0].self_attn.v_proj.weight
    memory = bytearray(weight.numel() * 4)

    def at_the_same_address(values: torch.Tensor) -> None:
        """As an allocator does that hands the memory of a dead tensor to the next one."""
        torch.frombuffer(memory, dtype=torch.float32).copy_(values.flatten())
        weight.data = torch.frombuffer(memory, dtype=torch.float32).view(values.shape)

    at_the_same_address(weight.detach().clone())
    engine = _engine(model)
    engine.warm(_PROMPT)
    assert _exact(engine) == 36
    old = (id(weight), weight.data_ptr(), weight._version)
    values = weight.detach() * 2
    weight.data = torch.empty(0)
    at_the_same_address(values)
    assert (id(weight), weight.data_ptr(), weight._version) == old
    assert _exact(engine) == 0


def test_the_experts_kernel_of_decoding_does_not_keep_generate_from_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    engine = _engine(model)

    @contextmanager
    def switched(self: Any) -> Iterator[None]:  # what Transformers does on every device but the CPU
        self.set_experts_implementation("batched_mm")
        yield
        self.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", switched)
    monkeypatch.setattr(fingerprint, "_switches_experts_to_decode", lambda model: True, raising=False)
    engine.generate(_PROMPT, max_new_tokens=2, temperature=0)
    assert engine.cache_stats()["hot_chunks"] == 5
    assert _exact(engine) == len(_PROMPT) - 1


def _identity(model: Any) -> fingerprint.ModelIdentity:
    return fingerprint.ModelIdentity(model, probe_model(model).layout)


def test_a_snapshot_stays_the_same_object_until_the_model_changes() -> None:
    model = tiny_model("llama")
    identity = _identity(model)
    first = identity.snapshot()
    assert identity.snapshot() is first
    assert identity.is_current(first)
    with torch.no_grad():
        model.model.norm.weight[0] += 1.0
    assert not identity.is_current(first)
    second = identity.snapshot()
    assert second != first
    assert second.fields["weights"] != first.fields["weights"]


def test_a_model_that_changes_all_the_time_shares_its_snapshot_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    identity = _identity(model)
    weight = model.model.norm.weight

    def change_meanwhile(*args: Any, **kwargs: Any) -> str:
        with torch.no_grad():
            weight.add_(1.0)
        return "digest"

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "digest_weights", change_meanwhile)
        one, other = identity.snapshot(), identity.snapshot()
    assert not identity.is_current(one)
    assert one.fields["numerics"] != other.fields["numerics"]
    assert identity.is_current(identity.snapshot())


def test_a_switched_kernel_of_experts_is_noticed() -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    identity = _identity(model)
    before = identity.snapshot()
    model.set_experts_implementation("eager")
    assert identity.snapshot().fields["numerics"] != before.fields["numerics"]
    model.set_experts_implementation("grouped_mm")
    assert identity.snapshot().fields == before.fields


def test_an_exchange_of_kernels_for_good_is_seen_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(fingerprint, "_switches_experts_to_decode", lambda model: True)
    identity = _identity(model)
    before = identity.snapshot()
    model.set_experts_implementation("batched_mm")
    assert identity.is_current(before)
    identity.weights_changed()
    assert identity.snapshot().fields["numerics"] != before.fields["numerics"]


def test_a_write_that_cannot_be_seen_is_seen_when_told() -> None:
    model = tiny_model("llama")
    identity = _identity(model)
    before = identity.snapshot()
    identity.weights_changed()
    assert not identity.is_current(before), "a request under way may have computed with other weights"
    assert identity.snapshot().fields == before.fields
    model.model.norm.weight.data.mul_(2.0)
    identity.weights_changed()
    assert identity.snapshot().fields["weights"] != before.fields["weights"]


def test_weights_are_the_same_with_and_without_an_adapter_around_them() -> None:
    plain = dict(_identity(tiny_model("llama")).snapshot().fields)
    model = _with_lora(modules_to_save=["lm_head"])
    identity = _identity(model)
    adapted = dict(identity.snapshot().fields)
    assert adapted.pop("adapter") != plain["adapter"]
    assert adapted == {name: value for name, value in plain.items() if name != "adapter"}
    with model.disable_adapter():
        assert identity.snapshot().fields == plain


@pytest.mark.parametrize("change", ["lora", "saved module"])
def test_an_adapters_weights_show_in_its_field_alone(change: str) -> None:
    model = _with_lora(modules_to_save=["lm_head"])
    identity = _identity(model)
    before = identity.snapshot().fields
    layer = model.base_model.model.model.layers[1].self_attn.v_proj.lora_B["default"]
    changed = layer if change == "lora" else model.base_model.model.lm_head.modules_to_save["default"]
    with torch.no_grad():
        changed.weight.mul_(2.0)
    after = identity.snapshot().fields
    assert {name for name in before if before[name] != after[name]} == {"adapter"}


def test_the_users_tensors_may_still_be_swapped() -> None:
    model = tiny_model("llama")
    identity = _identity(model)
    before = identity.snapshot()
    weight = model.model.norm.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() * 2))  # refuses tensors with weak references
    assert not identity.is_current(before)
