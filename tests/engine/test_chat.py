from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_SYSTEM = {"role": "system", "content": "You are terse and you never, ever repeat yourself in any answer."}
_USER = {"role": "user", "content": "Tell me about caches, please, in one sentence of moderate length."}


@pytest.fixture
def engine() -> KVBoost:
    return KVBoost(tiny_model("llama", vocab_size=260), byte_tokenizer(), chunk_size=32, quality="exact")


def test_the_next_turn_reuses_everything_up_to_the_last_message(engine: KVBoost) -> None:
    messages = [_SYSTEM, _USER]
    first = engine.chat(messages, max_new_tokens=6, temperature=0)
    messages += [
        {"role": "assistant", "content": "Caches keep what was costly to make, near to where it is used."},
        _USER,
    ]
    second = engine.chat(messages, max_new_tokens=6, temperature=0)
    assert first.cached_tokens == 0
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert second.cached_tokens == len(first.prompt_token_ids), "the reply and the new question are all that is left"


class KeptIds:
    """A chat by hand: each prompt is the ids of the last one and of its reply, and those of the new text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""
        self.ids: list[int] = []
        self.boundaries: list[int] = []  # before the last token of each turn's prompt, which is always computed

    def ask(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith(self.text)
        self.ids += self.tokenizer(text[len(self.text) :], add_special_tokens=False)["input_ids"]
        self.text = text
        self.boundaries.append(len(self.ids) - 1)
        return list(self.ids)

    def answered(self, ids: Sequence[int]) -> str:
        self.ids += ids
        self.text += self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@pytest.mark.parametrize("reuse_generated", [False, True])
def test_a_chat_finds_as_much_as_a_conversation_that_keeps_its_ids(reuse_generated: bool) -> None:
    settings: dict[str, Any] = {"chunk_size": 32, "quality": "exact", "reuse_generated": reuse_generated}
    model = tiny_model("llama", vocab_size=260)
    one, other = (KVBoost(model, byte_tokenizer(), **settings) for _ in range(2))
    conversation, messages = KeptIds(other.tokenizer), []
    no_text = [0, 1, 2, *range(97, 260)]  # all but printable bytes: replies must be tokenised as they were generated
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0, "suppress_tokens": no_text}
    for question in ("Why?", "And then, after all of that, what else?", "No."):
        messages.append({"role": "user", "content": question})
        chat = one.chat(messages, **options)
        kept = other.generate(conversation.ask(messages), boundaries=conversation.boundaries, **options)
        assert chat.prompt_token_ids == kept.prompt_token_ids
        assert chat.cached_tokens >= kept.cached_tokens
        messages.append({"role": "assistant", "content": conversation.answered(kept.token_ids)})
    assert chat.cached_tokens > chat.prompt_tokens / 2


def test_messages_become_boundaries_only_where_they_are_long_enough(engine: KVBoost) -> None:
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 10
    _, boundaries = engine.parts.encoder.encode_chat(short, min_gap=12, template_kwargs={})
    assert boundaries
    assert all(b - a >= 12 for a, b in zip([0, *boundaries], boundaries, strict=False))


def test_the_ends_of_parts_are_boundaries(engine: KVBoost) -> None:
    parts = [{"type": "text", "text": text} for text in ("first passage, ", "second passage.", "why is that so?")]
    tokens, boundaries = engine.parts.encoder.encode_chat(
        [_SYSTEM, {"role": "user", "content": parts}], min_gap=4, template_kwargs={}
    )
    text = engine.tokenizer.decode(tokens)
    assert "<user>first passage, \nsecond passage.\nwhy is that so?\n" in text
    ends = [engine.tokenizer.decode(tokens[:end])[-8:] for end in boundaries]
    assert [end.strip() for end in ends] == ["answer.", "passage,", "passage.", "that so?"]
    with pytest.raises(ConfigError, match="a part of a message is text"):
        engine.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_template_that_rewrites_earlier_turns_still_works(engine: KVBoost) -> None:
    engine.tokenizer.chat_template = (
        "{% if messages|length < 2 %}{{ raise_exception('two at least') }}{% endif %}"
        "{{ messages|length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    result = engine.chat([_SYSTEM, _USER], max_new_tokens=2, temperature=0)
    assert result.finish_reason in ("length", "stop")


def test_mistakes_say_so(engine: KVBoost) -> None:
    with pytest.raises(ConfigError, match="empty"):
        engine.chat([])
    engine.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        engine.chat([_USER])


@pytest.mark.real
def test_trained_model_chat(smollm2: Any) -> None:
    model, tokenizer = smollm2
    engine = KVBoost(model, tokenizer)
    messages = [{"role": "system", "content": "You are a helpful assistant. " * 12}]
    hits = []
    for question in ("What is the capital of France?", "And of Italy?", "And of Spain?"):
        messages.append({"role": "user", "content": question * 4})
        reply = engine.chat(messages, max_new_tokens=12, temperature=0)
        hits.append(reply.cached_tokens)
        messages.append({"role": "assistant", "content": reply.output_text})
    assert "Paris" in messages[2]["content"]
    assert hits[0] == 0 < hits[1] <= hits[2]
