"""Where a prefill can begin that needs more than KV: the states of recurrent layers, and the ends they are kept at.

Used by the prefiller. A state is as large as the KV of many tokens, so it is kept only where a prompt is likely to be
resumed. Invariant: a state is a block of its own behind the chunk it follows, without tokens, so a store has it only
while it has the KV before it, and evicts it first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.core.guarded import EmptyLease, GuardedStore
from kvboost.core.state import ChunkedPrompt
from kvboost.extend import Lease
from kvboost.steps import StepRule
from kvboost.types import NOTHING_LOADED, Chunk, Fetched, KVBlock, Where

_MOST_GIVEN = 6  # of the caller's boundaries in one prompt, such as the ends of messages
_SPARSE = 2048  # tokens, at least, between two ends that are kept for no other reason
_SHARE = 3  # and so many times the tokens whose KV is as large as a state


def state_chunk(behind: Chunk) -> Chunk:
    """Names the states behind this chunk."""
    key = hashlib.sha256(b"kvboost.state.1" + behind.prefix_key).digest()
    return Chunk(behind.end, behind.end, b"", key, behind.prefix_key, key, behind.tenant)


def resumable(chunks: Sequence[Chunk], rule: StepRule) -> list[Chunk]:
    """Those at whose ends a step may begin."""
    return [chunk for chunk in chunks if rule.resume(chunk.end) == chunk.end]


def ends_to_keep(
    prompt: ChunkedPrompt, rule: StepRule, *, start: int, shared: int, state_tokens: int
) -> tuple[int, ...]:
    """Where a prefill that begins at ``start`` keeps the states it passes, in order.

    At the prompt's end, for the one that goes on from it; where ``shared`` stored KV ends, as that is where prompts
    part; at the caller's boundaries; sparsely everywhere else. ``state_tokens`` have KV as large as a state.
    """
    possible = {chunk.end for chunk in resumable(prompt.usable, rule) if chunk.end > start}
    if not possible:
        return ()
    given = sorted({rule.resume(boundary) for boundary in prompt.given} & possible)
    # The first ones are shared by most prompts, the last ones are the newest.
    kept = {max(possible), *given[: _MOST_GIVEN // 2], *given[-_MOST_GIVEN // 2 :]}
    kept |= {rule.resume(shared)} & possible
    spacing, last = max(_SPARSE, _SHARE * state_tokens), start
    for end in sorted(possible):
        if end in kept or end - last >= spacing:
            kept.add(end)
            last = end
    return tuple(sorted(kept))


@dataclass(frozen=True)
class StateLookup:
    """Finds where a prompt can be resumed, and chooses where it is to be resumed later."""

    store: GuardedStore
    rule: StepRule
    state_tokens: int
    """Tokens whose KV is as large as a state."""

    def leading(self, chunks: Sequence[Chunk], *, where: Where = "anywhere") -> list[Chunk]:
        """The chunks up to the last state that is stored there, and that state; nothing if there is none."""
        states = {state_chunk(chunk): chunk for chunk in reversed(resumable(chunks, self.rule))}
        found = self.store.first_stored(list(states), where=where)
        return [*chunks[: chunks.index(states[found]) + 1], found] if found is not None else []

    def lease(
        self, chunks: Sequence[Chunk], *, arrived: Callable[[Chunk, KVBlock], None], fetched: Fetched | None
    ) -> tuple[Lease, Sequence[KVBlock], KVBlock | None]:
        """Hold the chunks up to a state, and that state.

        What is stored may be gone when it is asked for: then all up to an earlier state will do.
        """
        loads = fetched.exact if fetched else None
        wanted = self.leading(chunks, where="memory" if fetched else "anywhere")
        while wanted:
            lease = self.store.lease(wanted, arrived=arrived, fetched=loads)
            blocks = lease.blocks
            if len(blocks) == len(wanted):
                return lease, blocks[:-1], blocks[-1]
            lease.release()
            before = min(len(blocks), len(wanted) - 2)  # of the chunks, without the one that this state is behind
            wanted, loads = self.leading(wanted[:before], where="memory"), NOTHING_LOADED
        return EmptyLease(), [], None

    def ends(self, prompt: ChunkedPrompt, *, start: int) -> tuple[int, ...]:
        """Where a prefill of this prompt keeps states, if it begins at ``start``."""
        shared = self.store.first_stored(prompt.lookup[::-1], where="memory")
        return ends_to_keep(
            prompt,
            self.rule,
            start=start,
            shared=shared.end if shared is not None else 0,
            state_tokens=self.state_tokens,
        )
