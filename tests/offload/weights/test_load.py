"""Models of many families, loaded whole and streamed: the same logits to the bit, the same fingerprint."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvboost.errors import ConfigError
from kvboost.hf.checkpoint import Shards
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.loading import ModelSource
from kvboost.hf.probe import probe_model
from kvboost.hf.weights import streamed_weights_of
from kvboost.offload.weights.load import load_streamed, put_together
from kvboost.offload.weights.skeleton import build_skeleton, place_weights
from kvboost.offload.weights.slabs import make_slabs
from tests.helpers.files import same_times
from tests.helpers.models import FAMILIES, tiny_model
from tests.helpers.simulated_link import SimulatedLink

_IDS = torch.tensor([[(i * 37) % 90 + 3 for i in range(40)]])
_CPU = torch.device("cpu")


def _saved(folder: Path, family: str = "llama", *, layers: int = 5, **overrides: Any) -> Any:
    """A model large enough that its pages do not weigh more than its weights, and its folder."""
    if "layer_types" in FAMILIES.get(family, {}):
        overrides["layer_types"] = (FAMILIES[family]["layer_types"] * layers)[:layers]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers}
    tiny_model(family, **sizes, **overrides).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def _load(folder: Path, budget: int, **overrides: Any) -> Any:
    weight_dir = overrides.pop("weight_dir", None)
    source = ModelSource(str(folder), device="cpu", **overrides)
    return load_streamed(source, budget=budget, weight_dir=weight_dir)


def _min_budget(folder: Path) -> int:
    with pytest.raises(ConfigError) as refused:
        _load(folder, 1)
    return int(float(str(refused.value).rpartition("at least ")[2].removesuffix(" MB")) * 1e6)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(_IDS).logits
    return logits


# The other families: `python -m benchmarks weight_streaming --part families`.
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "gpt2", "cohere"])
def test_a_streamed_model_is_the_resident_one_to_the_bit(tmp_path: Path, family: str) -> None:
    resident = _saved(tmp_path, family)
    streamed = _load(tmp_path, _min_budget(tmp_path))
    streamer = streamed_weights_of(streamed)
    assert streamer is not None
    assert streamer.placement.memory.streamed > 0
    expected = _logits(resident)
    for _ in range(2):
        assert torch.equal(_logits(streamed), expected)
    layout = probe_model(resident).layout
    assert ModelIdentity(streamed, layout).snapshot().fields == ModelIdentity(resident, layout).snapshot().fields
    assert probe_model(streamed).layout == layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_cast_once(tmp_path: Path, dtype: torch.dtype) -> None:
    _saved(tmp_path)
    resident = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    streamed = _load(tmp_path, 250_000, dtype=dtype)
    assert streamed.dtype == dtype
    assert torch.equal(_logits(streamed), _logits(resident))
    assert _load(tmp_path, 10**9, dtype=str(dtype).removeprefix("torch.")) is None
    assert torch.equal(_logits(_load(tmp_path, 400_000)), _logits(AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_shards_are_read_where_they_lie(tmp_path: Path) -> None:
    resident = _saved(tmp_path / "one")
    resident.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(_logits(_load(tmp_path / "many", 500_000)), _logits(resident))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_tied(tmp_path: Path, tied: bool) -> None:
    resident = _saved(tmp_path, tie_word_embeddings=tied)
    streamed = _load(tmp_path, 500_000)
    assert (streamed.lm_head.weight is streamed.model.embed_tokens.weight) == tied
    assert torch.equal(_logits(streamed), _logits(resident))


def test_when_everything_fits_nothing_is_streamed_or_written(tmp_path: Path) -> None:
    resident = _saved(tmp_path)
    size = sum(parameter.numel() * parameter.element_size() for parameter in resident.parameters())
    assert _load(tmp_path, size) is None
    assert not list(tmp_path.glob("kvboost-weights-*"))
    assert _load(tmp_path, size - 1) is not None
    assert list(tmp_path.glob("kvboost-weights-*"))


def test_the_second_start_takes_the_slabs_and_a_new_checkpoint_other_ones(tmp_path: Path) -> None:
    _saved(tmp_path / "model")
    first = _load(tmp_path / "model", 500_000, weight_dir=tmp_path / "slabs")
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "slabs").rglob("*.slab")}
    assert len(made) == 6
    assert torch.equal(_logits(_load(tmp_path / "model", 500_000, weight_dir=tmp_path / "slabs")), _logits(first))
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "slabs").rglob("*.slab")} == made
    other = _saved(tmp_path / "model", seed=1)
    again = _load(tmp_path / "model", 500_000, weight_dir=tmp_path / "slabs")
    assert torch.equal(_logits(again), _logits(other))
    assert not torch.equal(_logits(again), _logits(first))


def test_another_checkpoint_with_the_same_times_has_slabs_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_times(monkeypatch)
    first = _logits(_saved(tmp_path / "one"))
    other = _logits(_saved(tmp_path / "two", seed=1))
    for folder, expected in (("one", first), ("two", other), ("one", first)):
        assert torch.equal(_logits(_load(tmp_path / folder, 500_000, weight_dir=tmp_path / "slabs")), expected)
    assert len(list((tmp_path / "slabs").glob("kvboost-weights-*"))) == 2


def test_a_checkpoint_with_other_names_is_made_from_the_loaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = _saved(tmp_path)
    resident.model.save_pretrained(tmp_path)  # the decoder alone, without the prefix of its names and without a head
    resident.lm_head.weight.data.zero_()
    loads = []

    def whole(source: ModelSource) -> Any:
        loads.append(source)
        return resident

    monkeypatch.setattr("kvboost.offload.weights.load.load_checkpoint", whole)
    assert torch.equal(_logits(_load(tmp_path, 500_000)), _logits(resident))
    _load(tmp_path, 500_000)
    assert len(loads) == 1


@pytest.mark.parametrize("seed", range(3))
def test_correct_over_a_slow_link_with_poisoned_memory(tmp_path: Path, seed: int) -> None:
    resident = _saved(tmp_path, ["llama", "gemma3_text", "qwen3_moe"][seed])
    skeleton = build_skeleton(resident.config, dtype=torch.float32)
    shards = Shards([tmp_path / "model.safetensors"])
    slabs = [skeleton.rest, *skeleton.slabs]
    budget = skeleton.total_bytes * 4 // 5
    placement = place_weights(skeleton.rest, skeleton.slabs, budget=budget)
    luck = random.Random(seed)
    link = SimulatedLink(budget=budget, delay=lambda: luck.choice([0.0, 0.002]))
    if set(shards.tensors) >= {w.name for slab in slabs for w in slab.weights}:
        source = lambda name: shards.pieces(name, torch.float32)  # noqa: E731
    else:
        state = resident.state_dict()
        source = lambda name: [memoryview(state[name].contiguous().view(-1).view(torch.uint8).numpy())]  # noqa: E731
    folder = make_slabs(tmp_path / "slabs", slabs, pieces=source, key="a")
    streamer = put_together(skeleton, folder, placement, link=link, device=_CPU)
    for _ in range(3):
        assert torch.equal(_logits(skeleton.model), _logits(resident))
    assert streamer.stats().misses == 0
    assert link.allocated <= budget


def test_threads_share_one_streamed_model(tmp_path: Path) -> None:
    resident = _saved(tmp_path)
    streamed = _load(tmp_path, 500_000)
    expected = _logits(resident)
    equal: list[bool] = []

    def run() -> None:
        equal.extend(torch.equal(_logits(streamed), expected) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 15


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_lets_the_next_one_in(tmp_path: Path, error: type[BaseException]) -> None:
    resident = _saved(tmp_path)
    streamed = _load(tmp_path, 500_000)

    def fail(*_: Any) -> None:
        raise error("on purpose")

    hook = streamed.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error, match="on purpose"):
        _logits(streamed)
    hook.remove()
    found: list[bool] = []
    other = threading.Thread(
        target=lambda: found.append(torch.equal(_logits(streamed), _logits(resident))), daemon=True
    )
    other.start()
    other.join(timeout=20)
    assert found == [True]


def test_a_changed_resident_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    _saved(tmp_path)
    streamed = _load(tmp_path, 500_000)
    identity = ModelIdentity(streamed, probe_model(streamed).layout)
    before = identity.snapshot()
    _logits(streamed)
    assert identity.is_current(before)  # what passes through the buffers is no change
    with torch.no_grad():
        streamed.model.norm.weight[0] += 1.0
    assert not identity.is_current(before)
    assert identity.snapshot().fields["weights"] != before.fields["weights"]


def test_the_link_ends_with_the_model(tmp_path: Path) -> None:
    _saved(tmp_path)
    gc.collect()
    before = threading.active_count()
    streamed = _load(tmp_path, 500_000)
    assert threading.active_count() == before + 1
    del streamed
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_kwargs": {"device_map": "auto"}}, "does not go with device_map"),
        ({"dtype": "half-hearted"}, "dtype is not one torch knows"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    _saved(tmp_path)
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, 500_000, **arguments)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="save the model again"):
        _load(tmp_path, 500_000)
