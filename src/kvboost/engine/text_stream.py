"""Text out of tokens as they come, and the stream of a single request.

Used by the engine and, for the text of its answers, by the server. Invariants: the pieces of a :class:`Detokenizer`,
joined, are the text of all its tokens; no piece ends within a character.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvboost.core.costs import StageClock
from kvboost.types import GenerationResult, StreamPiece

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

    @property
    def holds_back(self) -> bool:
        """Whether the last token may get more text by those that follow."""
        return bool(self._pending)

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
            self._context = _with_silent(self._decode, self._context, self._pending)
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


def _with_silent(decode: Callable[[Sequence[int]], str], context: list[int], silent: list[int]) -> list[int]:
    """What has to stand before the next tokens, so that spaces between words come out right.

    ``silent`` tokens added no text to that of ``context``. Special tokens never do, and are left out: answers of
    thousands of them would be decoded again and again. Some say nothing only where they are (a space at the beginning
    of a text); those are kept.
    """
    both = [*context, *silent]
    return context if decode([*both, *silent]) == decode(both) else both


class PieceStreamer:
    """A Transformers streamer that turns token ids into :class:`StreamPiece` objects.

    The pieces' texts joined are the text of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], emit: Callable[[StreamPiece], None]) -> None:
        self._detokenizer, self._emit = Detokenizer(decode), emit
        self._prompt_seen = False
        self._text = ""
        self._tokens: list[int] = []  # since the last piece

    def put(self, value: Any) -> None:
        """The prompt, which is passed over, then every new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            self._tokens.append(int(token))
            self._text += self._detokenizer.add(int(token))
        if not self._detokenizer.holds_back:
            self._give()

    def end(self) -> None:
        """Emit the pending text."""
        if self._tokens:
            self._text += self._detokenizer.end()
            self._give()

    def _give(self) -> None:
        self._emit(StreamPiece(self._text, tuple(self._tokens)))
        self._text, self._tokens = "", []


class PieceStream(Iterator[StreamPiece]):
    """Runs ``run(emit, cancelled)`` in a thread, and yields what it emits.

    Closing it, or dropping it, cancels the run at its next step or token.
    """

    def __init__(
        self, run: Callable[[Callable[[StreamPiece], None], Callable[[], bool]], GenerationResult], clock: StageClock
    ) -> None:
        pieces: queue.SimpleQueue[StreamPiece | BaseException] = queue.SimpleQueue()
        cancel = threading.Event()

        handed_out: list[float] = []

        def emit(piece: StreamPiece) -> None:
            pieces.put(piece)
            handed_out.append(clock.elapsed_ms)

        def work() -> None:  # holds only the queue and the event, so a dropped stream can be freed
            try:
                result = run(emit, cancel.is_set)
                if handed_out:  # the first token whose text reached the consumer counts
                    result = replace(result, ttft_ms=handed_out[0])
                pieces.put(StreamPiece("", (), result))
            except BaseException as error:  # noqa: BLE001 - raised in the consumer's thread
                pieces.put(error)

        self._pieces, self._cancel, self._finished = pieces, cancel, False
        self._worker = threading.Thread(target=work, name="kvboost-stream", daemon=True)
        self._worker.start()

    def __next__(self) -> StreamPiece:
        if self._finished:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            self.close()
            raise piece
        if piece.result is not None:
            self.close()
        return piece

    def close(self) -> None:
        """Stop the generation and wait until it has released everything."""
        self._finished = True
        self._cancel.set()
        self._worker.join()

    def __del__(self) -> None:
        self._cancel.set()
