"""``kvboost.attach``: the same call gives the same answer, and what was read before is not read again."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

import kvboost
from kvboost import Attached, ConfigError, KVBoost
from kvboost.core.prefill import Prefiller
from kvboost.hf.attention import UnsupportedAttentionError
from kvboost.hf.joint import JointPrefill
from kvboost.types import GenerationMode

Tiny = Callable[..., Any]
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a tokenizer with ``padding_side="left"`` gives them."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.fixture
def model(tiny: Tiny) -> Any:
    return tiny("llama")


@pytest.fixture
def attached(model: Any) -> Iterator[Attached]:
    with kvboost.attach(model, chunk_size=16) as found:
        yield found


def reused(engine: KVBoost) -> int:
    return int(engine.cache_stats()["cache_hits"])


KNOWN = text(1, 80)
PROMPT = KNOWN + text(2, 12)
ROWS = [KNOWN + text(3, 5), KNOWN + text(4, 30), text(5, 20), KNOWN + text(3, 5)]


class _Last(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 95, dtype=torch.bool)


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": torch.tensor([PROMPT])},
        {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT))},
        {"inputs": torch.tensor([PROMPT]), "max_new_tokens": None, "max_length": 97},
        {"inputs": torch.tensor([PROMPT]), "max_new_tokens": None},
        {
            "inputs": torch.tensor([PROMPT]),
            "max_new_tokens": None,
            "generation_config": GenerationConfig(max_length=96),
        },
        {"inputs": torch.tensor([PROMPT]), "max_length": 110, "generation_config": GenerationConfig(max_new_tokens=5)},
        {"inputs": torch.tensor([PROMPT]), "num_beams": 3, "num_return_sequences": 2},
        {"inputs": torch.tensor([PROMPT]), "do_sample": True, "num_return_sequences": 3},
        {"inputs": torch.tensor([PROMPT]), "do_sample": True, "temperature": 0.7, "top_k": 5},
        {"inputs": torch.tensor([PROMPT]), "stopping_criteria": StoppingCriteriaList([_Last()])},
        {"inputs": torch.tensor([PROMPT]), "repetition_penalty": 1.3, "use_cache": True},
        padded(ROWS),
        {**padded(ROWS), "num_beams": 2},
        {**padded(ROWS), "num_return_sequences": 2, "do_sample": True},
        padded([KNOWN[:40], KNOWN[:1]]),
        {"inputs": torch.tensor([ROWS[0], ROWS[3]])},
    ],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")  # with plain Transformers too
def test_a_warm_call_gives_what_the_model_alone_gives(model: Any, arguments: dict[str, Any]) -> None:
    arguments = {**_GREEDY, **arguments}

    def ask() -> torch.Tensor:
        torch.manual_seed(0)
        found: torch.Tensor = model.generate(**arguments)
        return found

    plain = ask()
    with kvboost.attach(model, chunk_size=16) as attached:
        cold = ask()
        warm = ask()
        assert reused(attached.engine) > 0
    for found in (cold, warm):
        assert type(found) is type(plain)
        assert found.tolist() == plain.tolist()
    assert ask().tolist() == plain.tolist()


def test_only_what_is_new_is_read(attached: Attached, model: Any) -> None:
    read: list[int] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        model.generate(torch.tensor([PROMPT]), **(_GREEDY | {"max_new_tokens": 1}))
        assert sum(read) == len(PROMPT)
        read.clear()
        model.generate(torch.tensor([PROMPT + text(9, 3)]), **(_GREEDY | {"max_new_tokens": 1}))
        assert sum(read) == 3
        read.clear()
        model.generate(**padded([PROMPT + text(10, 20)] * 4), **(_GREEDY | {"max_new_tokens": 1}))
        assert sum(read) == 19 + 4  # a group of equal prompts is read once, but for the last token of each
    finally:
        hook.remove()


def test_the_output_object_is_transformers_own(attached: Attached, model: Any) -> None:
    for given in ({"inputs": torch.tensor([PROMPT])}, padded(ROWS)):
        found = model.generate(**given, **_GREEDY, return_dict_in_generate=True, output_scores=True)
        assert found.sequences.shape[0] == found.scores[0].shape[0]
        assert len(found.scores) == 8
        assert found.past_key_values.get_seq_length() == found.sequences.shape[1] - 1


def test_a_streamer_gets_the_prompt_and_every_token(attached: Attached, model: Any) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    for _ in range(2):
        streamer = Streamer()
        found = model.generate(torch.tensor([PROMPT]), **_GREEDY, streamer=streamer)
        assert streamer.got == [*found[0].tolist(), -1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda given, model: {"inputs_embeds": model.get_input_embeddings()(given["input_ids"])}, "one tensor"),
        (lambda given, model: {**given, "past_key_values": model(given["input_ids"][:, :5]).past_key_values}, "engine"),
        (lambda given, model: {**given, "use_cache": False}, "use_cache"),
        (lambda given, model: {**given, "generation_config": GenerationConfig(output_hidden_states=True)}, "hidden"),
        (lambda given, model: {**given, "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        (lambda given, model: {**padded(ROWS[:2]), "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        (lambda given, model: {**padded(ROWS[:2]), "custom_generate": _own_loop}, "custom_generate"),
        (lambda given, model: {**given, "attention_mask": torch.tensor([[1] * 90 + [0, 1]])}, "hides more"),
        (lambda given, model: {**given, "max_length": 92, "max_new_tokens": None}, None),
        (lambda given, model: {"input_ids": torch.tensor([[0, 5, 6]])}, "padding"),
    ],
)
def test_what_cannot_be_reused_is_passed_on_untouched(
    model: Any,
    change: Callable[[dict[str, Any], Any], dict[str, Any]],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"input_ids": torch.tensor([PROMPT])}

    def ask() -> list[Any] | str:
        try:
            found: list[Any] = model.generate(**{**_GREEDY, **change(given, model)}).tolist()
            return found
        except ValueError as error:
            return str(error)

    plain = ask()
    with kvboost.attach(model, chunk_size=16) as attached, caplog.at_level(logging.INFO, "kvboost"):
        assert ask() == plain
        assert ask() == plain
        assert reused(attached.engine) == 0
    said = [record.getMessage() for record in caplog.records if "without reuse" in record.getMessage()]
    assert len(said) == 1
    assert reason is None or reason in said[0]


def _own_loop(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """Decoding of the caller's: reads the prompt as it likes."""
    return torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(dim=-1)], dim=1)


def test_the_models_own_configuration_counts(model: Any) -> None:
    before = copy.deepcopy(model.generation_config)
    try:
        for change in ({"use_cache": False}, {"max_new_tokens": 5}):
            changed = GenerationConfig(**{**before.to_dict(), **change})
            given = {**padded(ROWS[:2]), **_GREEDY, "max_length": 120}
            del given["max_new_tokens"]
            alone = {"inputs": given["input_ids"][1:], "do_sample": False, "max_length": 120}
            model.generation_config = changed
            plain = model.generate(**given).tolist(), model.generate(**alone).tolist()
            model.generation_config = before
            with kvboost.attach(model, chunk_size=16):
                model.generation_config = changed
                for _ in range(2):
                    assert (model.generate(**given).tolist(), model.generate(**alone).tolist()) == plain
                model.generation_config = before
    finally:
        model.generation_config = before


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")
def test_gradient_checkpointing_and_prompt_tuning_are_passed_on(attached: Attached, tiny: Tiny) -> None:
    model = copy.deepcopy(attached.engine.model)
    with kvboost.attach(model, chunk_size=16) as own:
        model.train()
        model.gradient_checkpointing_enable()
        assert model.generate(**padded(ROWS[:2]), **_GREEDY).shape == (2, len(ROWS[1]) + 8)
        model.gradient_checkpointing_disable()
        model.eval()
        prepare = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = lambda *args, **given: prepare(*args, **given)
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        assert own.engine.cache_stats()["hot_chunks"] == 0


def test_a_wrapper_put_over_it_stays(model: Any) -> None:
    attached = kvboost.attach(model)
    ours = model.generate
    model.generate = wrapper = lambda *args, **given: ours(*args, **given)
    with pytest.raises(ConfigError, match="attached already"):
        kvboost.attach(model)
    attached.detach()
    assert vars(model).pop("generate") is wrapper


def test_weights_that_change_invalidate_by_themselves(model: Any) -> None:
    model = copy.deepcopy(model)  # others are given the same one
    with kvboost.attach(model, chunk_size=16) as attached:
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        fresh = copy.deepcopy(model)
        assert model.generate(torch.tensor([PROMPT]), **_GREEDY).tolist() == (
            fresh.generate(torch.tensor([PROMPT]), **_GREEDY).tolist()
        )
        assert reused(attached.engine) == 0


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_an_optimizer_step_invalidates(model: Any, how: str) -> None:
    """Fused optimizers, the default of Transformers' Trainer, write to weights without a trace in the tensors."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **{how: True})
    other = torch.nn.Linear(2, 2)
    unrelated, version = torch.optim.AdamW(other.parameters(), fused=True), other.weight._version
    with kvboost.attach(model, chunk_size=16) as attached:
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        other(torch.ones(2)).sum().backward()
        unrelated.step()
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        known = reused(attached.engine)
        assert known > 0
        model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
        optimizer.step()
        fresh = copy.deepcopy(model)
        assert model.generate(torch.tensor([PROMPT]), **_GREEDY).tolist() == (
            fresh.generate(torch.tensor([PROMPT]), **_GREEDY).tolist()
        )
        assert reused(attached.engine) == known
    assert other.weight._version == version  # it is no business of ours


@pytest.mark.parametrize("prompts", [padded([PROMPT]), padded(ROWS[:2])])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_forward_in_autocast_reads_the_prompt_in_it_too(
    model: Any, prompts: dict[str, torch.Tensor], autocast: bool
) -> None:
    """As accelerate sets it for training in mixed precision."""
    model = copy.deepcopy(model)
    seen: list[bool] = []

    def ask() -> Any:
        seen.clear()
        return model.generate(**prompts, **_GREEDY).tolist()

    with kvboost.attach(model, chunk_size=16) as attached:
        plain_precision = ask()
        model.forward = torch.autocast("cpu", torch.bfloat16, enabled=autocast)(model.forward)
        model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        cold = reused(attached.engine)  # rows of a batch reuse each other
        found = ask()
        assert seen
        assert set(seen) == {autocast}
        assert (reused(attached.engine) == 2 * cold) == autocast  # what was read in another precision is not reused
        assert ask() == found
        assert reused(attached.engine) > 3 * cold
    assert ask() == found
    assert autocast or found == plain_precision


def test_a_token_that_pads_and_ends_is_no_padding(model: Any) -> None:
    """In chats it often ends every message, and smolagents gives no attention mask."""
    prompt = torch.tensor([[*PROMPT[:40], 0, *PROMPT[40:]]])
    given = {**_GREEDY, "eos_token_id": [0, 2]}
    plain = model.generate(prompt, **given)
    with kvboost.attach(model, chunk_size=16) as attached:
        for _ in range(2):
            assert model.generate(prompt, **given).tolist() == plain.tolist()
        assert reused(attached.engine) > 0


def test_a_copy_of_the_model_has_its_own_generate(attached: Attached, model: Any) -> None:
    copied = copy.deepcopy(model)
    model.generate(torch.tensor([PROMPT]), **_GREEDY)
    before = attached.engine.cache_stats()["cache_hits"]
    copied.generate(torch.tensor([PROMPT]), **_GREEDY)
    assert attached.engine.cache_stats()["cache_hits"] == before


def test_the_engine_beside_it_asks_the_model_itself(attached: Attached, model: Any) -> None:
    """Without reuse it must not come back to the attached ``generate``."""
    engine = model.kvboost
    answer = engine.generate(PROMPT, mode=GenerationMode.BASELINE, **_GREEDY)
    assert answer.reuse.exact_tokens == 0
    assert engine.cache_stats()["hot_chunks"] == 0
    assert engine.generate(PROMPT, **_GREEDY).token_ids == answer.token_ids


def test_the_model_gets_its_generate_back(model: Any) -> None:
    own = inspect.signature(model.generate)
    attached = kvboost.attach(model)
    assert inspect.signature(model.generate) == own
    with pytest.raises(ConfigError, match="attached already"):
        kvboost.attach(model)
    with pytest.raises(ConfigError, match="from_pretrained"):
        kvboost.attach("some/model")
    with pytest.raises(ConfigError, match="a model comes first"):
        kvboost.attach(object(), model)
    attached.detach()
    attached.detach()
    assert "generate" not in vars(model)
    assert not hasattr(model, "kvboost")
    with kvboost.attach(model):
        pass
    assert "generate" not in vars(model)


def test_sliding_windows_and_sparse_attention_in_a_padded_batch(tiny: Tiny) -> None:
    for family in ("gemma3_text", "deepseek_v32"):
        model = tiny(family)
        plain = model.generate(**padded(ROWS[:3]), **_GREEDY)
        with kvboost.attach(model, chunk_size=16):
            for _ in range(2):
                assert model.generate(**padded(ROWS[:3]), **_GREEDY).tolist() == plain.tolist()


def test_the_best_of_several_beams_may_end_early(model: Any) -> None:
    """Its sequence is shorter than what the cache holds by then."""
    prompt, found = torch.tensor([PROMPT]), set()
    for end in range(3, 97):
        given = {"max_new_tokens": 8, "do_sample": False, "num_beams": 4, "eos_token_id": end, "pad_token_id": 0}
        plain = model.generate(prompt, length_penalty=-4.0, **given)
        if plain.shape[1] < prompt.shape[1] + 8:
            with kvboost.attach(model):
                for _ in range(2):
                    assert torch.equal(model.generate(prompt, length_penalty=-4.0, **given), plain)
            found.add(plain.shape[1])
        if len(found) == 2:
            return
    raise AssertionError("no beam ended early")


def test_a_model_that_was_cast_afterwards_runs_without_reuse(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(tiny("llama"))
    prompt = torch.tensor([PROMPT])
    with kvboost.attach(model):
        model.generate(prompt, **_GREEDY)
        model.to(torch.bfloat16)
        answer = model.generate(prompt, **_GREEDY)
    assert torch.equal(answer, model.generate(prompt, **_GREEDY))
    assert [record.levelname for record in caplog.records if "make a new engine" in record.message] == ["WARNING"]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_inference_mode_leaves_nothing_that_others_cannot_write(family: str, tiny: Tiny) -> None:
    model, prompt, other = tiny(family), torch.tensor([PROMPT]), torch.tensor([text(9, 40)])
    plain = [model.generate(ids, **_GREEDY) for ids in (prompt, other)]
    with kvboost.attach(model, chunk_size=16) as attached:
        with torch.inference_mode():
            assert torch.equal(model.generate(prompt, **_GREEDY), plain[0])
        for ids, expected in zip((prompt, other), plain, strict=True):
            assert torch.equal(model.generate(ids, **_GREEDY), expected)
        assert len(attached.engine.score(PROMPT, [[5, 6]])) == 1


@pytest.mark.parametrize("name", ["attention_dropout", "dropout", "resid_pdrop"])
def test_dropout_is_drawn_for_every_call(name: str, tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    with kvboost.attach(model) as attached:
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        before = attached.engine.cache_stats()
        model.train()
        setattr(model.config, name, 0.1)
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        assert attached.engine.cache_stats() == before


def test_a_closed_engine_reads_nothing(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    first = kvboost.attach(model)
    kept = model.generate
    model.kvboost.close()
    answer = kept(torch.tensor([PROMPT]), **_GREEDY)
    assert first.engine.cache_stats()["hot_chunks"] == 0
    first.detach()
    with kvboost.attach(model):
        assert torch.equal(model.generate(torch.tensor([PROMPT]), **_GREEDY), answer)


def test_a_forward_that_was_set_is_asked_for_its_autocast_once(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    calls: list[int] = []
    with kvboost.attach(model):
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        hook = model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
        model.generate(torch.tensor([PROMPT]), **_GREEDY)
        hook.remove()
    assert len(calls) == _GREEDY["max_new_tokens"]


SHORT = [text(30, 90), *(KNOWN[:20] + text(30 + i, 3 + i) for i in range(6)), KNOWN[:20] + text(31, 4)]


@contextmanager
def attached_as_on_an_accelerator(model: Any) -> Iterator[Attached]:
    """Steps as there, on the CPU."""
    with kvboost.attach(model, chunk_size=16, numerics="fast") as attached:
        runner = attached.engine.parts.runner
        runner.unmasked, runner.joins = "lower right", True
        assert attached.engine.parts.batches.joint_prefill, "its probe has run"
        yield attached


@pytest.mark.parametrize("failure", [None, RuntimeError("no memory"), UnsupportedAttentionError("it changed")])
def test_short_prompts_of_a_batch_share_a_forward_on_an_accelerator(
    failure: Exception | None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(tiny("llama"))
    plain = model.generate(**padded(SHORT), **_GREEDY)
    with attached_as_on_an_accelerator(model):
        if failure is not None:

            def failing(*_: Any) -> torch.Tensor:
                raise failure

            monkeypatch.setattr(JointPrefill, "append", failing)
        seen: list[int] = []
        model.get_decoder().register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        assert torch.equal(model.generate(**padded(SHORT), **_GREEDY), plain)
        assert len(seen[: seen.index(1)]) == (2 if failure is None else 7), "the first one, and the others together"
        assert torch.equal(model.generate(**padded(SHORT), **_GREEDY), plain)
        assert caplog.text.count("one by one: a joint step failed") == (failure is not None)


def test_long_prompts_of_a_batch_have_one_cache_at_a_time(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.engine.attach._MOST", 200)
    model = copy.deepcopy(tiny("llama"))
    rows = [KNOWN + text(40 + i, 20) for i in range(6)]
    plain = model.generate(**padded(rows), **_GREEDY)
    held: list[int] = []
    with attached_as_on_an_accelerator(model) as attached:
        monkeypatch.setattr(
            JointPrefill,
            "append",
            lambda self, tokens, caches, own=JointPrefill.append: (held.append(len(caches)), own(self, tokens, caches))[
                1
            ],
        )
        assert torch.equal(model.generate(**padded(rows), **_GREEDY), plain)
        assert set(held) == {2}, "two of 100 tokens"
        assert attached.engine._store.stats().leased == 0


def test_a_batch_that_ends_early_gives_everything_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("llama"))
    with attached_as_on_an_accelerator(model) as attached:
        model.generate(**padded(SHORT), **_GREEDY)
        commit, calls = Prefiller.commit, 0

        def interrupted(self: Prefiller, state: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            commit(self, state)

        monkeypatch.setattr(Prefiller, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**padded([[*row, 5, 6, 7] for row in SHORT]), **_GREEDY)
        assert attached.engine._store.stats().leased == 0
