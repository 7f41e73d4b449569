"""Byte-level tokenizers with a chat template, made on the spot: no download; bytes are tokens, or frequent words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["<pad>", "<s>", "</s>"]
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Any:
    """256 byte tokens after a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    return _wrapped(Tokenizer(models.BPE(vocab=vocab, merges=[])))


def word_tokenizer(texts: Sequence[str], *, vocab_size: int) -> Any:
    """Trained on ``texts``: words are tokens with the blank before them, as real tokenizers have them."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return _wrapped(inner)


def _wrapped(inner: Tokenizer) -> Any:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def pieces_tokenizer() -> Any:
    """As SentencePiece's models are read: words with a mark for the space, and single bytes for everything else."""
    vocab = (
        {"<unk>": 0}
        | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
        | {"▁der": 257, "▁Rest": 258, "x": 259, "▁": 260}
    )
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=False)
