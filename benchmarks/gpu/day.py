"""What the sections of a GPU day share: the model, its engines and prompts, and the list of what was found.

Made by :mod:`benchmarks.exact.gpu_day`, given to each part of each section. Invariants: every part makes its own
engines and closes them; what a part could not do is in the list, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.common.measure import TextSource
from kvboost.engine import KVBoost

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

# The largest difference of two logits, relative to the largest logit, that another order of summation explains.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}

PASSED, FAILED, NOTED, NOT_RUN = "passed", "FAILED", "noted", "not run"
"""How a check ended. What is noted was measured and has no bar; what was not run says why."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    lengths: tuple[int, ...]
    """Tokens of prompts, ascending."""
    rounds: int
    new: int
    """Tokens that are decoded."""
    requests: int
    """Of the loop that looks for growing memory."""
    positions: int | None = None
    """The longest prompt that leaves room for a question and an answer; None without a limit."""

    @property
    def usual(self) -> int:
        """The length of prompts where one is enough."""
        return self.lengths[min(1, len(self.lengths) - 1)]

    def shorter(self, number: int) -> int:
        """The length of the next of several prompts: all different, the usual one first."""
        return max(24 + number, self.usual // (number + 1))


@dataclass
class Findings:
    """What a section found so far."""

    checks: list[dict[str, str]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def check(self, what: str, holds: bool, *, found: str, expected: str) -> None:
        """Something with a bar."""
        self._add(what, PASSED if holds else FAILED, found, expected)

    def note(self, what: str, found: str) -> None:
        """Something without a bar."""
        self._add(what, NOTED, found, "")

    def not_run(self, what: str, why: str) -> None:
        """Something that this machine or model does not have."""
        self._add(what, NOT_RUN, why, "")

    def fail(self, what: str, error: str) -> None:
        """Something that raised."""
        self._add(what, FAILED, error, "no error")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *notes: str) -> None:
        """Figures."""
        cells = [[str(cell) for cell in row] for row in rows]
        self.tables.append({"title": title, "columns": list(columns), "rows": cells, "notes": list(notes)})

    def _add(self, what: str, status: str, found: str, expected: str) -> None:
        self.checks.append({"what": what, "status": status, "found": found, "expected": expected})

    def as_dict(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self)


Counting = Callable[[Callable[[], Any]], tuple[Counter[str], Counter[str]]]
"""Runs some work; counts what it asked of the device by kind, and by name."""


@dataclass(frozen=True)
class Day:
    """What there is to measure."""

    model: Any
    tokenizer: Any
    source: TextSource
    sizes: Sizes
    count: Counting
    reload: Callable[..., KVBoost] | None = None
    """Loads the same model again with these settings; None where that cannot be done."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every engine."""

    @property
    def device(self) -> torch.device:
        """Where prompts go in."""
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    @property
    def why_no_host_tier(self) -> str | None:
        """None if evicted KV may go to host memory."""
        shared = {"cpu": "the CPU", "mps": "MPS"}.get(self.device.type)
        return None if shared is None else f"the model is on {shared}, whose memory is the host's"

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's embeddings."""
        found: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return found

    @property
    def tolerance(self) -> float:
        """What rounding explains in this dtype."""
        return TOLERANCE.get(self.dtype, TOLERANCE[torch.bfloat16])

    def engine(self, **settings: Any) -> KVBoost:
        """A new engine around the model; only exact reuse, if nothing else is said."""
        return KVBoost(self.model, self.tokenizer, **{"quality": "exact", **self.options, **settings})

    def prompt(self, number: int, length: int) -> list[int]:
        """A text that no other number has."""
        return self.source.window(number * (self.sizes.lengths[-1] + 777), length)

    def question(self, number: int, length: int = 32) -> list[int]:
        """A short text from anywhere."""
        return self.source.window(1_000 + number * 1_009, length)

    @torch.no_grad()
    def plain_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Transformers' own logits of the last token, on the host: [vocab]."""
        ids = torch.tensor([list(tokens)], device=self.device)  # [1, tokens]
        return on_host(self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1])

    def synchronize(self) -> None:
        """Until the device has done what it was asked; raises what went wrong there."""
        if self.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def other_answer(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> str | None:
        """Why ``ours`` is another answer than ``theirs``; None if it is the same, or if rounding explains it.

        Where two tokens are about equally likely, rounding decides, and what follows is another text.
        """
        if list(ours) == list(theirs):
            return None
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if same is None:
            return f"{len(ours)} tokens instead of {len(theirs)}"
        logits = self.plain_logits([*prompt, *theirs[:same]])
        gap = float((logits[theirs[same]] - logits[ours[same]]).abs() / logits.abs().max())
        return None if gap <= 2 * self.tolerance else f"another token at {same}, by {gap:.1e} of the largest logit"


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy in host memory."""
    return tensor.detach().to("cpu").float()


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative to the largest number of ``right``; NaN where something is no number."""
    right = on_host(right)
    return float((on_host(found) - right).abs().max() / right.abs().max().clamp_min(1e-30))
