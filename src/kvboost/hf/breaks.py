"""Where texts have natural ends, read off a tokenizer's vocabulary once.

Made by the engine for its chunker, which knows token ids only. Invariant: the table depends on the vocabulary and its
special tokens alone, so every process with the same tokenizer cuts alike and shares keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.errors import ConfigError
from kvboost.types import Break

_CLOSING = "\"'`)]}*»›”’」』）】"  # may stand after the stop that ends a sentence
_STOPS = (".", "!", "?", "…", "。", "！", "？", "।", "؟", "።")
_SENTENCEPIECE = {"<0x0A>": "\n", "<0x0D>": "\r"}


def break_table(tokenizer: Any) -> npt.NDArray[np.uint8] | None:
    """The :class:`Break` after every token id; None without a tokenizer, or if it does not tell its vocabulary."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    vocab: dict[str, int] = get_vocab() if get_vocab is not None else {}
    if not vocab:
        return None
    table = np.zeros(max(vocab.values()) + 1, dtype=np.uint8)
    byte_level = "Ċ" in vocab and tokenizer.decode([vocab["Ċ"]]) == "\n"
    to_bytes = _byte_level_characters()
    for raw, token_id in vocab.items():
        if raw[-1:].isascii() and raw[-1:].isalnum():
            continue  # most of a vocabulary: nothing ends with a letter
        text = _SENTENCEPIECE.get(raw, raw)
        if byte_level:
            text = bytes(to_bytes[c] for c in raw if c in to_bytes).decode("utf-8", "replace")
        table[token_id] = break_after(text)
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id, token in added.items():  # these are written as they are, in any kind of vocabulary
        table[token_id] = break_after(token.content)
    special = [*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)]
    table[special] = Break.SPECIAL
    table.flags.writeable = False
    return table


def break_after(text: str) -> Break:
    """What ends with a token of this text."""
    body = text.rstrip(" \t\r\n▁")
    lines = text[len(body) :].replace("\r\n", "\n").replace("\r", "\n").count("\n")
    if lines > 1:
        return Break.PARAGRAPH
    if lines == 1:
        return Break.LINE if body else Break.NEWLINE
    return Break.SENTENCE if body.rstrip(_CLOSING).endswith(_STOPS) else Break.NONE


def _byte_level_characters() -> dict[str, int]:
    """How byte-level vocabularies write bytes, since GPT-2: printable ones as themselves, the others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def light_tokenizer(name_or_path: str) -> Any:
    """The fast tokenizer of a model, for a process without one. Raises ConfigError if there is none.

    Transformers' ``AutoTokenizer`` imports torch, which takes seconds and hundreds of megabytes.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name_or_path!r} has no tokenizer.json that can be read ({error})") from error
