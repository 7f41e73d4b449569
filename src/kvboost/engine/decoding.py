"""Runs Transformers' ``generate`` over prompts and caches, and turns its output into results.

Used by :mod:`kvboost.engine.generation`. Invariant: a sequence of a batch has the tokens it would have alone, without
the padding after its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvboost.core.costs import StageClock
from kvboost.errors import UnsupportedModelError
from kvboost.hf.generate import end_token_ids, pad_token_id, run_generate
from kvboost.hf.prompt import PromptEncoder
from kvboost.types import GenerationResult, ReuseReport


def _nothing() -> None:
    pass


class FirstToken:
    """Called after every token: records the time of the first one, then runs what had to wait for it.

    ``exists`` runs as soon as there is a token, ``then`` once the caller has it too. Transformers hands a token to a
    streamer before it looks at the stopping criteria, and from 5.23 on after that.
    """

    def __init__(
        self,
        clock: StageClock,
        *,
        cancelled: Callable[[], bool],
        exists: Callable[[], Any] = _nothing,
        then: Callable[[], Any] = _nothing,
    ) -> None:
        self.clock = clock
        self._cancelled, self._exists, self._then = cancelled, exists, then
        self._awaited = 1
        self.ttft_ms: float | None = None
        self.was_cancelled = False

    def __call__(self) -> bool:
        if self.ttft_ms is None:
            self.clock.lap("first_token")
            self.ttft_ms = self.clock.elapsed_ms
            self._exists()
            self._arrived()
        self.was_cancelled = self.was_cancelled or self._cancelled()
        return self.was_cancelled

    def over(self, streamer: Any) -> Any:
        """The streamer to give to Transformers instead of this one."""
        self._awaited += 1
        return _Handing(streamer, self._arrived)

    def _arrived(self) -> None:
        self._awaited -= 1
        if self._awaited == 0:
            self._then()
            self.clock.lap("commit")


class _Handing:
    """A streamer that passes everything on, and calls back once the first new token is handed over."""

    def __init__(self, streamer: Any, handed_over: Callable[[], None]) -> None:
        self._streamer, self._handed_over = streamer, handed_over
        self._count = 0

    def put(self, value: Any) -> None:
        """The prompt comes first, then every new token."""
        self._streamer.put(value)
        self._count += 1
        if self._count == 2:
            self._handed_over()

    def end(self) -> None:
        self._streamer.end()


class Decoder:
    """Decodes with one model."""

    def __init__(self, model: Any, *, encoder: PromptEncoder, tokenizer: Any, device: torch.device) -> None:
        self._model, self._encoder, self._tokenizer, self._device = model, encoder, tokenizer, device

    def run(
        self,
        prompts: Sequence[list[int]],
        cache: Any,
        arguments: dict[str, Any],
        watch: FirstToken,
        reports: Sequence[ReuseReport],
    ) -> list[GenerationResult]:
        """A result for each prompt. ``cache`` holds each prompt up to its last step; None if nothing is cached."""
        if arguments.get("streamer") is not None:
            arguments = {**arguments, "streamer": watch.over(arguments["streamer"])}
        longest = max(len(tokens) for tokens in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, tokens in enumerate(prompts):
            ids[index, longest - len(tokens) :] = torch.tensor(tokens)
            mask[index, longest - len(tokens) :] = 1
        decoded = run_generate(
            self._model,
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            cache=cache,
            arguments=arguments,
            after_each_token=watch,
            tokenizer=self._tokenizer,
        )
        watch.clock.lap("decode")
        if cache is not None and cache.get_seq_length() >= decoded.sequences.shape[1]:
            raise UnsupportedModelError(
                "Transformers computed the prompt again on top of the given cache, so this answer is wrong; "
                "call with mode=GenerationMode.BASELINE for these arguments"
            )
        per_prompt = decoded.sequences.shape[0] // len(prompts)
        results: list[GenerationResult] = []
        for index, tokens in enumerate(prompts):
            stopped = decoded.stopped.get(index) if per_prompt == 1 else None
            new = decoded.sequences[index * per_prompt, longest:stopped].tolist()
            new, finish_reason = self._ended(new, arguments, padded=len(prompts) > 1, cancelled=watch.was_cancelled)
            results.append(
                GenerationResult(
                    output_text=self._encoder.decode(new),
                    token_ids=tuple(new),
                    prompt_token_ids=tuple(tokens),
                    finish_reason=finish_reason,
                    ttft_ms=watch.ttft_ms if watch.ttft_ms is not None else watch.clock.elapsed_ms,
                    total_ms=watch.clock.elapsed_ms,
                    reuse=replace(reports[index], timings_ms=watch.clock.stages()),
                    raw=decoded.raw,
                    speculation=decoded.speculation,
                )
            )
        return results

    def _ended(
        self, new: list[int], arguments: dict[str, Any], *, padded: bool, cancelled: bool
    ) -> tuple[list[int], str]:
        """The tokens of a sequence without a batch's padding, and why it ended."""
        ends, stops = end_token_ids(self._model, arguments), _stop_strings(arguments)
        stopped = bool(stops) and self._contains(new, stops)
        if padded and stopped:
            # Before any end token is looked for: the padding behind a stop string may be the end token.
            new = new[: bisect_left(range(1, len(new) + 1), True, key=lambda n: self._contains(new[:n], stops)) + 1]
        new = _until_end(new, ends)
        if new and new[-1] in ends:
            return new, "stop"
        pad = pad_token_id(self._model, arguments)
        while padded and not stopped and new and new[-1] == pad:
            new = new[:-1]
        if cancelled:
            return new, "cancelled"
        return new, "stop" if stopped or len(new) < int(arguments["max_new_tokens"]) else "length"

    def _contains(self, tokens: list[int], stops: Sequence[str]) -> bool:
        text = self._encoder.decode(tokens)
        return any(stop in text for stop in stops)


def _stop_strings(arguments: dict[str, Any]) -> list[str]:
    config = arguments.get("generation_config")
    stops = arguments.get("stop_strings", getattr(config, "stop_strings", None)) or []
    return [stops] if isinstance(stops, str) else list(stops)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """The ids up to and including the first end token: what follows is a batch's padding."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids
