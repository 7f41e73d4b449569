"""Plain Transformers, and Transformers with a DynamicCache that is kept by hand.

``plain`` is what the documentation shows: ``model.generate``. ``kept-cache`` is the best a careful user does without a
library: the caches of the last prompts are kept, the one that shares most is cropped, and only the rest is computed, by
calls of the model alone.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .protocol import Answer, Clock, FirstToken

_KEPT = 4  # caches at a time
_WORTH = 16  # tokens that must be shared before a cache is used again


def load(settings: dict[str, Any]) -> Any:
    """The model as ``from_pretrained`` gives it, on the accelerator if there is one."""
    dtype = settings.get("dtype", "auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=dtype if dtype == "auto" else getattr(torch, dtype)
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval()


def dtype_name(dtype: Any) -> str:
    """A dtype as settings have it."""
    return str(dtype).rpartition(".")[2]


def versions() -> dict[str, str]:
    """What these contestants run on."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def end_tokens(model: Any) -> set[int]:
    """The tokens at which this model's answers end."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


class Plain:
    """``model.generate`` on every prompt."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = load(settings)
        self.versions, self.dtype = versions(), dtype_name(self.model.dtype)

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Compute everything."""
        ids = torch.tensor([order["tokens"]], device=self.model.device)  # [1, prompt]
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=order["new"],
            do_sample=False,
            streamer=FirstToken(clock),
        )
        return Answer(out[0, ids.shape[1] :].tolist())

    def forget(self) -> None:
        """Nothing is kept."""


class KeptCache:
    """Caches of the last prompts, kept with their tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = load(settings)
        self.versions, self.dtype = versions(), dtype_name(self.model.dtype)
        self._ends = end_tokens(self.model)
        self._kept: list[tuple[list[int], Any]] = []  # the last used comes last

    @torch.no_grad()
    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Crop the cache that shares most, and compute the rest."""
        prompt: list[int] = order["tokens"]
        shared, cache = self._nearest(prompt)
        held, answer = list(prompt), []
        ids = prompt[shared:]
        while True:
            step = torch.tensor([ids], device=self.model.device)  # [1, new ids]
            out = self.model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            answer.append(int(out.logits[0, -1].argmax()))
            clock.token()
            if len(answer) == order["new"] or answer[-1] in self._ends:
                break
            ids = answer[-1:]
            held += ids
        self._kept = [*self._kept[1 - _KEPT :], (held, cache)]
        return Answer(answer, cached=shared)

    def _nearest(self, prompt: list[int]) -> tuple[int, Any]:
        """A cache with the tokens it shares with the prompt, all but the last at most. It is no longer kept."""
        best, found = 0, None
        for number, (tokens, _) in enumerate(self._kept):
            pairs = enumerate(zip(tokens, prompt))  # noqa: B905 - one of them is shorter
            shared = next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(prompt)))
            if min(shared, len(prompt) - 1) > best:
                best, found = min(shared, len(prompt) - 1), number
        if found is None or best < _WORTH:
            return 0, transformers.DynamicCache(config=self.model.config)
        tokens, cache = self._kept.pop(found)
        if surplus := len(tokens) - best:
            cache.crop(-surplus)
        return best, cache

    def forget(self) -> None:
        """Drop all caches."""
        self._kept.clear()


def make(name: str, settings: dict[str, Any]) -> Plain | KeptCache:
    """One of the two."""
    return Plain(settings) if name == "plain" else KeptCache(settings)
