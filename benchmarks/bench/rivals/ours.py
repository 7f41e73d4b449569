"""This package's engine, with the settings of the run."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

import kvboost
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, GenerationResult

from .protocol import Answer, Clock, FirstToken
from .quality import agreement, harm

_LOGITS = {"output_logits": True, "return_dict_in_generate": True}


class Ours:
    """One engine. What it keeps of prompts is what its settings say."""

    def __init__(self, settings: dict[str, Any]) -> None:
        dtype = settings.get("dtype", "auto")
        self._engine = KVBoost.from_pretrained(settings["model"], dtype=dtype, **settings.get("engine", {}))
        self.dtype = str(self._engine.model.dtype).removeprefix("torch.")
        self.versions = {
            "kvboost": kvboost.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Reuse what the settings allow. With ``compare``, also say how near the logits are to a full prefill's.

        The logits take time and memory, so what is compared is not timed.
        """
        compare = bool(order.get("compare"))
        result = self._ask(order, streamer=FirstToken(clock), **(_LOGITS if compare else {}))
        reuse = result.reuse
        extra: dict[str, Any] = {
            "times": clock.times(),
            "exact": reuse.exact_tokens,
            "approximate": reuse.moved_tokens - reuse.recomputed_tokens,
            "recomputed": reuse.recomputed_tokens,
            "moved": reuse.moved_tokens,
            "bitwise": reuse.bitwise,
            "reason": reuse.reason,
        }
        if compare and reuse.moved_tokens:
            extra["quality"] = self._quality(order, result)
        return Answer(list(result.token_ids), cached=result.cached_tokens, extra=extra)

    def _ask(self, order: dict[str, Any], **options: Any) -> GenerationResult:
        return self._engine.generate(
            order["tokens"],
            boundaries=order.get("boundaries", ()),
            max_new_tokens=order["new"],
            temperature=0,
            **options,
        )

    def _quality(self, order: dict[str, Any], result: GenerationResult) -> dict[str, Any]:
        """Against plain Transformers on the same model: compared as far as both answers have the same tokens behind."""
        full = self._ask({**order, "boundaries": ()}, mode=GenerationMode.BASELINE, **_LOGITS)
        pairs = zip(full.token_ids, result.token_ids, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        count = min(len(full.token_ids), len(result.token_ids)) if same is None else same + 1
        logits = [torch.stack([step[0] for step in one.raw.logits[:count]]) for one in (full, result)]
        return {**agreement(*logits), **harm(*logits), "same_answer": full.token_ids == result.token_ids}

    def verify(self, order: dict[str, Any]) -> dict[str, Any]:
        """Whether a warm run has the bits of a cold one."""
        return {"bitwise": self._engine.verify_correctness(order["tokens"])}

    def facts(self, order: dict[str, Any]) -> dict[str, Any]:
        """What a token's KV takes."""
        return {"bytes_per_token": int(self._engine.describe()["bytes per token"])}

    def forget(self) -> None:
        """Empty the cache."""
        self._engine.clear()

    def close(self) -> None:
        """End its threads."""
        self._engine.close()


def make(name: str, settings: dict[str, Any]) -> Ours:
    """The contestant."""
    return Ours(settings)
