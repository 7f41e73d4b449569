"""Candidates over several stored variants of each passage, which the engine does not have: their mean, and a fit.

The fit recomputes an even sample of positions and explains its change by the differences between the variants, with
one coefficient for each difference, in every layer, for keys and for values; the explanation is applied to every
position. The variants come from the engine's own store, re-rotated to their new positions. Invariant: positions of
passages with fewer than two variants, and of none, stay as the engine has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch

from benchmarks.common.rag import RagPrompt
from benchmarks.internals import SlabCache, place_blocks, prompt_chunks, stored_blocks
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore
from kvboost.types import CONTEXT_MARK_BYTES, TOKEN_BYTES, Chunk, KVBlock, PrefillResult, context_mark

MAX_VARIANTS = 4
_CONTEXT_BYTES = 16 * CONTEXT_MARK_BYTES  # what a block remembers of the chunks before it
_RIDGE = 1e-2  # of the mean square of a difference: the sample is small and its differences are alike


@dataclass(frozen=True)
class PassageVariants:
    """The variants of one passage: positions ``[start, end)`` of the prompt in each of some caches."""

    start: int
    end: int
    caches: Sequence[SlabCache]


def stored_variants(
    engine: KVBoost, store: MemoryStore, prompt: RagPrompt, read: PrefillResult
) -> list[PassageVariants]:
    """The newest variants of every passage that has two or more, at their positions in ``prompt``.

    Passages that were exact hits when the prompt was read are left out.
    """
    by_content: dict[bytes, list[KVBlock]] = {}
    for block in stored_blocks(store):
        by_content.setdefault(block.content_key, []).append(block)
    chunks = prompt_chunks(engine, prompt.tokens, prompt.boundaries)
    caches = [SlabCache(read.cache.layout, capacity=len(prompt.tokens)) for _ in range(MAX_VARIANTS)]
    found = []
    for start, end in pairwise(prompt.boundaries):
        if start < read.reuse.exact_tokens:
            continue
        inside = [chunk for chunk in chunks if start <= chunk.start and chunk.end <= end]
        chains = passage_chains(inside, by_content)[-MAX_VARIANTS:]
        if len(chains) < 2:
            continue
        used = caches[: len(chains)]
        for cache, chain in zip(used, chains, strict=True):
            place_blocks(engine, cache, [(block, chunk.start) for block, chunk in zip(chain, inside, strict=True)])
        found.append(PassageVariants(start, end, used))
    return found


def passage_chains(chunks: Sequence[Chunk], by_content: dict[bytes, list[KVBlock]]) -> list[list[KVBlock]]:
    """The blocks of all these chunks that were computed together, one list for every time they were."""
    if not chunks:
        return []
    chains = [[block] for block in by_content.get(chunks[0].content_key, [])]
    for chunk in chunks[1:]:
        blocks = by_content.get(chunk.content_key, [])
        longer = ((chain, next((b for b in blocks if _follows(chain[-1], b)), None)) for chain in chains)
        chains = [[*chain, block] for chain, block in longer if block is not None]
    return chains


def _follows(before: KVBlock, block: KVBlock) -> bool:
    """Whether a block was computed right behind another, which stood behind the same chunks."""
    behind = (before.context + context_mark(before.content_key))[-_CONTEXT_BYTES:]
    return block.start == before.start + len(before.tokens) // TOKEN_BYTES and block.context == behind


def copy_of(cache: SlabCache, length: int) -> SlabCache:
    """Another cache with the first ``length`` positions of this one."""
    copied = SlabCache(cache.layout, capacity=cache.capacity)
    copied.place(0, cache.span(0, length))
    copied.set_length(length)
    return copied


def mean_into(cache: SlabCache, passages: Sequence[PassageVariants]) -> None:
    """Put the mean of the variants into ``cache``."""
    for passage in passages:
        span = slice(passage.start, passage.end)
        for index, slot in _stores_of(cache):
            mean = torch.stack([_store(other, index, slot)[:, :, span].float() for other in passage.caches]).mean(0)
            _store(cache, index, slot)[:, :, span] = mean  # in the cache's own dtype


def fit_into(
    cache: SlabCache,
    passages: Sequence[PassageVariants],
    sample: torch.Tensor,
    *,
    by_passage: bool = False,
    keep_sample: bool = False,
) -> None:
    """Explain the change of the recomputed positions ``sample`` of ``cache`` by the variants, and apply it to all.

    ``by_passage`` fits each passage by itself; ``keep_sample`` leaves the recomputed positions as they are.
    """
    for group in [[passage] for passage in passages] if by_passage else [passages]:
        for index, slot in _stores_of(cache):
            _fit(cache, group, sample, (index, slot), keep_sample=keep_sample)


def _fit(
    cache: SlabCache,
    passages: Sequence[PassageVariants],
    sample: torch.Tensor,
    which: tuple[int, int],
    *,
    keep_sample: bool,
) -> None:
    target = _store(cache, *which)
    changes, differences = [], []
    for passage in passages:
        inside = sample[(sample >= passage.start) & (sample < passage.end)].to(target.device)
        base, apart = _apart(passage, which, inside)
        changes.append((target[:, :, inside].float() - base).flatten())
        differences.append(apart.flatten(1).T)  # [elements, differences]
    x, y = torch.cat(differences), torch.cat(changes)
    gram = x.T @ x
    ridge = _RIDGE * gram.diagonal().mean() + 1e-6
    weights = torch.linalg.solve(gram + ridge * torch.eye(len(gram), device=gram.device), x.T @ y)  # [differences]
    for passage in passages:
        here = torch.arange(passage.start, passage.end)
        here = (here[~torch.isin(here, sample)] if keep_sample else here).to(target.device)
        base, apart = _apart(passage, which, here)
        target.index_copy_(2, here, (base + torch.tensordot(weights, apart, dims=1)).to(target.dtype))


def _apart(passage: PassageVariants, which: tuple[int, int], here: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first variant at these positions, and how far each other is from it: zero where there is none."""
    first, *others = (_store(cache, *which)[:, :, here].float() for cache in passage.caches)
    apart = [other - first for other in others]
    apart += [torch.zeros_like(first)] * (MAX_VARIANTS - 1 - len(apart))
    return first, torch.stack(apart)  # [1, heads, positions, dim], [differences, 1, heads, positions, dim]


def _stores_of(cache: SlabCache) -> Iterator[tuple[int, int]]:
    """Every layer's keys (0) and values (1)."""
    return product(range(len(cache.layers)), (0, 1))


def _store(cache: SlabCache, index: int, slot: int) -> torch.Tensor:
    layer = cache.layers[index]
    store: torch.Tensor = layer.value_store if slot else layer.key_store
    return store  # [1, heads, capacity, dim]
