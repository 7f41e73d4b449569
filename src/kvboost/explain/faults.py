"""Why the reuse of a prompt ends where it does, and how many tokens that costs.

Used by :mod:`kvboost.explain.report`. The cost of a fault is what would be reused exactly without it: text behind
a changing value counts as far as an earlier prompt has it in the same order. Invariant: no token is counted twice.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvboost.core.keys import common_prefix
from kvboost.explain.differences import Decode, Run, Slot, aligned_runs, clipped, read_slot
from kvboost.explain.replay import LoggedPrompt, Replayed
from kvboost.extend import TokenArray

_SLOT_TOKENS = 64
"""A changing value is no longer than this; anything else that differs is other content."""
_SLOT_TEXT_TOKENS = 24
"""The same for a value that looks like neither a date nor a number nor an id."""
_REPLY_TOKENS = 6
"""What a template may put at a prompt's end, to begin the reply, that the next turn does not have there."""
_MIN_TOKENS = 16
"""A prompt that loses less by a fault is not counted for it."""
_MIN_SHARE = 0.02
"""Of all tokens of the log: a fault that costs less is not named."""


class FaultKind(enum.Enum):
    """What breaks reuse."""

    CHANGING_TEXT = "changing text"
    REWRITTEN_TURNS = "rewritten turns"
    NEW_ORDER = "new order"


_CHANGES = {
    FaultKind.CHANGING_TEXT: "Move it behind the text that stays the same, just before the question "
    "(engine.arrange(volatile=...) does that), or leave it out.",
    FaultKind.REWRITTEN_TURNS: "Send earlier turns as they were sent before: use a template that keeps them "
    "(thinking included), and trim no turns from the front. Otherwise only non-prefix reuse finds them again.",
    FaultKind.NEW_ORDER: "Put fixed text first and passages in the order in which they were sent before "
    "(engine.arrange does that). What remains needs non-prefix reuse (--quality auto).",
}


@dataclass(frozen=True)
class Loss:
    """Tokens of one prompt that were computed again, and why."""

    kind: FaultKind
    tokens: int
    evidence: str
    slot: Slot | None = None
    """The place of a changing text."""


@dataclass
class Fault:
    """One fault of the log, over all prompts that have it."""

    kind: FaultKind
    title: str
    evidence: str
    """An example: the first prompt that has it."""
    tokens: int
    """What all these prompts computed again because of it."""
    lines: list[int]
    """Where in the log these prompts stand."""

    @property
    def change(self) -> str:
        """What to do about it."""
        return _CHANGES[self.kind]


def losses_of(replayed: Replayed, prompts: Sequence[LoggedPrompt], decode: Decode) -> list[Loss]:
    """What this prompt lost, by the earlier prompt that explains most of it."""
    if not replayed.known.any():
        return []
    compared = [_compare(replayed, prompts, index, decode) for index in replayed.near]
    losses, covered = max(compared, key=lambda found: sum(loss.tokens for loss in found[0]))
    rest = int(replayed.known[covered:].sum())
    rewritten = next((loss for loss in losses if loss.kind is FaultKind.REWRITTEN_TURNS), None)
    if rest and rewritten is not None:  # earlier turns that stand elsewhere now
        losses.append(replace(rewritten, tokens=rest))
    elif rest:
        evidence = _moved_text(replayed, prompts, covered, decode)
        losses.append(Loss(FaultKind.NEW_ORDER, rest, evidence))
    return [loss for loss in losses if loss.tokens]


def _compare(replayed: Replayed, prompts: Sequence[LoggedPrompt], index: int, decode: Decode) -> tuple[list[Loss], int]:
    """The losses that a comparison with one earlier prompt explains, and up to which position."""
    prompt, earlier = replayed.prompt, prompts[index]
    here, there = prompt.tokens, earlier.tokens
    at = behind = common_prefix(here, there)
    runs = aligned_runs(here, there, start=at)
    continued = _continues(prompt, earlier, runs, begin=at)
    losses: list[Loss] = []
    covered = replayed.exact
    for run in runs:
        gap, missing = (at, run.here), (behind, run.there)
        slot = _slot(replayed, there, gap, missing, decode)
        if slot is None and not continued:
            break
        at, behind = run.here + run.tokens, run.there + run.tokens
        tokens = max(0, min(at, len(here) - 1) - max(run.here, replayed.exact))
        if slot is not None:
            losses.append(Loss(FaultKind.CHANGING_TEXT, tokens, _changed(slot, prompt, earlier), slot))
        else:
            evidence = _rewriting(prompt, earlier, gap, missing, decode)
            losses.append(Loss(FaultKind.REWRITTEN_TURNS, tokens, evidence))
        covered = max(covered, at)
    return losses, covered


def _continues(prompt: LoggedPrompt, earlier: LoggedPrompt, runs: Sequence[Run], *, begin: int) -> bool:
    """Whether a prompt is the next turn of an earlier one: it has that text to its end, little else, and goes on."""
    count = len(earlier.messages)
    if 0 < count < len(prompt.messages) and prompt.messages[:count] == earlier.messages:
        return True
    if not runs:
        return False
    here, there = runs[-1].here + runs[-1].tokens, runs[-1].there + runs[-1].tokens
    inserted = here - begin - sum(run.tokens for run in runs)  # moved passages would be here
    to_its_end = len(earlier.tokens) - there <= _REPLY_TOKENS
    return to_its_end and len(prompt.tokens) - here > _MIN_TOKENS and inserted <= max(_MIN_TOKENS, (here - begin) // 10)


def _slot(
    replayed: Replayed, there: TokenArray, gap: tuple[int, int], missing: tuple[int, int], decode: Decode
) -> Slot | None:
    """The changing value in a gap; None if the gap is more than a value."""
    ours, theirs = gap[1] - gap[0], missing[1] - missing[0]
    if max(ours, theirs) > _SLOT_TOKENS or (min(ours, theirs) == 0 and max(ours, theirs) > 3):
        return None
    if ours and replayed.known[gap[0] : gap[1]].mean() > 0.5:
        return None  # text that stood elsewhere is no value
    slot = read_slot(decode, replayed.prompt.tokens, there, gap, missing)
    if slot.kind == "text" and (max(ours, theirs) > _SLOT_TEXT_TOKENS or "\n" in slot.value + slot.earlier):
        return None
    return slot


def _changed(slot: Slot, prompt: LoggedPrompt, earlier: LoggedPrompt) -> str:
    return (
        f"line {slot.line} of the prompt: {clipped(slot.before, end=True)}[{clipped(slot.value)}]{clipped(slot.after)} "
        f"(log line {prompt.line}; log line {earlier.line} has [{clipped(slot.earlier)}])"
    )


def _rewriting(
    prompt: LoggedPrompt, earlier: LoggedPrompt, gap: tuple[int, int], missing: tuple[int, int], decode: Decode
) -> str:
    ours = _quoted(decode(prompt.tokens[gap[0] : gap[1]].tolist()))
    theirs = _quoted(decode(earlier.tokens[missing[0] : missing[1]].tolist()))
    turn = "its template rendered earlier turns differently" if prompt.messages else "earlier text was changed"
    return (
        f"log line {prompt.line} goes on where log line {earlier.line} ended, but {turn}: from token {gap[0]} on it "
        f"has {ours} instead of {theirs}"
    )


def _quoted(text: str) -> str:
    return f"[{clipped(text.strip())}]" if text.strip() else "nothing"


def _moved_text(replayed: Replayed, prompts: Sequence[LoggedPrompt], covered: int, decode: Decode) -> str:
    """The first known chunk behind what is explained, and where it was seen before."""
    start = min((at for at in replayed.origins if at >= covered), default=None)
    if start is None:  # a chunk that began before
        start = max(replayed.origins)
    index, position = replayed.origins[start]
    text = _quoted(decode(replayed.prompt.tokens[start : start + 32].tolist()))
    return (
        f"{text} is at token {start} in log line {replayed.prompt.line}, and was at token {position} in log line "
        f"{prompts[index].line}, behind other text"
    )


def gather(found: Sequence[tuple[LoggedPrompt, Sequence[Loss]]], *, all_tokens: int) -> list[Fault]:
    """The faults of a log, the costliest first. What costs next to nothing is left out."""
    groups: dict[tuple[FaultKind, str], list[tuple[LoggedPrompt, Loss]]] = {}
    for prompt, losses in found:
        merged: dict[tuple[FaultKind, str], Loss] = {}
        for loss in losses:
            name = loss.kind, loss.slot.group if loss.slot is not None else ""
            before = merged.get(name)
            merged[name] = replace(before, tokens=before.tokens + loss.tokens) if before is not None else loss
        for name, loss in merged.items():
            if loss.tokens >= _MIN_TOKENS:
                groups.setdefault(name, []).append((prompt, loss))
    faults = [_fault(kind, cases) for (kind, _), cases in groups.items()]
    named = [fault for fault in faults if fault.tokens >= _MIN_SHARE * all_tokens]
    return sorted(named, key=lambda fault: -fault.tokens)


def _fault(kind: FaultKind, cases: Sequence[tuple[LoggedPrompt, Loss]]) -> Fault:
    titles = {
        FaultKind.REWRITTEN_TURNS: "Earlier turns are rewritten: a later request does not extend the earlier one",
        FaultKind.NEW_ORDER: "Known text comes in ever new order or behind new text",
    }
    slots = [loss.slot for _, loss in cases if loss.slot is not None]
    title = titles[kind] if kind in titles else _slot_title(slots)
    first = cases[0][1]
    return Fault(
        kind, title, first.evidence, sum(loss.tokens for _, loss in cases), [prompt.line for prompt, _ in cases]
    )


def _slot_title(slots: Sequence[Slot]) -> str:
    (what, _), *_ = Counter(slot.kind for slot in slots).most_common()
    (line, _), *_ = Counter(slot.line for slot in slots).most_common()
    return f"{what[0].upper()}{what[1:]} in line {line} of the prompt changes from prompt to prompt"
