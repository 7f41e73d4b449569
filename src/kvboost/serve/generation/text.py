"""Text out of tokens as they come: whole characters only, and nothing of a stop string.

Used by token streams and by the readers of answers. Invariants: the pieces of a :class:`Detokenizer`,
joined, are the text of all its tokens; no piece of a :class:`StopCutter` holds any part of a stop string; every class
looks at a character a bounded number of times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvboost.engine.text_stream import context_with_silent

_BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not one yet
_MAX_HELD = 64  # tokens that are no text together; then they are given out as they are
_MAX_RUN = 3  # replacement characters that can still become one character: its bytes but the last


class Detokenizer:
    """Decodes a few tokens at a time, so its cost does not grow with the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # already given out, kept so that spaces between words come out right
        self._before = ""  # the text of the context
        self._pending: list[int] = []
        self._given = 0  # characters of the pending tokens that were given out

    def add(self, token_id: int) -> str:
        """The text that is certain now."""
        self._pending.append(token_id)
        text = self._decode([*self._context, *self._pending])
        if not text.endswith(_BROKEN) or len(self._pending) > _MAX_HELD:
            return self._settle(text)
        if not text.startswith(self._before):
            return ""  # decoders that write a whole run of bytes as broken until its last character is complete
        certain = text[len(self._before) :]
        run = len(certain) - len(certain.rstrip(_BROKEN))
        certain = certain[: len(certain) - min(run, _MAX_RUN)]
        piece, self._given = certain[self._given :], max(self._given, len(certain))
        return piece

    def end(self) -> str:
        """What was held back."""
        return self._settle(self._decode([*self._context, *self._pending])) if self._pending else ""

    def _settle(self, text: str) -> str:
        piece = text[len(self._before) + self._given :]
        if len(text) > len(self._before):
            self._context = self._context_of(text)
        else:
            self._context = context_with_silent(self._decode, self._context, self._pending)
        self._before = self._decode(self._context)
        self._pending, self._given = [], 0
        return piece

    def _context_of(self, text: str) -> list[int]:
        """The fewest of the last tokens that say by themselves what they say in ``text``.

        A space that begins a text is dropped by some decoders, and part of a character is none.
        """
        for before in (0, 1):
            context = [*self._context[len(self._context) - before :], *self._pending]
            if (own := self._decode(context)) and text.endswith(own):
                return context
        return [*self._context, *self._pending][-_MAX_HELD:]


class StopCutter:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """The text that is certain not to belong to a stop string. Nothing after one was found."""
        if self.found is not None:
            return ""
        self._held += text
        starts = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            cut, self.found = min(starts)
            piece, self._held = self._held[:cut], ""
            return piece
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece

    def end(self) -> str:
        """What was held back, if no stop string came of it."""
        piece, self._held = self._held, ""
        return piece


class TagFinder:
    """Looks for a tag in text as it comes, and holds back what may be the beginning of it."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """The text that is certain to be before the tag, and what follows it: None until it was found."""
        before, found, rest = (self._held + text).partition(self._tag)
        if found:
            self._held = ""
            return before, rest
        cut = len(before) - _overlap(before, self._tag)
        self._held = before[cut:]
        return before[:cut], None

    def end(self) -> str:
        """What was held back, if no tag came of it."""
        piece, self._held = self._held, ""
        return piece


class BlankHolder:
    """Holds back blanks until other text follows, so that those at an end can be dropped."""

    def __init__(self, *, drop_first: bool = False) -> None:
        self.drop_first = drop_first
        """Whether blanks before the first other text are dropped."""
        self._begun = False
        self._blanks: list[str] = []

    def add(self, text: str) -> str:
        """The text up to its last character that is no blank."""
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return ""
        before = self.end()
        if not self._begun and self.drop_first:
            before, body = "", body.lstrip()
        self._begun = True
        self._blanks.append(text[len(text.rstrip()) :])
        return before + body

    def end(self) -> str:
        """The blanks that were held back."""
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function that gives the bytes of a token, which need not be whole characters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    if '"ByteLevel"' in json.dumps(decoder):
        table = {char: byte for byte, char in _byte_characters().items()}

        def of_byte_level(token_id: int) -> bytes:
            token = tokenizer.convert_ids_to_tokens(token_id) or ""
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return str(token).encode()  # an added token, written as it is

        return of_byte_level

    def of_pieces(token_id: int) -> bytes:
        token = str(tokenizer.convert_ids_to_tokens(token_id) or "")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return of_pieces


def _byte_characters() -> dict[int, str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}
