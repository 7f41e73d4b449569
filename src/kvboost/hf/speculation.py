"""Speculation: a draft proposes tokens, the model verifies them in one forward; the loop is Transformers' own.

Used by ``run_generate`` when its arguments name an assistant or prompt lookup. Transformers' loop feeds the whole
prompt in its first forward, whatever a cache holds, and evaluates stopping criteria once for all tokens of a forward.
Here it runs over a proxy of the model that changes both. Invariants: the model itself is not modified; the output ends
at the token where it would end without a draft, and the cache holds all its tokens but the last.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvboost.errors import ConfigError
from kvboost.hf.cache import SlabCache
from kvboost.types import Speculation


class Speculating:
    """A proxy of a model while Transformers decodes with a draft."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: _Steps | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def generate(self, **arguments: Any) -> Any:
        """The model's own ``generate``, run on this proxy."""
        return type(self._model).generate(self, **arguments)

    @property
    def report(self) -> Speculation:
        """How much the draft helped."""
        assert self._steps is not None
        return self._steps.report

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        """As the model's own; the first forward begins where the cache ends."""
        cache = kwargs.get("past_key_values")
        if next_sequence_length is None and cache is not None:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=next_sequence_length, **kwargs)

    def _get_candidate_generator(self, *, generation_config: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        # The draft would look for stop strings too, and has no tokenizer for it.
        generation_config = copy.copy(generation_config)
        generation_config.stop_strings = None
        proposals = self._model._get_candidate_generator(generation_config=generation_config, **kwargs)
        cache = kwargs["model_kwargs"].get("past_key_values")
        if proposals.requires_model_outputs and cache is not None and cache.get_seq_length():
            raise ConfigError(
                "this draft reads the model's states of the whole prompt, which are not kept; "
                "call with mode=GenerationMode.BASELINE, or give another draft"
            )
        return _Counted(proposals, self._steps, max_length=generation_config.max_length)

    def _assisted_decoding(
        self, input_ids: torch.Tensor, *, stopping_criteria: Any, streamer: Any = None, **kwargs: Any
    ) -> Any:
        """Transformers' loop, with stopping criteria evaluated token by token."""
        self._steps = _Steps(input_ids.shape[1], criteria=stopping_criteria, streamer=streamer)
        raw = type(self._model)._assisted_decoding(self, input_ids, stopping_criteria=self._steps, **kwargs)
        if streamer is not None:
            streamer.end()
        return _cut(raw, self._steps.length, prompt=input_ids.shape[1], cache=kwargs.get("past_key_values"))


class _Steps:
    """A proxy of the stopping criteria: passes tokens to them and to the streamer one by one."""

    def __init__(self, prompt: int, *, criteria: Any, streamer: Any) -> None:
        self._criteria, self._streamer = criteria, streamer
        self._accepted: int | None = None
        self.length = prompt
        self._passes = self._proposed = self._taken = 0

    @property
    def report(self) -> Speculation:
        return Speculation(passes=self._passes, proposed=self._proposed, accepted=self._taken)

    def proposed(self, count: int) -> None:
        """A forward over ``count`` proposed tokens begins."""
        self._passes += 1
        self._proposed += count

    def accepted(self, count: int) -> None:
        """The model accepted ``count`` of them."""
        self._accepted = int(count)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        if self._accepted is None:  # older Transformers evaluate proposals too
            return done
        before = self.length
        while self.length < input_ids.shape[1] and not bool(done.any()):
            self.length += 1
            if self._streamer is not None:
                self._streamer.put(input_ids[:, self.length - 1].cpu())
            done = self._criteria(input_ids[:, : self.length], scores, **kwargs)
        self._taken += min(self._accepted, self.length - before)
        self._accepted = None
        return done


class _Counted:
    """A counting proxy of Transformers' candidate generator, made anew for each call.

    Otherwise the next call's forwards, and so their rounding, would depend on this call's text.
    """

    def __init__(self, proposals: Any, steps: _Steps, *, max_length: int) -> None:
        self._proposals, self._steps, self._max_length = proposals, steps, max_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposals, name)

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens so far followed by proposed ones, and the draft's logits if it has any."""
        ids, logits = self._proposals.get_candidates(input_ids, **kwargs)
        # Prompt lookup proposes beyond the end, where the model may have no positions and the cache no capacity.
        ids = ids[:, : max(input_ids.shape[1], self._max_length - 1)]
        count = ids.shape[1] - input_ids.shape[1]
        self._steps.proposed(count)
        return ids, logits[:, :count] if logits is not None and count else None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Called once a forward's tokens are chosen."""
        self._proposals.update_candidate_strategy(input_ids, scores, num_matches)
        self._steps.accepted(num_matches)


def _cut(raw: Any, length: int, *, prompt: int, cache: Any) -> Any:
    """The output of ``generate`` without tokens that the last forward accepted after the end."""
    sequences = raw if isinstance(raw, torch.Tensor) else raw.sequences
    extra = sequences.shape[1] - length
    if extra == 0:
        return raw
    sequences = sequences[:, :length]
    if isinstance(cache, SlabCache):
        cache.crop(-extra)
    if isinstance(raw, torch.Tensor):
        return sequences
    raw.sequences = sequences
    for name in ("scores", "logits"):
        if getattr(raw, name, None) is not None:
            setattr(raw, name, getattr(raw, name)[: length - prompt])
    if not isinstance(cache, SlabCache):
        raw.past_key_values = None  # sliding windows no longer hold the tokens that cutting would need
    return raw
