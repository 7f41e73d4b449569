"""``map``: any number of prompts, in windows, in their order; what they share is computed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from jsonschema import validate
from pydantic import BaseModel
from transformers import LogitsProcessorList

from kvboost import ConfigError, KVBoost
from tests.helpers.tokenizer import byte_tokenizer

Tiny = Callable[..., Any]
_TEXT = torch.randint(3, 97, (80,), generator=torch.Generator().manual_seed(7)).tolist()
# Neighbours share nothing; every second one begins alike.
_PROMPTS = [[*_TEXT[40 * (n % 2) : 40 * (n % 2) + 40], 3 + n] for n in range(9)]
_WANTED: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("window", [1, 4, 100])
def test_results_come_in_the_order_of_the_prompts(window: int, tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=8) as engine:
        alone = [engine.generate(prompt, **_WANTED).token_ids for prompt in _PROMPTS]
        found = list(engine.map(iter(_PROMPTS), window=window, progress=False, **_WANTED))
    assert [result.prompt_token_ids for result in found] == [tuple(prompt) for prompt in _PROMPTS]
    assert [result.token_ids for result in found] == alone


def test_what_prompts_share_is_computed_once_however_they_are_mixed(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=8, chunking="fixed") as engine:
        list(engine.map([[5], [6]], progress=False, max_new_tokens=1))  # the first window probes the model
        computed: list[int] = []
        hook = engine.model.get_input_embeddings().register_forward_hook(
            lambda layer, ids, out: computed.append(ids[0].numel())
        )
        list(engine.map(_PROMPTS, progress=False, max_new_tokens=1, temperature=0))
        hook.remove()
    assert sum(computed) == 2 * 40 + len(_PROMPTS)


def test_no_more_than_a_window_is_taken_from_the_prompts(tiny: Tiny) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for number, prompt in enumerate(_PROMPTS):
            taken.append(number)
            yield prompt

    with KVBoost(tiny("llama")) as engine:
        results = engine.map(prompts(), window=3, progress=False, **_WANTED)
        assert taken == []
        next(results)
        assert taken == [0, 1, 2]
        for _ in range(3):
            next(results)
        assert taken == [0, 1, 2, 3, 4, 5]


def test_a_prompt_may_have_arguments_of_its_own(tiny: Tiny) -> None:
    free = {"max_new_tokens": 9, "temperature": 0, "eos_token_id": None}
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer()) as engine:
        longest = engine.generate(_TEXT, **free).token_ids
        letters = engine.tokenizer("ab", add_special_tokens=False)["input_ids"]
        alternating = {"prefix_allowed_tokens_fn": lambda _, ids: [letters[len(ids) % 2]]}
        items: list[Any] = [
            _TEXT,
            (_TEXT, {"max_new_tokens": 2}),
            (_TEXT, {"eos_token_id": longest[4]}),
            (_TEXT, alternating),
            (_TEXT, {**alternating, "stop_strings": "bab"}),
            (_TEXT, {"logits_processor": LogitsProcessorList([lambda ids, scores: scores * -1])}),
        ]
        found = [result.token_ids for result in engine.map(items, progress=False, **free)]
    assert found[0] == longest
    assert found[1] == longest[:2]
    assert found[2] == longest[: longest.index(longest[4]) + 1]
    assert found[3] == (*letters * 4, letters[0])
    assert found[4] == tuple(letters * 2)
    assert found[5][0] != longest[0]


def test_a_chat_is_a_prompt(tiny: Tiny) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer()) as engine:
        (found,) = engine.map([messages], progress=False, **_WANTED)
        assert found.prompt_token_ids == engine.chat(messages, **_WANTED).prompt_token_ids


def test_chats_find_what_chat_has_stored(tiny: Tiny) -> None:
    """Their messages are cut where those of a chat are, so that the chunks are the same."""
    rules, document = "Be brief. " * 7, "The mill burned down in 1911. " * 9
    chats = [
        [{"role": "system", "content": rules}, {"role": "user", "content": document}, {"role": "user", "content": end}]
        for end in ("When?", "Where was it?", "Why did it burn?")
    ]
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer()) as engine:
        engine.chat(chats[0], **_WANTED)
        for found in engine.map(chats[1:], progress=False, **_WANTED):
            assert found.reuse.exact_tokens > len(rules) + len(document)


def test_a_prompt_that_cannot_be_used_is_named_and_what_came_before_its_window_is_kept(tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine:
        results = engine.map([*_PROMPTS[:3], []], window=2, progress=False, **_WANTED)
        assert len([next(results), next(results)]) == 2
        with pytest.raises(ConfigError, match="^prompt 3: "):
            next(results)


_ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Zürich"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}


class _Yes(BaseModel):
    yes: bool


def test_answers_follow_their_schemas_and_others_are_as_without(tiny: Tiny) -> None:
    free = {"max_new_tokens": 64, "do_sample": True}
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer(), chunk_size=8) as engine:
        plain = [result.token_ids for result in engine.map(_PROMPTS, progress=False, **_WANTED)]
        torch.manual_seed(3)
        for result in engine.map(_PROMPTS, progress=False, schema=_ANSWER, window=4, **free):
            validate(json.loads(result.output_text), _ANSWER)
            assert result.finish_reason == "stop"
        (result,) = engine.map(_PROMPTS[:1], progress=False, schema=_ANSWER, eos_token_id=5, **free)
        assert result.finish_reason == "stop", "the end that a schema allows is not the caller's only"
        mixed: list[Any] = [
            (prompt, {"schema": _Yes, "max_new_tokens": 64}) if n % 2 else (prompt, {"schema": None})
            for n, prompt in enumerate(_PROMPTS)
        ]
        found = list(engine.map(mixed, progress=False, schema=_ANSWER, **_WANTED))
    for n, result in enumerate(found):
        if n % 2:
            _Yes.model_validate_json(result.output_text)
        else:
            assert result.token_ids == plain[n]


def test_schemas_that_cannot_be_followed_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVBoost(tiny("llama", vocab_size=260), byte_tokenizer()) as engine:
        for schema, said in (
            ({"type": "nothing"}, "this schema cannot be followed"),
            ("object", "give a JSON schema as a dict"),
        ):
            with pytest.raises(ConfigError, match=f"^prompt 0: .*{said}"):
                list(engine.map(["a"], schema=schema))
        with pytest.raises(ConfigError, match="give one"):
            list(engine.map(["a"], schema=_ANSWER, prefix_allowed_tokens_fn=lambda _, ids: [5]))
        monkeypatch.setattr("kvboost.engine.structured.is_installed", lambda: False)
        with pytest.raises(ConfigError, match=r"extra structured"):
            list(engine.map(["a"], schema=_ANSWER))


@pytest.mark.parametrize("item", [("hi", "there"), [{"role": "user"}], [{"content": "x"}], 5], ids=str)
def test_what_is_no_prompt_is_named(item: Any, tiny: Tiny) -> None:
    engine = KVBoost(tiny("llama", vocab_size=260), byte_tokenizer())
    with engine, pytest.raises(ConfigError, match="^prompt 1: "):
        list(engine.map(["a", item], progress=False, **_WANTED))


def test_wrong_calls_are_refused_at_once(tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine:
        with pytest.raises(ConfigError, match=r"map\(\) takes many prompts"):
            engine.map("a text")
        with pytest.raises(ConfigError, match="window=0"):
            engine.map(_PROMPTS, window=0)
    with pytest.raises(ConfigError, match="closed"):
        engine.map(_PROMPTS)
