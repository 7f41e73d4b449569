"""Streams a generation: text pieces as tokens arrive, whole characters only."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvboost.types import GenerationResult, StreamPiece

_HELD_BACK = "�"  # the replacement character: a multi-byte character is not complete yet


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
        """Emit what was held back."""
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        if not self._pending:
            return
        before = self._decode(self._context)
        after = self._decode([*self._context, *self._pending])
        if after.endswith(_HELD_BACK) and not final:
            return
        self._emit(StreamPiece(after[len(before) :], tuple(self._pending)))
        # A context that decodes to nothing (special tokens) would lose the next piece's leading space.
        self._context = self._pending if after != before else [*self._context, *self._pending]
        self._pending = []


def stream_pieces(
    run: Callable[[Callable[[StreamPiece], None], Callable[[], bool]], GenerationResult],
) -> Iterator[StreamPiece]:
    """Run ``run(emit, cancelled)`` in a thread and yield what it emits; closing the iterator cancels it."""
    pieces: queue.SimpleQueue[StreamPiece | BaseException] = queue.SimpleQueue()
    cancel = threading.Event()

    def work() -> None:
        try:
            result = run(pieces.put, cancel.is_set)
            pieces.put(StreamPiece("", (), result))
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, who raises it
            pieces.put(error)

    worker = threading.Thread(target=work, name="kvboost-stream", daemon=True)
    worker.start()
    try:
        while True:
            piece = pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            yield piece
            if piece.result is not None:
                return
    finally:
        cancel.set()
        worker.join()
