"""How prompts are made of texts: encoded, joined of parts, documents put in an order that extends a cached path.

:class:`kvboost.KVBoost` adds the requests. Invariant: no document's own text or tokens change here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.core.keys import token_array
from kvboost.engine.tenants import TenantView
from kvboost.errors import ConfigError
from kvboost.hf.prompt import Prompt


@dataclass(frozen=True)
class ArrangedPrompt:
    """Documents in the order that begins with most text served before, and the prompt of them."""

    parts: tuple[Prompt, ...]
    """Head, documents, ranks, volatile text, question: for :meth:`KVBoost.join`, or as the text of a chat."""
    order: tuple[int, ...]
    """For each position the document's index as given."""
    served_documents: int
    """The leading documents that stood in this order before, behind the same head."""
    served_tokens: int
    """Their tokens: what is reused exactly behind the head, unless it was evicted."""


class PromptView(TenantView):
    """A tenant's view that makes prompts."""

    def encode(self, prompt: Prompt) -> list[int]:
        """The validated token ids of ``prompt``."""
        return self.parts.encoder.encode(prompt)

    def join(self, parts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
        """A prompt of these parts and where each but the last ends, to be given as ``boundaries``.

        Each part has the same token ids in every prompt and in :meth:`add_documents`, so it is found again at any
        position.
        """
        return self.parts.encoder.join(parts)

    def arrange(
        self,
        *,
        documents: Sequence[Prompt],
        head: Prompt | None = None,
        volatile: Prompt | None = None,
        question: Prompt | None = None,
        keep: tuple[int, int] = (0, 0),
        ranks: str | None = None,
    ) -> ArrangedPrompt:
        """Put documents in an order whose beginning is cached, so that more of the prompt is reused exactly.

        It begins as an order of an earlier call behind the same ``head``; the rest is as given. ``volatile`` is text
        that changes with every request, such as a date: it goes behind the documents. ``keep=(1, 2)`` leaves the first
        document and the last two where they are. ``ranks`` is a line behind the documents, such as
        ``"Most relevant first: {}.\\n"``; ``{}`` becomes the positions of the documents in the order as given,
        "3, 1, 2". Nothing is computed. Call it once for each prompt you send.
        """
        if isinstance(documents, str):
            raise ConfigError("documents is a list of texts; give [text] for a single one")
        first, last = keep
        if first < 0 or last < 0:
            raise ConfigError(f"keep={keep} must be two counts of documents, such as (1, 0); give no negative ones")
        if ranks is not None and ranks.count("{}") != 1:
            raise ConfigError(f"ranks={ranks!r} does not say where the ranks go; put {{}} there, once")
        self._check_open()
        order = self._served.arrange(
            self._digest(head) if head is not None else b"",
            [self._digest(document) for document in documents],
            tokens=lambda index: len(self.parts.encoder.encode_part(documents[index])),
            keep_first=first,
            keep_last=last,
        )
        positions = sorted(range(len(order.indexes)), key=order.indexes.__getitem__)
        named = ranks.replace("{}", ", ".join(str(at + 1) for at in positions)) if ranks and positions else None
        everything = (head, *(documents[index] for index in order.indexes), named, volatile, question)
        parts = tuple(part for part in everything if part is not None)
        return ArrangedPrompt(parts, order.indexes, order.served_documents, order.served_tokens)

    def _digest(self, part: Prompt) -> bytes:
        """Names a text or token ids; texts are not encoded for it."""
        if isinstance(part, str):
            return hashlib.sha256(b"text" + part.encode("utf-8", "surrogatepass")).digest()
        return hashlib.sha256(b"ids" + token_array(self.parts.encoder.encode(part)).tobytes()).digest()
