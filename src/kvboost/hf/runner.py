"""Forward passes of the model over a cache: the one operation everything else is built on.

Called by the prefill. Invariant: the same tokens over the same cache give the same bits: in tiles however they are cut
into steps, else in the same steps.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from kvboost.hf.attention import attending
from kvboost.hf.cache import SlabCache
from kvboost.hf.code_digest import is_compiled
from kvboost.hf.layers import cache_name, decoder_of, without_peft
from kvboost.hf.lower_right import LowerRight
from kvboost.hf.numerics.tiles import Tiles
from kvboost.hf.streams import timing_event


class ModelRunner:
    """Forward passes of one causal language model."""

    def __init__(self, model: Any, tiles: Tiles | None = None) -> None:
        """With ``tiles``, what :meth:`append` computes does not depend on where its step begins."""
        self.model, self.tiles = model, tiles
        self.unmasked: str | None = None
        """How steps run without a mask on an accelerator, if they do."""
        self.joins = False
        """Whether such a step may have rows of several sequences: where no bits are promised."""
        # A PEFT model passes on what its own signature does not name. Without this every row would be projected onto
        # the vocabulary, and the last one's bits would depend on how many there are.
        self._base = without_peft(model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(self._base.forward).parameters
        self.cache_name = cache_name(model)
        """The argument of the model that takes a cache."""
        # The decoder without its vocabulary projection: enough for a step whose logits are not needed.
        self._decoder = decoder_of(model)

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def upload(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids [n] where the model is; those that are there are not copied."""
        return torch.as_tensor(tokens, device=self.device)

    def mark(self) -> torch.Event | None:
        """An event behind all that the calling thread has asked the model's first device for; None on the CPU."""
        return timing_event(self.device)

    @torch.no_grad()
    def append(self, tokens: Sequence[int] | torch.Tensor, cache: Any, *, logits: bool) -> torch.Tensor | None:
        """Compute ``tokens`` after what the cache holds. Returns the last token's logits [vocab] if ``logits``."""
        ids = self.upload(tokens).view(1, -1)
        with self._step(cache, ids.shape[1]):
            return self.run(ids, cache, logits=logits)

    @torch.no_grad()
    def all_logits(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        """Compute ``tokens`` after what the cache holds. Returns the logits after each, [tokens, vocab]."""
        ids = self.upload(tokens).view(1, -1)
        with self._step(cache, ids.shape[1], head=True):
            return self.run_rows(ids, cache, torch.arange(ids.shape[1], device=ids.device))

    @torch.no_grad()
    def decode(self, token: int, cache: Any) -> torch.Tensor:
        """The logits [vocab] after one new token, in a forward as ``generate`` makes it: not in tiles."""
        logits = self.run(torch.tensor([[token]], device=self.device), cache, logits=True)
        assert logits is not None
        return logits

    @contextmanager
    def first_forward(self, cache: Any, tokens: int) -> Iterator[None]:
        """Within this block the model's first forward, of ``tokens`` tokens, is a step as :meth:`append` makes it."""
        if not ((self.tiles or self.unmasked) and isinstance(cache, SlabCache)):
            yield
            return
        step = ExitStack()

        def before(*_: Any) -> None:
            enters.remove()
            step.enter_context(self._step(cache, tokens))

        def after(*_: Any) -> None:
            leaves.remove()
            step.close()

        # Not of the decoder alone: models that also see make masks before they call theirs.
        enters = self._base.register_forward_pre_hook(in_this_thread(before))
        leaves = self._base.register_forward_hook(in_this_thread(after))
        try:
            yield
        finally:
            enters.remove()
            leaves.remove()
            step.close()

    def has_compiled_layers(self) -> bool:
        """Whether a layer was compiled by itself: it does not follow plans, and would get what stands for a mask."""
        return any(
            is_compiled(module) or is_compiled(vars(module).get("forward")) for module in self._decoder.modules()
        )

    def _step(self, cache: Any, tokens: int, *, head: bool = False) -> AbstractContextManager[Any]:
        if not isinstance(cache, SlabCache):
            return nullcontext()
        if self.tiles is not None:
            return self.tiles.step(cache, tokens, head=head)
        if self.unmasked is None or self.has_compiled_layers():
            return nullcontext()
        return attending(LowerRight(cache.get_seq_length(), whole_sums=self.unmasked == "whole sums"))

    @torch.no_grad()
    def prefill_plain(self, tokens: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Plain Transformers: the whole prompt in one step. Returns the last logits [vocab] and the cache."""
        ids = torch.as_tensor(tokens, device=self.device).view(1, -1)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, use_cache=True, **keep)
        return output.logits[0, -1], getattr(output, self.cache_name)

    @torch.no_grad()
    def last_logits(self, tokens: Sequence[int], cache: Any, *, keep: int) -> torch.Tensor:
        """The logits after each of the last ``keep`` of ``tokens``, [keep, vocab]. ``cache`` may be None."""
        ids = torch.as_tensor(tokens, device=self.device).view(1, -1)
        wanted = {"logits_to_keep": keep} if self._takes_logits_to_keep else {}
        logits: torch.Tensor = self.model(
            input_ids=ids, **{self.cache_name: cache}, use_cache=cache is not None, **wanted
        ).logits
        return logits[0, -keep:]

    def run(self, ids: torch.Tensor, cache: Any, *, logits: bool, **inputs: Any) -> torch.Tensor | None:
        """One forward of ``ids`` [1, tokens] over ``cache``. Returns the last token's logits [vocab] if ``logits``."""
        if not logits:
            self._decoder(input_ids=ids, **{self.cache_name: cache}, use_cache=True, **inputs)
            return None
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, **{self.cache_name: cache}, use_cache=True, **keep, **inputs)
        last: torch.Tensor = output.logits[0, -1]
        return last

    def run_rows(self, ids: torch.Tensor, cache: Any, rows: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """One forward of ``ids`` [1, tokens] over ``cache``. Returns the logits of these ``rows``, [rows, vocab]."""
        keep = {"logits_to_keep": rows} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, **{self.cache_name: cache}, use_cache=True, **keep, **inputs)
        logits: torch.Tensor = output.logits[0]
        return logits if self._takes_logits_to_keep else logits[rows]

    def run_batch(self, ids: torch.Tensor, cache: Any, **inputs: Any) -> torch.Tensor:
        """One forward of ``ids`` [batch, tokens] over ``cache``. Returns each last token's logits, [batch, vocab]."""
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, **{self.cache_name: cache}, use_cache=True, **keep, **inputs)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for this thread; in any other it changes nothing, also if torch calls it while it is removed here."""
    owner = threading.get_ident()

    def guarded(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return guarded
