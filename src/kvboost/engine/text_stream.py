"""Streams a generation: text pieces as tokens arrive, whole characters only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvboost.core.costs import StageClock
from kvboost.types import GenerationResult, StreamPiece

_HELD_BACK = "�"  # the replacement character: a multi-byte character is not complete yet


def context_with_silent(decode: Callable[[Sequence[int]], str], context: list[int], silent: list[int]) -> list[int]:
    """What has to stand before the next tokens, so that spaces between words come out right.

    ``silent`` tokens added no text to that of ``context``. Special tokens never do, and are left out: answers of
    thousands of them would be decoded again and again. Some say nothing only where they are (a space at the beginning
    of a text); those are kept.
    """
    both = [*context, *silent]
    return context if decode([*both, *silent]) == decode(both) else both


class PieceStreamer:
    """A Transformers streamer that turns token ids into :class:`StreamPiece` objects.

    Decodes only the last few tokens at a time, so its cost does not grow with the text. The pieces'
    texts joined are the text of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], emit: Callable[[StreamPiece], None]) -> None:
        self._decode = decode
        self._emit = emit
        self._prompt_seen = False
        self._context: list[int] = []  # already emitted, kept so that spaces between words come out right
        self._pending: list[int] = []

    def put(self, value: Any) -> None:
        """Take the prompt (ignored), then every new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._pending.extend(int(i) for i in value.flatten().tolist())
        self._flush(final=False)

    def end(self) -> None:
        """Emit the pending text."""
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        if not self._pending:
            return
        before = self._decode(self._context)
        after = self._decode([*self._context, *self._pending])
        if after.endswith(_HELD_BACK) and not final:
            return
        self._emit(StreamPiece(after[len(before) :], tuple(self._pending)))
        self._context = (
            self._pending if after != before else context_with_silent(self._decode, self._context, self._pending)
        )
        self._pending = []


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
