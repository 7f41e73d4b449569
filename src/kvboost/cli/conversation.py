"""A chat that keeps the token ids it has seen, so that every turn finds the ones before it.

Used by ``kvboost chat``. Text that was generated does not always tokenise to the ids it was generated as; a chat that
is rendered and tokenised anew each turn would then miss from the first difference on. Invariant: the prompt
is the template's text, with the ids of earlier turns where the template leaves those turns as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost.errors import ConfigError


class Conversation:
    """The messages of one chat, and their token ids."""

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        """Raises ConfigError if the tokenizer has no chat template."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("this model's tokenizer has no chat template; use kvboost run with the text you want")
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._text = ""  # what the ids below stand for
        self._ids: list[int] = []
        self.boundaries: list[int] = []
        """Where to cut the ids that :meth:`ask` gave last: before the last token of each turn's prompt.

        So the next turn finds the prompt of this one, however short it is, up to its last token, which is always
        computed.
        """

    def ask(self, question: str) -> list[int]:
        """The ids of the chat with one more question, ready for the reply."""
        self._messages.append({"role": "user", "content": question})
        text = str(self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))
        if self._ids and text.startswith(self._text):
            self._ids = [*self._ids, *self._encoded(text[len(self._text) :])]
        else:  # the first turn, or a template that rewrites earlier ones
            self._ids, self.boundaries = self._encoded(text), []
        self._text = text
        self.boundaries = [*self.boundaries, len(self._ids) - 1]
        return list(self._ids)

    def answered(self, ids: Sequence[int]) -> str:
        """Take the ids of the reply; its text."""
        reply = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        self._messages.append({"role": "assistant", "content": reply})
        self._ids = [*self._ids, *ids]
        self._text += str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return reply

    def withdraw(self) -> None:
        """Forget the question that was asked last and got no answer."""
        self._messages.pop()
        self._ids, self._text, self.boundaries = [], "", []  # tokenised anew next time

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]] if text else []
