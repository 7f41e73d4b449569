"""Exact reuse in vLLM: what comes from our tiers is what vLLM computed, and nobody else's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import redis_server
from tests.integrations.vllm.conftest import engine as start

_NEARLY_ALL = 608  # of 640 tokens: whole pages of 32, and the last token is computed


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    keys = ("tokens", "logprobs")
    return [[a[key] for key in keys] for a in one] == [[b[key] for key in keys] for b in other]


@pytest.fixture
def reference(model: Path, prompt: list[int]) -> list[dict[str, Any]]:
    """The answer of vLLM alone, with its own prefix cache up to the same page."""
    with start(model, connector=None) as plain:
        plain.generate(prompt)
        answer = plain.generate(prompt)
    assert answer[0]["cached"] == _NEARLY_ALL
    return answer


def test_memory_and_a_restart_from_disk(
    model: Path, prompt: list[int], reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    place = {"disk_cache_dir": str(tmp_path / "kv")}
    with start(model, connector=place) as first:
        assert first.generate(prompt)[0]["cached"] == 0
        first.forget()
        again = first.generate(prompt)
        assert again[0]["cached"] == _NEARLY_ALL
        assert _same(again, reference)
        first.forget()
        other = [*prompt[:500], *prompt[:100]]
        assert "could not be" not in first.log()
        assert 500 - 96 <= first.generate(other)[0]["cached"] <= 500, "the common part, but for a chunk and a page"
    with start(model, connector=place) as second:
        restarted = second.generate(prompt)
        assert restarted[0]["cached"] == _NEARLY_ALL
        assert _same(restarted, reference)


def test_bfloat16_pages(model: Path, prompt: list[int]) -> None:
    """They have another order than float32's, and with matrix units yet another."""
    short = prompt[:200]
    with start(model, connector={}, dtype="bfloat16") as engine:
        engine.generate(short)
        (own,) = engine.generate(short)
        engine.forget()
        (ours,) = engine.generate(short)
    assert ours["cached"] == own["cached"] == 192
    assert ours["logprobs"] == own["logprobs"]


def test_pages_written_wrongly_are_seen(model: Path, prompt: list[int], reference: list[dict[str, Any]]) -> None:
    with start(model, connector={}, seed="one page off") as engine:
        engine.generate(prompt)
        engine.forget()
        assert not _same(engine.generate(prompt), reference)


def test_two_servers_share_a_redis_and_survive_its_end(
    model: Path, prompt: list[int], reference: list[dict[str, Any]]
) -> None:
    with redis_server() as redis, start(model, connector={"remote_url": redis.url}) as second:
        with start(model, connector={"remote_url": redis.url}) as first:
            first.generate(prompt)
        answer = second.generate(prompt)
        assert answer[0]["cached"] == _NEARLY_ALL
        assert _same(answer, reference)
        redis.process.kill()
        assert len(second.generate(prompt[::-1])[0]["tokens"]) == 4
        second.forget()
        kept = second.generate(prompt)
        assert kept[0]["cached"] == _NEARLY_ALL, "from memory"
        assert _same(kept, reference)


@pytest.mark.parametrize("seed", ["", "weights ignored"])
def test_servers_of_other_weights_share_nothing(model: Path, prompt: list[int], tmp_path: Path, seed: str) -> None:
    """As after an update of the weights, on one Redis."""
    other = shutil.copytree(model, tmp_path / "other")
    file = other / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    with redis_server() as redis:
        cached = []
        for folder in (model, other, other):
            with start(folder, connector={"remote_url": redis.url}, seed=seed) as server:
                cached.append(server.generate(prompt)[0]["cached"])
    assert (cached == [0, 0, _NEARLY_ALL]) is (seed == "")


@pytest.mark.parametrize("seed", ["", "more is claimed than is held"])
def test_a_redis_that_dies_in_mid_load(
    model: Path, prompt: list[int], reference: list[dict[str, Any]], seed: str
) -> None:
    with redis_server() as redis, FaultyProxy(redis.port) as proxy:
        with start(model, connector={"remote_url": redis.url}) as first:
            first.generate(prompt)
        with start(model, connector={"remote_url": f"redis://127.0.0.1:{proxy.port}"}, seed=seed) as second:
            proxy.fault = Fault.DIES
            (answer,) = second.generate(prompt)
            assert proxy.fault is Fault.REFUSED, "it died while KV was loaded"
            assert answer["tokens"] == reference[0]["tokens"]
            # Not all of it can have come, and only what has come is claimed.
            claimed = answer["cached"] < _NEARLY_ALL and "could not be loaded" not in second.log()
            assert claimed is (seed == "")
            second.forget()
            kept = second.generate(prompt)
            assert kept[0]["cached"] == _NEARLY_ALL, "from memory"
            assert _same(kept, reference)


def test_a_fetch_that_is_never_answered_is_not_waited_for(
    model: Path, prompt: list[int], reference: list[dict[str, Any]]
) -> None:
    with start(model, connector={}, seed="a fetch is never answered") as engine:
        engine.generate(prompt)
        engine.forget()
        (answer,) = engine.generate(prompt)
        assert (answer["cached"], answer["tokens"]) == (0, reference[0]["tokens"])
        assert "did not come within 10 s; the request is computed" in engine.log()
        assert engine.counts()["steps"] < 3000, "steps without work leave the processor to those who fetch"


@pytest.mark.parametrize("seed", ["pages cannot be read", "pages cannot be read, and nobody says so"])
def test_a_worker_that_cannot_read_its_pages_says_so_to_the_scheduler(
    model: Path, prompt: list[int], reference: list[dict[str, Any]], tmp_path: Path, seed: str
) -> None:
    disk = {"disk_cache_dir": str(tmp_path / "kv")}
    with start(model, connector=disk) as first:
        first.generate(prompt)
    with start(model, connector=disk, seed=seed) as second:
        (answer,) = second.generate(prompt)
        assert (answer["cached"], answer["tokens"]) == (0, reference[0]["tokens"])
        assert "this model's KV is not kept: seeded" in second.log()
        waited = "did not come within 10 s" in second.log()
        assert waited is (seed != "pages cannot be read"), "the scheduler's side found it, and asked for it"


@pytest.mark.parametrize("seed", ["", "lookups are not awaited"])
def test_steps_without_work_wait_for_a_lookup(model: Path, prompt: list[int], seed: str) -> None:
    with redis_server() as redis, FaultyProxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with start(model, connector={"remote_url": url}, seed=seed) as engine:
            engine.generate(prompt[:100])
            before = engine.counts()["steps"]
            proxy.fault = Fault.LATE  # a quarter of a second for each answer
            engine.generate(prompt)
            assert (engine.counts()["steps"] - before < 150) is (seed == "")


@pytest.mark.parametrize("seed", ["", "salt ignored"])
def test_a_salt_keeps_tenants_apart(model: Path, prompt: list[int], tmp_path: Path, seed: str) -> None:
    with start(model, connector={"disk_cache_dir": str(tmp_path / "kv")}, seed=seed) as engine:
        engine.generate(prompt, salt="alice")
        engine.forget()
        shared = [engine.generate(prompt, salt="bob")[0]["cached"], engine.generate(prompt)[0]["cached"]]
        engine.forget()
        own = engine.generate(prompt, salt="alice")[0]["cached"]
    assert own == _NEARLY_ALL
    assert (shared == [0, 0]) is (seed == "")


@pytest.mark.parametrize("seed", ["a load fails", "a load fails, and its step is kept"])
def test_a_load_that_fails_is_computed_and_its_step_is_not_kept(model: Path, prompt: list[int], seed: str) -> None:
    """vLLM runs the step over pages without KV before it computes them: what that step made must not be stored."""
    with start(model, connector={}, seed=seed) as engine:
        engine.generate(prompt[:320])
        engine.forget()
        (failed,) = engine.generate(prompt)
        assert "could not be loaded; it is computed" in engine.log()
        engine.forget()
        (plain,) = engine.generate(prompt, params={"kvboost": "off"})
        engine.forget()
        (stored,) = engine.generate(prompt)
    assert failed["tokens"] == plain["tokens"]
    assert stored["cached"] == _NEARLY_ALL
    assert _near(plain, stored) is (seed == "a load fails")


def test_off_for_one_request(model: Path, prompt: list[int]) -> None:
    with start(model, connector={}) as engine:
        engine.generate(prompt, params={"kvboost": "off"})
        engine.forget()
        assert engine.generate(prompt)[0]["cached"] == 0, "nothing was kept"
        engine.forget()
        assert engine.generate(prompt, params={"kvboost": "off"})[0]["cached"] == 0, "nothing is read"


@pytest.mark.parametrize("seed", ["", "pages of before a preemption"])
def test_many_requests_with_preemption(model: Path, prompt: list[int], seed: str) -> None:
    """30 pages for requests that grow to 17: some are preempted, and what they leave in the store is right."""
    prompts = [[*prompt[: 200 + 40 * i], *prompt[i : i + 60]] for i in range(4)]
    small = {"num_gpu_blocks_override": 30, "max_model_len": 768, "max_num_batched_tokens": 256}
    with start(model, connector=None, enable_prefix_caching=False, **small) as plain:
        wanted = plain.generate(*prompts, new=160)
        longer = [[*one, *answer["tokens"]] for one, answer in zip(prompts, wanted, strict=True)]
        behind = plain.generate(*longer, new=1)
    with start(model, connector={}, seed=seed, **small) as engine:
        answers = engine.generate(*prompts, new=160)
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in wanted]
        assert engine.counts()["preemptions"]
        engine.forget()
        again = [engine.generate(one, new=1)[0] for one in longer]
        assert all(answer["cached"] > len(one) for answer, one in zip(again, prompts, strict=True))
        assert "could not be" not in engine.log()
    assert all(map(_near, behind, again)) is (seed == "")


def _near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the first tokens have the same log-probabilities but for rounding."""
    first, second = one["logprobs"][0], other["logprobs"][0]
    return first.keys() == second.keys() and all(abs(first[token] - second[token]) < 1e-3 for token in first)


def _adapter(folder: Path, model: Path, *, seed: int) -> str:
    """A LoRA adapter of random numbers over the first layer's value projection."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    values = config["num_key_value_heads"] * (hidden // heads)
    source = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.0.self_attn.v_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(8, hidden, generator=source),
        f"{name}.lora_B.weight": torch.randn(values, 8, generator=source),
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("seed", ["", "adapter ignored"])
def test_adapters_share_nothing_even_by_one_name(model: Path, prompt: list[int], tmp_path: Path, seed: str) -> None:
    paths = [_adapter(tmp_path / str(number), model, seed=number) for number in range(2)]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with start(model, connector={}, seed=seed, **options) as engine:
        cached = []
        for number in (0, 1, 0):
            engine.forget()
            lora = {"lora": "style", "lora_id": number + 1, "lora_path": paths[number]}
            cached.append(engine.generate(prompt, **lora)[0]["cached"])
        engine.forget()
        cached.append(engine.generate(prompt)[0]["cached"])
    assert (cached == [0, 0, _NEARLY_ALL, 0]) is (seed == "")
