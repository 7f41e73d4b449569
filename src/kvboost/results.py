"""What requests return: the result of a generation or a prefill, and the report on what was reused for it.

Made by the engine and the scheduler; imported from :mod:`kvboost.types` by everybody else. Invariant: a token counts as
cached only if its KV was not computed for this request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NO_PREFILL = ("waiting", "commit", "decode")  # stages that a prompt's first token does not wait for by itself


@dataclass(frozen=True, slots=True)
class DeclinedLoad:
    """Tokens of a tier that were not loaded, because computing them was expected to be faster."""

    tier: str
    tokens: int
    load_seconds: float
    """Expected time to load them, from the tier's recent loads."""
    compute_seconds: float
    """Expected time to compute them, from recent requests."""


@dataclass(frozen=True)
class ReuseReport:
    """What was reused for one request, and where its time went."""

    exact_tokens: int
    moved_tokens: int
    """Tokens repositioned from elsewhere, the recomputed ones included."""
    recomputed_tokens: int
    """Those of them that were computed after all, to repair the others. A mean over the layers."""
    fresh_tokens: int
    bitwise: bool
    """True if the prompt's KV has the bits of a cold run. Approximate reuse is always False.

    So have the logits of a request that runs alone. Those of requests that are read or decoded together are equal up to
    rounding, unless their runner is deterministic.
    """
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by stage: encode, plan, lease, place, prefill, first_token, ..."""
    reason: str | None = None
    """Why something was not reused; None if there is no such reason."""
    approximate: str | None = None
    """The repair strategy of non-prefix reuse: the answer may differ from a full prefill's. None without it."""
    error_estimate: float | None = None
    """Estimated remaining error: attention times relative change of positions not recomputed. None if unknown."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Exact and moved tokens by the tier they came from: ``"memory"``, ``"disk"``, ``"redis"``, ..."""
    declined_tokens: int = 0
    """Tokens of a tier that were computed, because loading them was expected to take longer."""
    declined: tuple[DeclinedLoad, ...] = ()
    """Which tiers had them, and what loading and computing were expected to take."""
    segments: tuple[tuple[str, int], ...] = ()
    """The prompt from its beginning, as runs of ``exact``, ``moved``, ``recomputed`` or ``fresh`` tokens and their
    lengths. Recomputed ones were moved before; here they are those that were recomputed in all layers."""
    paged: bool = False
    """Whether the KV exceeded ``kv_bytes`` and was paged: equal up to rounding, so not bitwise."""
    plain_ms: float | None = None
    """Milliseconds that computing the whole prompt was expected to take, as recent requests went. None if unknown."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the cache and was not computed: recomputed ones do not count."""
        return self.exact_tokens + self.moved_tokens - self.recomputed_tokens

    @property
    def prefill_ms(self) -> float | None:
        """Milliseconds to the first token, without waiting for other requests; None before there is one."""
        if "first_token" not in self.timings_ms:
            return None
        return sum(time for stage, time in self.timings_ms.items() if stage not in _NO_PREFILL)

    def __str__(self) -> str:
        """One line: what was reused, what that saved, and why it was not more."""
        prompt = self.exact_tokens + self.moved_tokens + self.fresh_tokens
        line = f"{self.cached_tokens:,} of {prompt:,} tokens reused"
        if self.moved_tokens:
            kept = self.moved_tokens - self.recomputed_tokens
            line += f" ({self.exact_tokens:,} exact, {kept:,} approximate; {self.recomputed_tokens:,} recomputed)"
        elif self.exact_tokens:
            line += " (exact)"
        if (took := self.prefill_ms) is not None:
            line += f", {_seconds(took)}"
            if self.plain_ms is not None and self.cached_tokens:
                line += f" instead of about {_seconds(self.plain_ms)}"
        return f"{line}; {self.reason}" if self.reason else line


def _seconds(milliseconds: float) -> str:
    seconds = milliseconds / 1000.0
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.2g} s"


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation. Times count from the moment ``generate`` was entered."""

    output_text: str
    token_ids: tuple[int, ...]
    """The new tokens only."""
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    """``stop`` (end token, stop string or stopping criterion), ``length`` or ``cancelled``."""
    ttft_ms: float
    total_ms: float
    reuse: ReuseReport
    raw: Any = field(default=None, repr=False, compare=False)
    """What ``model.generate`` returned: a tensor, or its output object with ``return_dict_in_generate=True``.

    With beams or several return sequences, ``token_ids`` is the first one and the others are here.
    """

    def __str__(self) -> str:
        """The text, and what it took."""
        times = f"{self.ttft_ms:.0f} ms, {len(self.token_ids)} tokens after {self.total_ms:.0f} ms"
        return f"{self.output_text}\n[{self.reuse}; first token after {times}]"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the cache and was not computed; ``reuse`` has them by kind."""
        return self.reuse.cached_tokens

    @property
    def kv_reuse_ratio(self) -> float:
        """Share of the prompt that was not computed, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def tokens_per_sec(self) -> float:
        """New tokens per second over the whole call, prompt included."""
        return len(self.token_ids) / (self.total_ms / 1000.0)


@dataclass(frozen=True)
class PrefillResult:
    """A prefilled prompt, ready to continue from."""

    logits: torch.Tensor
    """Logits of the last prompt token, [vocab]."""
    cache: Any
    """A ``transformers.Cache`` that belongs to the caller: changing it cannot touch the store."""
    reuse: ReuseReport


@dataclass(frozen=True)
class Score:
    """How probable a text is after a context."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token after those before it: natural logarithms, in float32."""
    is_greedy: bool
    """Whether greedy decoding would give this text."""
    reuse: ReuseReport
    """Of the context, which all continuations share."""
    ranks: tuple[int, ...] = ()
    """Of each token among all that could stand there: 1 for the likeliest."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest ones in its place, with log-probabilities; with ``top_logprobs`` only."""

    @property
    def logprob(self) -> float:
        """Of the whole text: their sum."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True)
class StreamPiece:
    """A piece of streamed text. The last piece carries the finished result."""

    text: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
