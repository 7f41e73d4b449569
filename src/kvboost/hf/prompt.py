"""Turns prompts (text, token ids, chat messages) into token ids and boundaries."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvboost.errors import CapacityError, ConfigError

# Tokenizer outputs that no model takes.
_BOOKKEEPING = ("length", "offset_mapping", "special_tokens_mask")
Prompt = str | Sequence[int] | torch.Tensor | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
_NEIGHBOURS = ("x", "1", " ", "\n", ".", '"')  # a letter, a digit, blanks and marks: tokenizers treat them differently
_CHARACTERS = 256  # enough for any word, and quick for long texts


class PromptEncoder:
    """Encodes prompts for one tokenizer and one model length."""

    def __init__(self, tokenizer: Any, *, max_tokens: int | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of ``prompt``; an empty prompt becomes the begin-of-text token, as in Transformers."""
        if isinstance(prompt, Mapping):  # what a tokenizer returns
            return self._encode_mapping(prompt)
        if isinstance(prompt, str):
            ids = [int(i) for i in self._need_tokenizer()(prompt)["input_ids"]]
        elif isinstance(prompt, torch.Tensor):
            if prompt.dim() > 2 or (prompt.dim() == 2 and prompt.shape[0] != 1):
                raise ConfigError(f"one prompt at a time, got shape {tuple(prompt.shape)}; use generate_batch for more")
            ids = _as_ids(prompt.flatten().tolist())
        else:
            ids = _as_ids(prompt)
        return self._checked(ids)

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> list[int]:
        """Raises ConfigError for keys that would change the KV of these tokens."""
        if "input_ids" not in prompt:
            raise ConfigError(f"a mapping as prompt needs input_ids, this one has {', '.join(prompt)}; add them")
        ids = self.encode(prompt["input_ids"])
        for name, value in prompt.items():
            if name in ("input_ids", *_BOOKKEEPING) or value is None:
                continue
            if name == "attention_mask":
                _check_mask(value, len(ids))
            # Tokenizers return zeros for one text unasked, and generate(text) drops them as well.
            elif name != "token_type_ids" or torch.as_tensor(value).any():
                raise ConfigError(
                    f"the prompt's {name} would change its KV, which the stored KV does not reflect; leave "
                    "it out, or call engine.model.generate(), which reuses nothing"
                )
        return ids

    def encode_part(self, part: Prompt) -> list[int]:
        """Token ids of a part of a prompt: without the tokens that open or close a prompt."""
        if isinstance(part, str):
            ids = self._need_tokenizer()(part, add_special_tokens=False)["input_ids"]
            return self._checked([int(i) for i in ids])
        return self.encode(part)

    def encode_document(self, document: Prompt) -> tuple[list[int], list[int]]:
        """Token ids of a document, and the first and last cut between which they are the same beside any text."""
        if isinstance(document, str) and not document.strip():
            raise ConfigError("a document is empty; leave it out")
        tokens = self.encode_part(document)
        if not isinstance(document, str):
            return tokens, []
        tokenizer = self._need_tokenizer()
        first, last = edge_tokens(document, lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"])
        return tokens, [first, len(tokens) - last] if first + last < len(tokens) else []

    def join(self, parts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
        """Token ids of a prompt of these parts, and where each but the last ends."""
        if isinstance(parts, str):
            raise ConfigError("join() takes a list of texts; a single text is a prompt already, give it to generate()")
        if not parts:
            raise ConfigError("a prompt needs a part at least; give the texts it is made of")
        tokens = self.encode(parts[0])
        ends = []
        for part in parts[1:]:
            ends.append(len(tokens))
            tokens += self.encode_part(part)
        return tokens, ends

    def encode_chat(
        self, messages: Messages, *, min_gap: int, template_kwargs: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Token ids of a chat ready for the reply, and the ends of its messages and their parts, ``min_gap`` apart."""
        tokenizer = self._need_tokenizer()
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise ConfigError(
                'a chat is a list of messages such as {"role": "user", "content": "Hi"}; for plain text use generate()'
            )
        if not messages:
            raise ConfigError("the chat is empty; give at least one message")
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("this tokenizer has no chat template; use generate() with the text you want")

        messages, parts = _flattened(messages)

        def render(part: Messages, **kwargs: Any) -> str:
            return str(tokenizer.apply_chat_template(list(part), tokenize=False, **{**template_kwargs, **kwargs}))

        text = render(messages, add_generation_prompt=True)
        if not getattr(tokenizer, "is_fast", False):  # only fast tokenizers say where a token came from
            return self._checked(tokenizer(text, add_special_tokens=False)["input_ids"]), []
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ends = [end for _, end in encoded["offset_mapping"]]
        ends = _part_ends(text, parts)
        for count in range(1, len(messages) + 1):
            head = _head_of(render, messages[:count])
            if head is not None and text.startswith(head):  # else it rewrites earlier turns: content is still found
                ends.append(len(head))
        boundaries: list[int] = []
        for end in sorted(ends):
            index = bisect_left(token_ends, end)  # a token that goes on behind the end belongs to what it ends
            if index < len(token_ends) and index + 1 - (boundaries[-1] if boundaries else 0) >= min_gap:
                boundaries.append(index + 1)
        return self._checked([int(i) for i in encoded["input_ids"]]), boundaries

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of new tokens, without special ones. Empty where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ConfigError("this engine was made without a tokenizer; give token ids instead of text")
        return self._tokenizer

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            begin = getattr(self._tokenizer, "bos_token_id", None)
            if begin is None:
                raise ConfigError("the prompt is empty and the tokenizer has no begin token; give at least one token")
            ids = [int(begin)]
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ConfigError(
                f"token ids must lie in 0..{self._vocab_size - 1} for this model, got {min(ids)}..{max(ids)}; "
                "was the prompt encoded with another model's tokenizer?"
            )
        self.check_length(len(ids))
        return ids

    def check_length(self, tokens: int) -> None:
        """Raise CapacityError for more tokens than the model reads."""
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise CapacityError(
                f"the prompt has {tokens} tokens, this model reads at most {self._max_tokens}; shorten the prompt"
            )


def _check_mask(mask: Any, tokens: int) -> None:
    values = torch.as_tensor(mask).flatten()
    if values.numel() != tokens:
        raise ConfigError(f"attention_mask has {values.numel()} values for {tokens} tokens; leave it out")
    if not values.bool().all():
        raise ConfigError(
            "attention_mask hides tokens of the prompt; cut the padding off input_ids (generate_batch pads by itself)"
        )


def _as_ids(values: Sequence[Any]) -> list[int]:
    if isinstance(values, Sequence) and values and isinstance(values[0], Mapping):
        raise ConfigError("these are the messages of a chat; give them to chat()")
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise ConfigError(
            "a prompt is text or a flat sequence of integer token ids; for several prompts use generate_batch"
        ) from error


def _flattened(messages: Messages) -> tuple[Messages, list[str]]:
    """The messages with texts for contents, as every template takes them, and the parts that contents consisted of."""
    flat, parts = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [_text_of(part) for part in content]
            message = {**message, "content": "\n".join(texts)}  # as the server joins them
            parts += texts
        flat.append(message)
    return flat, parts


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ConfigError('a part of a message is text, such as {"type": "text", "text": "Hi"}; leave others out')
    return str(part["text"])


def _part_ends(text: str, parts: Sequence[str]) -> list[int]:
    """Where the parts end in a rendered chat. Those that the template has changed are not found."""
    ends, position = [], 0
    for part in parts:
        words = part.strip()
        if words and (found := text.find(words, position)) >= 0:
            position = found + len(words)
            ends.append(position)
    return ends


def _head_of(render: Any, messages: Messages) -> str | None:
    """The rendering of the first messages alone, or None where the template refuses a part of a chat."""
    from jinja2 import TemplateError

    try:
        return str(render(messages, add_generation_prompt=False))
    except TemplateError:
        return None


def edge_tokens(text: str, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> tuple[int, int]:
    """How many tokens at the beginning and at the end of ``text`` may differ beside other text.

    A tokenizer may merge them with their neighbours; what is between does not change. A wrong guess costs a hit, never
    a token: found tokens are compared. ``encode`` is called once, with all texts that are compared.
    """
    head, tail = text[:_CHARACTERS], text[-_CHARACTERS:]
    before = [near + head for near in (*_NEIGHBOURS, head[:1])]
    after = [tail + near for near in (*_NEIGHBOURS, tail[-1:])]
    first, last, *beside = encode([head, tail, *before, *after])
    begin = max(len(first) - _common(first[::-1], other[::-1]) for other in beside[: len(before)])
    end = max(len(last) - _common(last, other) for other in beside[len(before) :])
    return begin, end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
