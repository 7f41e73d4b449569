"""What a prefill asks of an accelerator, counted on a simulated one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf.runner import ModelRunner
from tests.helpers.devices import Devices, put
from tests.helpers.late_device import LateDevice
from tests.helpers.models import tiny_model

_TOKENS = torch.randint(3, 97, (8000,), generator=torch.Generator().manual_seed(1)).tolist()
_ID_BYTES = 8


def _counted(prompt: list[int], *, known: int, numerics: str) -> tuple[int, list[int]]:
    """Forwards of the decoder, and the bytes of each upload, of a prefill behind ``known`` tokens."""
    model = put(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=9000), lambda _: "cuda:0")
    forwards: list[Any] = []
    with Devices() as seen:
        with KVBoost(model, chunk_size=64, numerics=numerics, host_cache_bytes=0) as engine:
            if known:
                engine.prefill(prompt[:known])
            hook = model.get_decoder().register_forward_pre_hook(lambda *_: forwards.append(None))
            seen.during(lambda: engine.prefill(prompt))
            hook.remove()
        return len(forwards), [event.nbytes for event in seen.events if event.kind == "upload"]


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("known", [0, 1500])
def test_a_long_prompt_takes_few_forwards_and_one_upload_of_its_ids(known: int, numerics: str) -> None:
    forwards, uploads = _counted(_TOKENS, known=known, numerics=numerics)
    start = known // 1024 * 1024 if numerics == "bitwise" else known
    assert forwards <= (9 if numerics == "bitwise" else 1)
    assert uploads.count(_ID_BYTES * (len(_TOKENS) - start)) == 1
    # What else goes there is not ids, and does not grow with the steps: one step takes as much.
    _, short = _counted(_TOKENS[: known + 600], known=known, numerics=numerics)
    assert len(uploads) == len(short)


def test_a_warm_answer_waits_for_the_device_no_more_often_than_plain_transformers() -> None:
    model = put(tiny_model("llama", num_hidden_layers=2, max_position_embeddings=9000), lambda _: "cuda:0")
    prompt, waits = _TOKENS[:1000], {}
    with Devices() as seen, KVBoost(model, chunk_size=64, host_cache_bytes=0) as engine:
        engine.prefill(prompt)
        assert seen.during(lambda: engine.prefill([*prompt, 5, 6]))["wait"] == 0, "nor before the logits are read"
        ids = torch.tensor([[*prompt, 5]]).to("cuda:0")
        for new in (4, 12):
            wanted = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            plain = seen.during(lambda wanted=wanted: model.generate(ids, **wanted))["wait"]
            ours = seen.during(lambda wanted=wanted: engine.generate([*prompt, 5], **wanted))["wait"]
            waits[new] = ours - plain
    assert waits == {4: 2, 12: 2}, "once for the first token's time, and once for the answer"


_HOST_S, _DEVICE_S = 0.002, 0.0001  # for a forward; for a token


def _learnt(monkeypatch: pytest.MonkeyPatch, *, by_events: bool) -> tuple[float, int]:
    """The seconds that 2,000 tokens are expected to take after a prompt of as many, and the host's waits."""
    late, append = LateDevice(), ModelRunner.append

    def asked(self: ModelRunner, tokens: Any, cache: Any, *, logits: bool) -> Any:
        late.ask(host=_HOST_S, device=_DEVICE_S * len(tokens))
        return append(self, tokens, cache, logits=logits)

    model = put(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=9000), lambda _: "cuda:0")
    with monkeypatch.context() as patch, Devices() as seen:
        late.use(patch)
        patch.setattr(ModelRunner, "append", asked)
        if by_events:
            patch.setattr(ModelRunner, "mark", lambda self: late.mark())
        with KVBoost(model, numerics="fast", host_cache_bytes=0) as engine:
            assert engine.session is not None
            costs = engine.session.prefiller.costs
            seen.events.clear()
            engine.prefill(_TOKENS[:2000])
            late.read()
            with engine.session.prefiller.open([3, 4, 5]):
                pass  # the next request sees that the device is done
            return costs.prefill_seconds(forwards=1, tokens=2000), seen.counts["wait"]


def test_costs_are_those_of_a_device_that_lags_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right, waits = _learnt(monkeypatch, by_events=True)
    wrong, without = _learnt(monkeypatch, by_events=False)
    assert right == pytest.approx(2000 * _DEVICE_S, rel=0.1)
    assert wrong < 0.1 * right, "the host's clock stops when the work is asked for"
    assert waits == without
