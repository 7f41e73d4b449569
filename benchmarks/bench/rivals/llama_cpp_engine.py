"""llama-cpp-python, whose ``generate`` keeps the last prompt's KV and evaluates what differs."""

from __future__ import annotations

import os
from typing import Any

from .protocol import Answer, Clock


class LlamaCpp:
    """A GGUF file of the same model; its tokens must be the model's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        if not settings.get("gguf"):
            raise RuntimeError("llama.cpp needs the model as a GGUF file; give it with --gguf FILE")
        self.threads = int(os.environ.get("OMP_NUM_THREADS") or _cores())
        self._llama = llama_cpp.Llama(
            model_path=settings["gguf"],
            n_ctx=settings["max_tokens"],
            n_threads=self.threads,
            n_threads_batch=self.threads,
            verbose=False,
        )
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.dtype = None  # a GGUF file has several
        self._last: list[int] = []
        self._checked = False

    def check(self, order: dict[str, Any]) -> None:
        """Whether the file is of a model with these tokens, once."""
        if self._checked:
            return
        found = self._llama.tokenize(order["text"].encode(), add_bos=False, special=True)
        if list(found) != order["tokens"]:
            raise RuntimeError("the GGUF file's tokens are not the model's; give --gguf a file of the same model")
        self._checked = True

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Evaluate what the last prompt does not share."""
        prompt, tokens = order["tokens"], []
        pairs = enumerate(zip(self._last, prompt[:-1]))  # noqa: B905 - one of them is shorter
        shared = next((place for place, (a, b) in pairs if a != b), min(len(self._last), len(prompt) - 1))
        for token in self._llama.generate(prompt, temp=0.0, reset=True):
            tokens.append(int(token))
            clock.token()
            if len(tokens) == order["new"] or token == self._llama.token_eos():
                break
        self._last = prompt
        return Answer(tokens, cached=shared)

    def forget(self) -> None:
        """Drop the last prompt."""
        self._llama.reset()
        self._last = []


def _cores() -> int:
    """Those this process may use, which in a container are not all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make(name: str, settings: dict[str, Any]) -> LlamaCpp:
    """The contestant."""
    return LlamaCpp(settings)
