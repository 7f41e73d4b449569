"""Tags and blanks in text as it comes, and the bytes of tokens.

Used by token streams and by the readers of answers. Invariant: every class looks at a character a bounded number of
times.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


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
        cut = len(before) - overlap(before, self._tag)
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


def overlap(text: str, stop: str) -> int:
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
