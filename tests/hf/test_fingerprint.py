from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import ConfigError, KVBoost
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model

_PROMPT = list(range(3, 40))


def _fields(model: Any) -> dict[str, str]:
    return dict(ModelIdentity(model, probe_model(model).layout).snapshot().fields)


def test_equal_models_agree_and_a_single_changed_weight_shows() -> None:
    one, same = tiny_model("llama"), tiny_model("llama")
    assert _fields(one) == _fields(same)
    with torch.no_grad():
        same.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3
    changed = _fields(same)
    assert changed.pop("weights") != _fields(one)["weights"]
    assert changed == {k: v for k, v in _fields(one).items() if k != "weights"}


def test_each_field_follows_its_cause() -> None:
    base = _fields(tiny_model("llama"))

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name in base if base[name] != other[name]}

    assert differing(_fields(tiny_model("llama", seed=1))) == {"weights"}
    assert {"config"} <= differing(_fields(tiny_model("llama", rms_norm_eps=1e-3))) <= {"config"}
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert "rope" in differing(_fields(tiny_model("llama", rope_parameters=scaled)))
    assert "dtype" in differing(_fields(tiny_model("llama", dtype=torch.bfloat16)))
    assert "attention" in differing(_fields(tiny_model("llama", attn_implementation="eager")))


def test_numeric_settings_show() -> None:
    model = tiny_model("llama")
    before = _fields(model)["numerics"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert _fields(model)["numerics"] != before
    finally:
        torch.set_num_threads(threads)


def test_a_model_converted_under_its_engine_is_said() -> None:
    engine = KVBoost(tiny_model("llama"), None, chunk_size=8)
    engine.warm(_PROMPT)
    engine.model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"of torch.float32 on cpu, which is torch.bfloat16 on cpu now; make a new"):
        engine.generate(_PROMPT, max_new_tokens=1)


def test_weights_changed_in_place_end_the_old_hits() -> None:
    model = tiny_model("llama")
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 36
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    stale = engine.prefill(_PROMPT)
    assert stale.reuse.exact_tokens == 0
    assert torch.equal(stale.logits, KVBoost(model, None, chunk_size=8, chunking="fixed").prefill(_PROMPT).logits)


def test_a_replaced_parameter_ends_the_old_hits() -> None:
    model = tiny_model("llama")
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * 2)
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 0


def test_weights_changed_during_a_request_store_nothing() -> None:
    model = tiny_model("llama")
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    weight = model.model.layers[0].self_attn.k_proj.weight

    def change_meanwhile(*_: Any) -> None:
        with torch.no_grad():
            weight.mul_(1.01)

    hook = model.model.register_forward_pre_hook(change_meanwhile)  # every step of a prefill and of generate
    engine.prefill(_PROMPT)
    engine.generate(_PROMPT, max_new_tokens=1)
    hook.remove()
    assert engine.cache_stats()["hot_chunks"] == 0
    assert torch.equal(
        engine.prefill(_PROMPT).logits, KVBoost(model, None, chunk_size=8, chunking="fixed").prefill(_PROMPT).logits
    )


def test_attention_kernels_show(tiny: Callable[..., Any]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    engine = KVBoost(tiny("llama"), None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    with sdpa_kernel(SDPBackend.MATH):
        assert engine.prefill(_PROMPT).reuse.exact_tokens == 0
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 36


def test_weights_that_cannot_be_read_are_refused_with_a_reason() -> None:
    from kvboost import UnsupportedModelError
    from kvboost.hf.weights import digest_weights, weights_by_owner

    with torch.device("meta"):
        offloaded = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        digest_weights(offloaded, weights_by_owner(offloaded)[None])


def test_adapters_have_their_own_cache() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    plain = KVBoost(copy.deepcopy(base), None, chunk_size=8, chunking="fixed").prefill(_PROMPT).logits
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.eval()
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    adapted = engine.prefill(_PROMPT)
    assert adapted.reuse.exact_tokens == 36
    assert not torch.allclose(adapted.logits, plain)
    with model.disable_adapter():
        disabled = engine.prefill(_PROMPT)
        assert disabled.reuse.exact_tokens == 0, "KV of the adapted model must not serve the plain one"
        assert torch.allclose(disabled.logits, plain, atol=1e-5)
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 36


@pytest.mark.parametrize("setting", ["attention", "training"])
def test_a_switch_between_calls_is_noticed(setting: str, tiny: Callable[..., Any]) -> None:
    model = copy.deepcopy(tiny("llama"))
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed")
    engine.warm(_PROMPT)
    if setting == "attention":
        model.set_attn_implementation("eager")
    else:
        model.train()
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 0
