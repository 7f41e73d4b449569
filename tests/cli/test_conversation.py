"""A chat keeps the ids it has seen."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.cli.conversation import Conversation
from kvboost.errors import ConfigError
from tests.helpers.tokenizer import byte_tokenizer


class MergingTokenizer:
    """Writes ``ab`` as one id where it tokenises text, although a model may also say ``a`` and ``b``."""

    chat_template = "yes"

    def __init__(self, *, keeps: int = 100, end: str = "|") -> None:
        self.keeps, self.end = keeps, end

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        dropped = len(messages) - self.keeps
        texts = [m["role"][0] + ":" + (m["content"] if at >= dropped else "...") for at, m in enumerate(messages)]
        return "".join(text + self.end for text in texts) + "a:"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        ids = []
        while text:
            width = 2 if text.startswith("ab") else 1
            ids.append(1000 if width == 2 else ord(text[0]))
            text = text[width:]
        return {"input_ids": ids}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i == ord("|"))]
        return "".join("ab" if i == 1000 else chr(i) for i in shown)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_keeps_its_ids(ended: bool) -> None:
    tokenizer = MergingTokenizer()
    chat = Conversation(tokenizer)
    first = chat.ask("hi")
    said = ids("xaby")  # the text tokenises to three
    assert chat.answered([*said, *(ids("|") if ended else [])]) == "xaby"
    second = chat.ask("more")
    assert second == [*first, *said, *ids("|u:more|a:")]
    assert tokenizer.decode(second, skip_special_tokens=False) == "u:hi|a:xaby|u:more|a:"
    chat.answered(said)
    third = chat.ask("most")
    assert third[: len(second)] == second
    assert chat.boundaries == [len(first) - 1, len(second) - 1, len(third) - 1]


def test_a_template_that_rewrites_earlier_turns_is_followed() -> None:
    tokenizer = MergingTokenizer(keeps=2)
    chat = Conversation(tokenizer)
    chat.ask("hi")
    chat.answered(ids("xaby"))
    second = chat.ask("more")
    assert tokenizer.decode(second, skip_special_tokens=False) == "u:...|a:xaby|u:more|a:"
    assert chat.boundaries == [len(second) - 1]


def test_a_question_can_be_taken_back() -> None:
    tokenizer = byte_tokenizer()
    chat = Conversation(tokenizer, system="be brief")
    chat.ask("hi")
    chat.answered(tokenizer("well", add_special_tokens=False)["input_ids"])
    expected = chat.ask("right")
    chat.withdraw()
    assert chat.ask("right") == expected
    chat.withdraw()
    chat.ask("wrong")
    chat.withdraw()
    assert (
        tokenizer.decode(chat.ask("right")) == "<system>be brief\n<user>hi\n<assistant>well\n<user>right\n<assistant>"
    )


def test_without_a_template_there_is_no_chat() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(tokenizer)
