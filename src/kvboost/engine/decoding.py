"""One generation: read the prompt up to its last step, then let Transformers run that step and decode.

Used by the engine for single and batched requests. The time of the first token is taken when the first
token exists; committing new chunks comes after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvboost.core.clock import StageClock
from kvboost.core.prefill import Prefiller, PrefillState
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.generate import end_token_ids, pad_token_id, run_generate, sequences_per_prompt
from kvboost.hf.prompt import PromptEncoder
from kvboost.types import GenerationResult, ReuseReport


@dataclass(frozen=True)
class Request:
    """What to generate, and who watches."""

    boundaries: Sequence[int]
    arguments: dict[str, Any]
    cancelled: Callable[[], bool]

    @property
    def max_new_tokens(self) -> int:
        """Room to keep behind the prompt."""
        return int(self.arguments["max_new_tokens"])


class _FirstToken:
    """Called after every token: stamps the first one, then does what had to wait for it."""

    def __init__(self, clock: StageClock, *, cancelled: Callable[[], bool], then: Callable[[], Any]) -> None:
        self._clock, self._cancelled, self._then = clock, cancelled, then
        self.ttft_ms: float | None = None
        self.was_cancelled = False

    def __call__(self) -> bool:
        if self.ttft_ms is None:
            self._clock.lap("first_token")
            self.ttft_ms = self._clock.elapsed_ms
            self._then()
            self._clock.lap("commit")
        self.was_cancelled = self.was_cancelled or self._cancelled()
        return self.was_cancelled


class Decoder:
    """Generates with one model."""

    def __init__(self, model: Any, *, encoder: PromptEncoder, tokenizer: Any, device: torch.device) -> None:
        self._model = model
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._device = device

    def without_cache(
        self, tokens: list[int], request: Request, clock: StageClock, *, reason: str | None
    ) -> GenerationResult:
        """Plain Transformers."""
        return self.batch_without_cache([tokens], request, clock, reason=reason)[0]

    def batch_without_cache(
        self, prompts: Sequence[list[int]], request: Request, clock: StageClock, *, reason: str | None
    ) -> list[GenerationResult]:
        """Plain Transformers, left-padded."""
        watch = _FirstToken(clock, cancelled=request.cancelled, then=lambda: None)
        reports = [ReuseReport(0, 0, 0, len(tokens), bitwise=True, reason=reason) for tokens in prompts]
        return self._run(prompts, None, request, watch, clock, reports)

    def with_cache(
        self, reading: PrefillState, reader: Prefiller, request: Request, *, keep_decoded: bool
    ) -> GenerationResult:
        """Go on from ``reading``, which must stand at its first step."""
        reader.advance_to_last_step(reading, cancelled=request.cancelled)
        copies = sequences_per_prompt(self._model, request.arguments)
        if copies > 1:
            reader.commit(reading)  # before the cache is multiplied
            reading.cache.batch_repeat_interleave(copies)
        watch = _FirstToken(reading.clock, cancelled=request.cancelled, then=lambda: reader.commit(reading))
        result = self._run([reading.tokens], reading.cache, request, watch, reading.clock, [reading.report()])[0]
        if getattr(result.raw, "past_key_values", None) is reading.cache:
            if reading.paged:  # its pages end with the request
                result = replace(result, raw=replace(result.raw, past_key_values=None))
            else:
                reading.detach()  # the caller has it now: nobody else may write to it
        if keep_decoded and copies == 1:
            reader.commit_decoded(reading, result.token_ids)
        return replace(result, reuse=reading.report())

    def batch(
        self,
        prompts: Sequence[list[int]],
        *,
        read: Callable[[list[int]], tuple[PrefillState, Prefiller]],
        layout: KVLayout,
        request: Request,
        clock: StageClock,
    ) -> list[GenerationResult]:
        """Generate for all prompts together. Each is read alone, so shared prefixes are computed once.

        The prompts stand right-aligned in one cache, padding in front; the last token of each is left to
        the joint forward, where the attention mask hides the padding.
        """
        longest = max(len(tokens) for tokens in prompts)
        joint = SlabCache(layout, capacity=longest + request.max_new_tokens, batch=len(prompts))
        reports: list[ReuseReport] = []
        for row, tokens in enumerate(prompts):
            reading, reader = read(tokens)
            with reading:
                known = len(tokens) - 1
                reader.advance(reading, to=known)
                reader.commit(reading)
                joint.place(longest - len(tokens), reading.cache.rows(0, known), row=row)
                reports.append(replace(reading.report(), timings_ms={}))
        joint.set_length(longest - 1)
        copies = sequences_per_prompt(self._model, request.arguments)
        if copies > 1:
            joint.batch_repeat_interleave(copies)
        watch = _FirstToken(clock, cancelled=request.cancelled, then=lambda: None)
        return self._run(prompts, joint, request, watch, clock, reports)

    def _run(
        self,
        prompts: Sequence[list[int]],
        cache: SlabCache | None,
        request: Request,
        watch: _FirstToken,
        clock: StageClock,
        reports: Sequence[ReuseReport],
    ) -> list[GenerationResult]:
        longest = max(len(tokens) for tokens in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, longest - len(tokens) :] = torch.tensor(tokens)
            mask[row, longest - len(tokens) :] = 1
        decoded = run_generate(
            self._model,
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            cache=cache,
            arguments=request.arguments,
            after_each_token=watch,
            tokenizer=self._tokenizer,
        )
        clock.lap("decode")
        if cache is not None and cache.get_seq_length() >= decoded.sequences.shape[1]:
            raise UnsupportedModelError(
                "Transformers read the prompt again on top of the cache it was given, so this answer is wrong; "
                "call with mode=GenerationMode.BASELINE for these arguments"
            )
        ends = end_token_ids(self._model, request.arguments)
        pad = pad_token_id(self._model, request.arguments)
        per_prompt = decoded.sequences.shape[0] // len(prompts)
        results: list[GenerationResult] = []
        for row, tokens in enumerate(prompts):
            new = _until_end(decoded.sequences[row * per_prompt, longest:].tolist(), ends)
            if len(prompts) > 1 and not (new and new[-1] in ends):
                new = self._without_padding(new, pad, request)
            text = self._encoder.decode(new)
            results.append(
                GenerationResult(
                    output_text=text,
                    token_ids=tuple(new),
                    prompt_token_ids=tuple(tokens),
                    finish_reason=_finish_reason(new, text, ends, request, cancelled=watch.was_cancelled),
                    ttft_ms=watch.ttft_ms if watch.ttft_ms is not None else clock.elapsed_ms,
                    total_ms=clock.elapsed_ms,
                    reuse=replace(reports[row], timings_ms=clock.stages()),
                    raw=decoded.raw,
                    speculation=decoded.speculation,
                )
            )
        return results

    def _without_padding(self, new: list[int], pad: int | None, request: Request) -> list[int]:
        """A batch row that stopped before the others, without what fills it up: cut at its stop string."""
        while new and new[-1] == pad:
            new = new[:-1]
        stops = _stop_strings(request)
        text = self._encoder.decode(new)
        while len(new) > 1 and any(stop in text for stop in stops):
            shorter = self._encoder.decode(new[:-1])
            if not any(stop in shorter for stop in stops):
                break
            new, text = new[:-1], shorter
        return new


def _stop_strings(request: Request) -> list[str]:
    config = request.arguments.get("generation_config")
    stops = request.arguments.get("stop_strings", getattr(config, "stop_strings", None)) or []
    return [stops] if isinstance(stops, str) else list(stops)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """The ids up to and including the first end token: what follows is a batch's padding."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def _finish_reason(new: list[int], text: str, ends: set[int], request: Request, *, cancelled: bool) -> str:
    if new and new[-1] in ends:
        return "stop"
    if cancelled:
        return "cancelled"
    if any(stop in text for stop in _stop_strings(request)):
        return "stop"
    return "length" if len(new) >= request.max_new_tokens else "stop"
