from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kvboost import CapacityError, ConfigError, GenerationMode, KVBoost
from kvboost.core.chunking import FixedChunker
from kvboost.engine import stores
from kvboost.store import HostTier, MemoryStore
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_TEXT = "The same text is read again and again. " * 6


@pytest.fixture(scope="module")
def byte_model() -> Any:
    return tiny_model("llama", vocab_size=260, max_position_embeddings=600)


@pytest.fixture
def engine(byte_model: Any) -> KVBoost:
    return KVBoost(byte_model, byte_tokenizer(), chunk_size=16)


def test_the_documented_calls(engine: KVBoost) -> None:
    assert engine.warm(_TEXT) > 3
    assert engine.warm(_TEXT) == 0
    result = engine.generate(_TEXT + "question", max_new_tokens=8, temperature=0)
    assert len(result.token_ids) == 8
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(_TEXT) + 8
    assert result.cached_tokens > 0.8 * result.prompt_tokens
    assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens
    assert 0 < result.ttft_ms <= result.total_ms
    assert result.tokens_per_sec == pytest.approx(8 / (result.total_ms / 1000))
    assert result.output_text == engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    reuse = result.reuse
    assert reuse.exact_tokens + reuse.fresh_tokens == result.prompt_tokens
    assert (reuse.moved_tokens, reuse.recomputed_tokens, reuse.bitwise) == (0, 0, True)
    assert {"encode", "plan", "lease", "place", "prefill", "first_token", "decode"} <= set(reuse.timings_ms)
    assert sum(reuse.timings_ms.values()) <= result.total_ms + 1


def test_ttft_counts_from_the_call(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock must run while the prompt is encoded, planned and read."""
    from time import sleep

    encode = engine.parts.encoder.encode
    monkeypatch.setattr(engine.parts.encoder, "encode", lambda prompt: (sleep(0.05), encode(prompt))[1])
    hook = engine.model.model.register_forward_pre_hook(lambda *_: sleep(0.05))
    result = engine.generate(_TEXT[:40], max_new_tokens=1)
    hook.remove()
    assert result.ttft_ms >= 100


def test_stats_count_chunks(engine: KVBoost) -> None:
    new = engine.warm(_TEXT)
    engine.generate(_TEXT + "?", max_new_tokens=1)
    stats = engine.cache_stats()
    assert stats["hot_chunks"] == new + 1  # and the end of the prompt
    assert stats["cache_hits"] == new
    assert 0 < stats["hit_rate"] <= 1
    assert stats["exact_hit_rate"] == stats["hit_rate"]
    assert stats["hot_memory_mb"] * 1e6 == stats["bytes_by_tier"]["memory"] > 0
    engine.clear()
    assert engine.cache_stats()["hot_chunks"] == 0
    assert engine.generate(_TEXT + "?", max_new_tokens=1).cached_tokens == 0


def test_baseline_neither_reads_nor_writes_the_cache(engine: KVBoost) -> None:
    engine.generate(_TEXT, max_new_tokens=1, mode=GenerationMode.BASELINE)
    assert engine.cache_stats()["hot_chunks"] == 0
    engine.warm(_TEXT)
    result = engine.generate(_TEXT + "x", max_new_tokens=1, mode=GenerationMode.BASELINE)
    assert result.cached_tokens == 0
    assert engine.cache_stats()["cache_hits"] == 0


class _Favour(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 77] += 3.0
        return scores


class _StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_early_exit_runs_without_reuse_and_says_so(engine: KVBoost) -> None:
    """Transformers feeds the whole prompt again there, so a hit would stand in the cache twice."""
    engine.warm(_TEXT)
    ids = engine.encode(_TEXT)
    batch = torch.tensor([ids])
    wanted: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "assistant_early_exit": 1}
    plain = engine.model.generate(batch, attention_mask=torch.ones_like(batch), **wanted)
    result = engine.generate(ids, **wanted)
    assert result.token_ids == tuple(plain[0, len(ids) :].tolist())
    assert result.cached_tokens == 0
    assert "feeds the whole prompt again" in str(result.reuse.reason)


def test_a_prompt_read_twice_is_an_error_rather_than_a_wrong_answer(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost import UnsupportedModelError
    from kvboost.engine import single as module

    monkeypatch.setattr(module, "reads_prompt_again", lambda model, arguments: None)
    engine.warm(_TEXT)
    with pytest.raises(UnsupportedModelError, match="computed the prompt again"):
        engine.generate(_TEXT + "?", max_new_tokens=10, do_sample=False, assistant_early_exit=1)


def test_a_cache_handed_out_with_the_result_is_the_callers(engine: KVBoost) -> None:
    clean = engine.prefill(_TEXT + "?").logits
    first = engine.generate(_TEXT + "?", max_new_tokens=2, temperature=0, return_dict_in_generate=True)
    for layer in first.raw.past_key_values.layers:
        layer.key_store.zero_()
        layer.value_store.zero_()
    again = engine.prefill(_TEXT + "?")
    assert again.reuse.exact_tokens > 0
    assert torch.equal(again.logits, clean)
    before = [layer.keys.clone() for layer in first.raw.past_key_values.layers]
    engine.generate(_TEXT[::-1], max_new_tokens=2, temperature=0)
    assert all(
        torch.equal(old, layer.keys) for old, layer in zip(before, first.raw.past_key_values.layers, strict=True)
    )


def test_the_length_may_come_from_a_generation_config_or_max_length(engine: KVBoost) -> None:
    from transformers import GenerationConfig

    def new(**arguments: Any) -> int:
        return len(engine.generate(_TEXT, temperature=0, eos_token_id=None, **arguments).token_ids)

    assert new() == 64
    assert new(max_length=len(_TEXT) + 5) == 5
    assert new(generation_config=GenerationConfig(max_new_tokens=3)) == 3
    assert new(generation_config=GenerationConfig(max_new_tokens=3), max_new_tokens=4) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"do_sample": True, "temperature": 1.3, "min_p": 0.05},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "logits_processor": LogitsProcessorList([_Favour()])},
        {"do_sample": False, "stopping_criteria": StoppingCriteriaList([_StopAt(240)])},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "temperature": 1.0, "num_return_sequences": 2},
        {"do_sample": False, "min_new_tokens": 12, "eos_token_id": [70, 71]},
        {"do_sample": False, "bad_words_ids": [[60], [61]]},
    ],
    ids=lambda a: "-".join(a),
)
def test_generate_means_what_transformers_means(engine: KVBoost, arguments: dict[str, Any]) -> None:
    """Same seed, same arguments: the tokens of plain model.generate, warm and cold."""
    ids = engine.encode(_TEXT)
    batch = torch.tensor([ids])
    torch.manual_seed(11)
    plain = engine.model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=12, **arguments)
    for _ in range(2):
        torch.manual_seed(11)
        result = engine.generate(ids, max_new_tokens=12, **arguments)
        assert result.token_ids == tuple(plain[0, len(ids) :].tolist())
    assert result.cached_tokens > 0


class _Say(LogitsProcessor):
    """Makes the model say a given text."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids, self.start = ids, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros_like(scores)
        scores[:, self.ids[input_ids.shape[1] - self.start]] = 1.0
        return scores


def test_stop_strings_and_finish_reasons(engine: KVBoost) -> None:
    def say(text: str, **arguments: Any) -> Any:
        speaker = LogitsProcessorList([_Say(engine.encode(text), len(_TEXT))])
        return engine.generate(_TEXT, temperature=0, logits_processor=speaker, **arguments)

    whole = say("hello world", max_new_tokens=11)
    assert (whole.output_text, whole.finish_reason) == ("hello world", "length")
    stopped = say("hello world", max_new_tokens=11, stop_strings=["o w"])
    assert (stopped.output_text, stopped.finish_reason) == ("hello w", "stop")
    endless = say("hello</s>wor" + "ld", max_new_tokens=8, eos_token_id=None)
    assert (len(endless.token_ids), endless.finish_reason) == (8, "length")
    end = engine.encode("w")[0]
    ended = say("hello world", max_new_tokens=11, eos_token_id=end)
    assert (ended.token_ids[-1], ended.finish_reason) == (end, "stop")
    assert len(ended.token_ids) == 7


def test_prompts_of_every_form_are_the_same_prompt(engine: KVBoost) -> None:
    ids = engine.encode(_TEXT)
    first = engine.prefill(_TEXT)
    for prompt in (ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])):
        again = engine.prefill(prompt)
        assert again.reuse.exact_tokens > 0
        assert torch.equal(again.logits, first.logits)


def test_edges_of_the_prompt(engine: KVBoost) -> None:
    assert engine.prefill("").reuse.fresh_tokens == 1  # the begin token, as in Transformers
    one = engine.generate([70], max_new_tokens=2, temperature=0)
    assert (one.prompt_tokens, one.cached_tokens) == (1, 0)
    with pytest.raises(ConfigError, match="0..259"):
        engine.generate([260])
    with pytest.raises(ConfigError, match="0..259"):
        engine.generate([-1])
    with pytest.raises(CapacityError, match="at most 600"):
        engine.prefill([70] * 601)
    with pytest.raises(CapacityError, match="none is left"):
        engine.generate([70] * 600)
    assert len(engine.generate([70] * 598, max_new_tokens=50, temperature=0, min_new_tokens=2).token_ids) == 2
    for several in (torch.ones(2, 3, dtype=torch.long), ["one", "two"], [[70, 71], [72]], [5.5, 6.5], torch.ones(3)):
        with pytest.raises(ConfigError, match="generate_batch"):
            engine.generate(several)
    assert engine.encode(engine.tokenizer("abc")) == engine.encode("abc")


def test_an_engine_without_tokenizer_takes_ids_only(byte_model: Any) -> None:
    bare = KVBoost(byte_model, chunk_size=16)
    assert bare.generate([70, 71], max_new_tokens=2).output_text == ""
    with pytest.raises(ConfigError, match="token ids"):
        bare.generate("text")
    with pytest.raises(ConfigError, match="empty"):
        bare.generate([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality": "high", "recompute_strategy": "guess"}, "recompute_strategy"),
        ({"quality": "high", "recompute_strategy": 7}, "recompute_strategy"),
        ({"quality": "best"}, "quality"),
        ({"recompute_ratio": 1.1}, "recompute_ratio"),
        ({"kv_cache_bits": 7}, "use 16, 8 or 4"),
        ({"remote_url": "ftp://x"}, "redis"),
        ({"chunk_size": 1}, "too small"),
        ({"chunking": "sentences"}, "content"),
        ({"cache_bytes": "many"}, "2GB"),
        ({"cash_bytes": 1}, "cash_bytes is not a setting; did you mean cache_bytes"),
    ],
)
def test_settings_that_cannot_work_say_so(byte_model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVBoost(byte_model, None, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": None}, "prepared by the engine"),
        ({"use_cache": False}, "prepared by the engine"),
        ({"token_healing": True}, "prepared by the engine"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "greedy"),
        ({"boundaries": [10_000]}, "boundaries"),
    ],
)
def test_arguments_that_cannot_work_say_so(engine: KVBoost, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.generate(_TEXT, **arguments)
    assert engine._store.stats().leased == 0


_MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate(_MESSAGES), "give them to chat"),
        (lambda engine: engine.chat("Hi"), "for plain text use generate"),
        (lambda engine: engine.chat(["Hi"]), "a chat is a list of messages"),
        (lambda engine: engine.chat(_MESSAGES[0]), "a chat is a list of messages"),
        (lambda engine: engine.join("abc"), "give it to generate"),
        (lambda engine: engine.generate_batch("abc"), "takes a list of prompts"),
        (lambda engine: engine.generate(None), "a prompt is text or a flat sequence"),
    ],
)
def test_a_prompt_for_another_method_says_which(engine: KVBoost, call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(engine)


def test_results_and_engines_are_printed_for_people(engine: KVBoost) -> None:
    result = engine.generate(_TEXT, max_new_tokens=2, temperature=0)
    assert str(result).startswith(f"{result.output_text}\n[{result.reuse}; first token after ")
    assert str(result.reuse).startswith(f"0 of {len(_TEXT)} tokens reused, ")
    again = engine.generate(_TEXT, max_new_tokens=2, temperature=0)
    assert str(again.reuse).startswith(f"{again.cached_tokens} of {len(_TEXT)} tokens reused (exact), ")
    assert "s instead of about" in str(again.reuse)
    assert (again.reuse.prefill_ms or 0.0) <= again.ttft_ms
    chunks = engine.cache_stats()["hot_chunks"]
    assert repr(engine).startswith(f"<KVBoost llama, torch.float32, quality='exact': {chunks} chunks, ")


def test_loading_errors_are_for_people(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        KVBoost.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot load"):
        KVBoost.from_pretrained(str(tmp_path))
    training = tiny_model("llama").train()
    with pytest.raises(ConfigError, match="eval"):
        KVBoost(training, None)


def test_a_path_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"use KVBoost.from_pretrained\('models/mine'\)"):
        KVBoost("models/mine")


@pytest.mark.parametrize(
    ("settings", "missing", "extra"),
    [
        ({"remote_url": "redis://localhost"}, "redis", "redis"),
        ({"remote_url": "mooncake://localhost:1"}, "mooncake", "mooncake"),
        ({"record_protection": "encrypt"}, "cryptography", "crypto"),
    ],
)
def test_a_missing_extra_is_said_before_a_model_is_loaded(
    settings: dict[str, Any], missing: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "record_protection" in settings:
        key = tmp_path / "key"
        key.touch(mode=0o600)
        key.write_text("00" * 32)
        settings = {**settings, "record_key_file": str(key)}
    found = importlib.util.find_spec
    monkeypatch.setattr(stores, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(ConfigError, match=f"needs the package {missing}.*extra {extra}"):
        KVBoost.from_pretrained("nobody/nowhere", **settings)


def test_a_failing_request_leaks_nothing(engine: KVBoost) -> None:
    engine.warm(_TEXT)

    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("the user's own mistake")

    with pytest.raises(RuntimeError, match="own mistake"):
        engine.generate(_TEXT + "?", max_new_tokens=2, logits_processor=LogitsProcessorList([Broken()]))
    assert engine._store.stats().leased == 0
    assert engine.generate(_TEXT + "?", max_new_tokens=2).cached_tokens > 0


def test_the_returned_cache_is_the_callers_own(engine: KVBoost) -> None:
    first = engine.prefill(_TEXT)  # made the stored chunks
    clean = first.logits.clone()
    second = engine.prefill(_TEXT)  # was made from them
    for spoiled in (first, second):
        for layer in spoiled.cache.layers:
            layer.keys.zero_()
            layer.values.fill_(9.0)
    assert torch.equal(engine.prefill(_TEXT).logits, clean)
    assert torch.equal(KVBoost(engine.model, None, chunk_size=16).prefill(engine.encode(_TEXT)).logits, clean)


def test_the_returned_cache_goes_on_in_transformers(engine: KVBoost) -> None:
    ids = engine.encode(_TEXT)
    first = engine.prefill(ids)
    token = int(first.logits.argmax())
    with torch.no_grad():
        following = engine.model(torch.tensor([[token]]), past_key_values=first.cache).logits[0, -1]
        whole = engine.model(torch.tensor([[*ids, token]])).logits[0, -1]
    assert (following - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_boundaries_of_the_caller_are_kept(engine: KVBoost) -> None:
    document = engine.encode(_TEXT)
    question = engine.encode("what?")
    end = len(document)
    other = engine.encode("why?")
    engine.prefill([*document, *question])
    assert engine.prefill([*document, *other]).reuse.exact_tokens < end
    engine.clear()
    engine.prefill([*document, *question], boundaries=[end])
    assert engine.prefill([*document, *other], boundaries=[end]).reuse.exact_tokens == end


def test_tenants_do_not_meet(byte_model: Any) -> None:
    from kvboost.store import MemoryStore

    store = MemoryStore(10**8)
    one, other = (KVBoost(byte_model, None, chunk_size=16, tenant=name, store=store) for name in ("a", "b"))
    ids = list(range(3, 100))
    one.warm(ids)
    assert other.prefill(ids).reuse.exact_tokens == 0
    assert one.prefill(ids).reuse.exact_tokens > 0


def test_a_custom_chunker_is_taken(byte_model: Any) -> None:
    engine = KVBoost(byte_model, None, chunking=FixedChunker(10))
    engine.warm(list(range(3, 64)))
    assert engine.prefill(list(range(3, 64))).reuse.exact_tokens == 60


def test_nothing_is_kept_without_room(byte_model: Any) -> None:
    engine = KVBoost(byte_model, None, chunk_size=16, cache_bytes=0)
    assert engine.warm(list(range(3, 100))) == 0
    assert engine.prefill(list(range(3, 100))).reuse.exact_tokens == 0


def test_verify_correctness_cannot_pass_without_reuse(byte_model: Any, engine: KVBoost) -> None:
    assert engine.verify_correctness() is True
    assert engine.verify_correctness(_TEXT) is True
    assert engine.cache_stats()["hot_chunks"] == 0
    assert engine.verify_correctness([5]) is False  # one token: nothing to reuse, nothing shown


def test_as_a_context_manager(byte_model: Any) -> None:
    from kvboost.store import MemoryStore

    with KVBoost(byte_model, None, chunk_size=16) as engine:
        engine.warm(list(range(3, 100)))
    assert engine.cache_stats()["hot_chunks"] == 0
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([5, 6])
    shared = MemoryStore(10**8)
    with KVBoost(byte_model, None, chunk_size=16, store=shared) as engine:
        engine.warm(list(range(3, 100)))
    assert shared.stats().chunks > 0, "a store that was given is not the engine's to close"


@pytest.mark.parametrize("broken", ["lease", "put", "used"])
def test_a_failing_store_is_a_miss_and_one_warning(byte_model: Any, broken: str) -> None:
    from kvboost.store import MemoryStore

    class Failing(MemoryStore):
        def __getattribute__(self, name: str) -> Any:
            if name == broken:
                raise OSError("the disk is gone")
            return super().__getattribute__(name)

    ids = list(range(3, 100))
    expected = KVBoost(byte_model, None, chunk_size=16).prefill(ids).logits
    engine = KVBoost(byte_model, None, chunk_size=16, quality="exact", store=Failing(10**8))
    with pytest.warns(RuntimeWarning, match="disk is gone"):
        first = engine.prefill(ids)
    for result in (first, engine.prefill(ids), engine.prefill(ids)):  # a second warning would be an error here
        assert torch.equal(result.logits, expected)
    assert engine.cache_stats()["store_errors"] >= 3


def test_generated_rows_are_reused_only_on_request_and_never_called_bitwise(byte_model: Any) -> None:
    ids = list(range(3, 60))
    for keep, expected in ((False, 57), (True, 64)):  # the prompt to its end
        engine = KVBoost(byte_model, None, chunk_size=16, chunking="fixed", reuse_generated=keep)
        first = engine.generate(ids, max_new_tokens=12, temperature=0, min_new_tokens=12)
        longer = [*ids, *first.token_ids, 7, 8]
        second = engine.prefill(longer)
        assert second.reuse.exact_tokens == expected
        assert second.reuse.bitwise is not keep
        third = engine.prefill([*longer, *range(9, 40)])  # computed behind decoded rows: tainted too
        fourth = engine.prefill([*longer, *range(9, 40)])
        assert third.reuse.bitwise is fourth.reuse.bitwise is not keep
        fresh = KVBoost(byte_model, None, chunk_size=16, chunking="fixed").prefill(longer)
        assert torch.allclose(second.logits, fresh.logits, atol=1e-4)


@pytest.mark.real
def test_trained_model_equals_transformers(smollm2: Any) -> None:
    """A short run; `python -m benchmarks fidelity` does 100 prompts."""
    model, tokenizer = smollm2
    engine = KVBoost(model, tokenizer)
    text = (torch.nn.Module.register_full_backward_hook.__doc__ or "") * 3
    for length in (200, 350):
        ids = tokenizer(text)["input_ids"][:length]
        engine.warm(ids)
        warm = engine.generate(ids, max_new_tokens=24, temperature=0)
        plain = engine.generate(ids, max_new_tokens=24, temperature=0, mode=GenerationMode.BASELINE)
        assert warm.cached_tokens > 0
        assert warm.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": HostTier(10**6)}, "TieredStore"),
        ({"store": object()}, "must be a ChunkStore, got object"),
        ({"store": MemoryStore(10**6), "disk_cache_dir": "."}, "disk_cache_dir is for a store of the engine's own"),
        ({"store": MemoryStore(10**6), "max_chunks": 5}, "max_chunks is for"),
    ],
)
def test_what_an_extension_got_wrong_is_said(byte_model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVBoost(byte_model, **settings)
