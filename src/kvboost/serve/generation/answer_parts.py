"""An answer with one choice as its parts, in the order they are certain.

Used by the endpoints whose answers are made of blocks or items.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvboost.serve.generation.answers import AnswerReader
from kvboost.serve.generation.parts import Part
from kvboost.serve.generation.requests import Answer
from kvboost.serve.generation.token_stream import Ended


async def answer_parts(answer: Answer, reader: AnswerReader) -> AsyncIterator[Part | Ended]:
    """The parts, then the end."""
    async for event in answer.events():
        for part in reader.end() if isinstance(event, Ended) else reader.add(event.text):
            yield part
        if isinstance(event, Ended):
            yield event
