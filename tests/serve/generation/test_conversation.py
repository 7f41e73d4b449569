from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvboost import KVBoost
from kvboost.serve.generation import prompts
from kvboost.serve.generation.prompts import ChatPrompts, ReplyMemory
from kvboost.serve.generation.turns import Turn, to_turn
from kvboost.serve.schemas.base import Message
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import Running

_STRIPS_REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def merging_tokenizer() -> Any:
    """Like the byte tokenizer, with merges: a text has many ways to be written in ids."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "abcdefgh" for b in "abcdefgh"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = byte_tokenizer().chat_template
    return tokenizer


def _user(text: str) -> Turn:
    return Turn({"role": "user", "content": text})


def _assistant(text: str) -> Turn:
    return Turn({"role": "assistant", "content": text})


def _chats(tokenizer: Any = None) -> ChatPrompts:
    return ChatPrompts(tokenizer or merging_tokenizer(), min_gap=4)


def _encode(chats: ChatPrompts, *turns: Turn, tenant: str = "t", cache_key: str = "") -> Any:
    return chats.encode(turns, tenant=tenant, cache_key=cache_key)


def test_ids_that_were_produced_are_put_back_for_their_tenant_only() -> None:
    chats = _chats()
    tokenizer = merging_tokenizer()
    first = _encode(chats, _user("hello"))
    produced = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdabcd"]  # not as a tokenizer writes it
    chats.remember(first, reply="abcdabcd", ids=produced)
    turns = (_user("hello"), _assistant("abcdabcd"), _user("more"))
    second = _encode(chats, *turns)
    assert second.token_ids[: len(first.token_ids) + 8] == [*first.token_ids, *produced]
    assert tokenizer.decode(second.token_ids) == second.text
    assert produced not in [_encode(chats, *turns, tenant="u").token_ids[len(first.token_ids) :][:8]]
    assert produced not in [_encode(chats, *turns, cache_key="k").token_ids[len(first.token_ids) :][:8]]


def test_the_end_of_a_reply_is_put_back_where_its_reasoning_was_taken_out() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = _STRIPS_REASONING
    chats = _chats(tokenizer)
    first = _encode(chats, _user("hello"))
    reply = "let me see</think>abcdabcd"
    produced = [tokenizer.convert_tokens_to_ids(letter) for letter in reply.replace(" ", "Ġ")]
    chats.remember(first, reply=reply, ids=produced)
    second = _encode(chats, _user("hello"), _assistant(reply), _user("more"))
    assert "let me see" not in second.text
    assert second.token_ids[: len(first.token_ids) + 8] == [*first.token_ids, *produced[-8:]]
    assert tokenizer.decode(second.token_ids) == second.text


def test_a_reply_whose_ids_are_not_its_text_is_not_kept() -> None:
    chats = _chats()
    first = _encode(chats, _user("hello"))
    chats.remember(first, reply="abcd", ids=[3, 4, 5])
    assert chats.replies.find(tenant="t", cache_key="", before=first.text, reply="abcd") is None


def test_a_tokenizer_that_would_change_the_text_reads_it_as_a_whole() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    chats = _chats(tokenizer)
    marked = Turn({"role": "user", "content": "aaaa bbbb"}, ((4, 300),))
    prompt = _encode(chats, marked)
    assert prompt.token_ids == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


def test_marked_parts_and_messages_end_chunks() -> None:
    tokenizer = merging_tokenizer()
    message = Message.model_validate(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first document abc", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "second"},
            ],
        }
    )
    turn = to_turn(message)
    assert turn.content == "first document abc\nsecond"
    prompt = _encode(_chats(tokenizer), _user("something before that is long"), turn)
    cuts = [tokenizer.decode(prompt.token_ids[:count]) for count in prompt.boundaries]
    assert cuts == [
        "<user>something before that is long",
        "<user>something before that is long\n<user>first document abc",
        "<user>something before that is long\n<user>first document abc\nsecond",
    ]


def test_a_longer_chat_has_the_boundaries_of_the_shorter_one() -> None:
    chats = _chats()
    turns: list[Turn] = []
    before: list[int] = []
    for number in range(12):
        turns += [_user(f"question number {number}"), _assistant(f"answer number {number} of some length")]
        now = _encode(chats, *turns).boundaries
        assert now[: len(before)] == before
        before = now
    assert len(before) == 24


def test_the_memory_of_replies_is_bounded() -> None:
    memory = ReplyMemory(10 * (4 * 10 + prompts._KEY_BYTES))
    for number in range(50):
        memory.remember(tenant="t", cache_key="", before="b", reply=f"reply {number}", ids=range(10))
    kept = [n for n in range(50) if memory.find(tenant="t", cache_key="", before="b", reply=f"reply {n}")]
    assert kept == [45, 46, 47, 48, 49], "each counts twice: behind its text, and alone"
    memory.remember(tenant="t", cache_key="", before="b", reply="too long", ids=range(1000))
    assert memory.find(tenant="t", cache_key="", before="b", reply="too long") is None


@pytest.mark.parametrize("template", ["append", "strips"])
def test_turn_three_still_hits_what_was_decoded(start_server: Callable[..., Running], template: str) -> None:
    tokenizer = merging_tokenizer()
    if template == "strips":
        tokenizer.chat_template = _STRIPS_REASONING
    vocab = len(tokenizer)
    engine = KVBoost(
        tiny_model("llama", vocab_size=vocab, max_position_embeddings=2048),
        tokenizer,
        chunk_size=8,
        quality="exact",
        reuse_generated=True,
    )
    running = start_server(engine)
    letters = {str(tokenizer.convert_tokens_to_ids(letter)): 60.0 for letter in "abcdefgh"}
    messages: list[dict[str, str]] = [{"role": "system", "content": "Answer in letters, and in as many as you like."}]
    cached, prompts = [], []
    with running.openai("no key is needed") as client:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: which letters do you see here?"})
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=40,
                temperature=0.7,
                seed=turn,
                logit_bias=letters,  # type: ignore[arg-type]
            )
            text = answer.choices[0].message.content
            assert text is not None
            assert tokenizer(text)["input_ids"] != list(running.runner.jobs[-1].token_ids)
            retokenised = len(tokenizer(text)["input_ids"])
            assert retokenised < 40, "the ids that were produced are not the tokenizer's"
            messages.append({"role": "assistant", "content": text})
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            prompts.append(answer.usage.prompt_tokens)
    assert cached[0] == 0
    for turn in (1, 2):  # all of the turn before, its reply too, but for the last chunk
        assert cached[turn] > prompts[turn - 1] + 40 - 20, (cached, prompts)


@pytest.mark.real
def test_trained_model_over_http(start_server: Callable[..., Running], smollm2: Any) -> None:
    model, tokenizer = smollm2
    running = start_server(KVBoost(model, tokenizer), model_name="smollm2")
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant. " * 12}]
    cached = []
    with running.openai("no key is needed") as client:
        for question in ("What is the capital of France?", "And of Italy?", "And of Spain?"):
            messages.append({"role": "user", "content": question * 4})
            stream = client.chat.completions.create(
                model="smollm2",
                messages=messages,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            text = ""
            for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if chunk.usage is not None:
                    assert chunk.usage.prompt_tokens_details is not None
                    cached.append(chunk.usage.prompt_tokens_details.cached_tokens or 0)
            messages.append({"role": "assistant", "content": text})
        assert "Paris" in messages[2]["content"]
        assert cached[0] == 0 < cached[1] <= cached[2]
        person = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Ada is 36 years old. Give her name and age as JSON."}],
            temperature=0,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": person}},
        )
        import json

        assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}
        assert answer.choices[0].finish_reason == "stop"
