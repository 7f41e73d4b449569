"""Sees the logits of a vLLM engine, and has it say a given answer. Run by vLLM's Python, in ``vllm_child``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor


class Watched(LogitsProcessor):  # type: ignore[misc]
    """For one request at a time, in the engine's own process."""

    _rows: ClassVar[list[torch.Tensor]] = []
    _forced: ClassVar[list[int] | None] = None

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @classmethod
    def begin(cls, forced: list[int] | None) -> None:
        """Forget what was seen; the next answer is ``forced``, or the model's own."""
        cls._rows, cls._forced = [], forced

    @classmethod
    def write(cls, path: str) -> None:
        """The logits that every token of the last answer was chosen from: [tokens, vocab]."""
        np.save(path, torch.stack(cls._rows).float().numpy())

    def is_argmax_invariant(self) -> bool:
        """No: then greedy requests would not be seen."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept by request."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See them, and leave one token if the answer is given."""
        self._rows.append(logits[0].clone())
        if self._forced is not None:
            token = self._forced[len(self._rows) - 1]
            logits.fill_(-torch.inf)
            logits[0, token] = 0.0
        return logits
