"""Transformers' continuous batching (``init_continuous_batching``), one request at a time.

Its block sharing is its prefix cache. The manager is started anew to forget.
"""

from __future__ import annotations

from typing import Any

import transformers

from .protocol import Answer, Clock
from .transformers_plain import dtype_name, end_tokens, load, versions

_PAGE = 32  # tokens
_PROMPTS = 16  # of the longest kind, for which its cache has space


class Batching:
    """A manager that stays up between requests."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = load(settings)
        self.versions, self.dtype = versions(), dtype_name(self.model.dtype)
        self._ends = sorted(end_tokens(self.model))
        self._longest = int(settings["max_tokens"])
        self._manager: Any = None
        self.forget()

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """A streamed request."""
        options: dict[str, Any] = {"eos_token_id": self._ends} if self._ends else {}
        name = self._manager.add_request(order["tokens"], max_new_tokens=order["new"], streaming=True, **options)
        tokens: list[int] = []
        for output in self._manager.request_id_iter(name):
            if output.error:
                raise RuntimeError(output.error)
            tokens = list(output.generated_tokens)
            if tokens:
                clock.token()
            if output.is_finished():
                break
        else:
            raise RuntimeError("its manager ended before the answer did")
        return Answer(tokens, cached=None)

    def forget(self) -> None:
        """A new manager, with an empty cache."""
        self.close()
        # By default it takes most of the machine's memory, and minutes to fill it.
        sizes = transformers.ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=-(-_PROMPTS * self._longest // _PAGE), max_batch_tokens=self._longest
        )
        self._manager = self.model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False), continuous_batching_config=sizes
        )
        self._manager.start()
        self.generate({"tokens": [1] * 8, "new": 2}, Clock())  # the memory is made with the first request

    def close(self) -> None:
        """Stop its thread."""
        if self._manager is not None:
            self._manager.stop(block=True)


def make(name: str, settings: dict[str, Any]) -> Batching:
    """The contestant."""
    return Batching(settings)
