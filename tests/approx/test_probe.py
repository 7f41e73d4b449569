from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvboost import UnsupportedModelError
from kvboost.approx.probe import probe_reposition
from kvboost.hf.numerics.forwards import functions_of, replaced
from tests.approx.test_reposition import _layout
from tests.helpers.models import tiny_model


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt2", {}, "gpt2: the keys of layer 0 depend on the position, and it has no rotary embedding module"),
        ("gptj", {"rotary_dim": 4}, "no rotary embedding module"),
        ("bloom", {"n_head": 4}, "bloom takes no positions"),
        ("mpt", {}, "mpt takes no positions"),
        ("falcon", {"alibi": True}, "rotates no keys"),
        ("llama", {"max_position_embeddings": 8}, "too few positions"),
    ],
)
def test_refuses_with_a_reason(family: str, overrides: dict[str, Any], reason: str, tiny: Callable[..., Any]) -> None:
    model = tiny(family, **overrides)
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_reposition(model, _layout(model))


def test_a_model_is_probed_while_another_thread_is_in_a_step() -> None:
    """Which has another forward for its rotary module then, and keeps it."""
    model = tiny_model("llama")
    layout = _layout(model)
    with replaced([(module, lambda *_, **__: None) for module, _ in functions_of(model)]):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(probe_reposition, model, layout).result() is not None
        assert model.model.rotary_emb(torch.ones(1), torch.arange(3)[None]) is None


def test_weights_decide_not_the_family() -> None:
    """This family scales its keys after rotating them: harmless while all scales are one, as in a new model."""
    model = tiny_model("hunyuan_v1_dense", head_dim=8)
    layout = _layout(model)
    probe_reposition(model, layout)
    with torch.no_grad():
        model.model.layers[1].self_attn.key_layernorm.weight[3] = 2.0
    with pytest.raises(UnsupportedModelError, match="keys of layer 1 depend on the position, and no rotation"):
        probe_reposition(model, layout)
