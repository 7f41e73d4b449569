"""Natural ends as the vocabularies of tokenizers tell them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvboost.hf.breaks import break_after, break_table
from kvboost.types import Break
from tests.helpers.tokenizer import byte_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word", Break.NONE),
        ("", Break.NONE),
        (" ", Break.NONE),
        ("\t", Break.NONE),
        (",", Break.NONE),
        (".", Break.SENTENCE),
        (' end."', Break.SENTENCE),
        ("?)", Break.SENTENCE),
        ("。", Break.SENTENCE),
        ("\n", Break.NEWLINE),
        ("\n    ", Break.NEWLINE),
        ("\r\n", Break.NEWLINE),
        ("\r", Break.NEWLINE),
        (".\n", Break.LINE),
        (" {\r\n", Break.LINE),
        ("\n\n", Break.PARAGRAPH),
        (".\n\n", Break.PARAGRAPH),
        ("\n\n\n", Break.PARAGRAPH),
        ("\r\n\r\n", Break.PARAGRAPH),
        ("\n  \n  ", Break.PARAGRAPH),
        (")\n\n    ", Break.PARAGRAPH),
        ("\nword", Break.NONE),
    ],
)
def test_the_end_of_a_tokens_text_decides(text: str, expected: Break) -> None:
    assert break_after(text) is expected


def byte_level(*, merges: list[tuple[str, str]]) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", *alphabet, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def sentencepiece() -> Any:
    pieces = ["<unk>", "<s>", "<0x0A>", "<0x41>", "▁", "▁the", "end", ".", "▁.", "\n", "\n\n", "Ċ", "▁▁"]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


def kinds(tokenizer: Any, tokens: list[str]) -> list[int]:
    table = break_table(tokenizer)
    assert table is not None
    return [int(table[token_id]) for token_id in tokenizer.convert_tokens_to_ids(tokens)]


def test_byte_level_vocabularies_with_merged_ends() -> None:
    tokenizer = byte_level(merges=[("Ċ", "Ċ"), (".", "ĊĊ"), (".", "Ċ"), ("Ċ", "Ġ"), ("ã", "Ģ"), ("ãĢ", "Ĥ")])
    ids = tokenizer("a.\n\nb", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", ".ĊĊ", "b"]
    assert kinds(tokenizer, ["a", "Ċ", "Ġ", ".", "ĊĊ", ".ĊĊ", ".Ċ", "ĊĠ", "ãĢĤ", "ãĢ", "<s>"]) == [
        Break.NONE,
        Break.NEWLINE,
        Break.NONE,
        Break.SENTENCE,
        Break.PARAGRAPH,
        Break.PARAGRAPH,
        Break.LINE,
        Break.NEWLINE,
        Break.SENTENCE,
        Break.NONE,  # a part of a character
        Break.SPECIAL,
    ]


def test_sentencepiece_vocabularies() -> None:
    """Newlines as themselves or as bytes; a letter that byte-level vocabularies write for one is a letter here."""
    tokenizer = sentencepiece()
    found = kinds(tokenizer, ["<0x0A>", "<0x41>", "▁", "▁the", ".", "▁.", "\n", "\n\n", "Ċ", "▁▁", "<s>"])
    assert found == [
        Break.NEWLINE,
        Break.NONE,
        Break.NONE,
        Break.NONE,
        Break.SENTENCE,
        Break.SENTENCE,
        Break.NEWLINE,
        Break.PARAGRAPH,
        Break.NONE,
        Break.NONE,
        Break.SPECIAL,
    ]


def test_added_tokens_are_special_or_written_as_they_are() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<tool>", special=False), AddedToken("\n\n")])
    assert kinds(tokenizer, ["<|end|>", "<tool>", "\n\n", "</s>"]) == [
        Break.SPECIAL,
        Break.NONE,
        Break.PARAGRAPH,
        Break.SPECIAL,
    ]


def test_without_a_tokenizer_or_its_vocabulary_there_is_no_table() -> None:
    assert break_table(None) is None
    assert break_table(object()) is None


def test_nobody_changes_the_table() -> None:
    """The keys of an engine are made from its digest once."""
    table = break_table(byte_tokenizer())
    assert table is not None
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1
