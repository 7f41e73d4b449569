"""Builds the KV of a prompt from chunks that were computed elsewhere: re-rotated, gaps computed, a sample recomputed.

Used by the worker for a request that allows approximate reuse. Invariant: afterwards every position has KV; those
before the first moved chunk are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvboost.approx.reposition import Rotations
from kvboost.approx.select import Even
from kvboost.extend import RepairSituation
from kvboost.hf.codec import KVCodec
from kvboost.integrations.vllm.decoder import Decoder
from kvboost.types import Chunk, KVBlock


def rotated(decoder: Decoder, states: torch.Tensor, *, old: int, new: int) -> torch.Tensor:
    """KV ``states`` [2 * layers, heads, tokens, dim] computed from position ``old`` on, as from ``new`` on."""
    if old == new:
        return states
    steps = torch.arange(states.shape[2], device=states.device)
    old_cos, old_sin = decoder.angles(steps + old)
    new_cos, new_sin = decoder.angles(steps + new)
    norm = old_cos.square() + old_sin.square()  # some tables carry a scale
    turn = ((new_cos * old_cos + new_sin * old_sin) / norm, (new_sin * old_cos - new_cos * old_sin) / norm)
    out = states.clone()
    out[::2] = Rotations([decoder.rotation], [turn]).apply(0, states[::2].float()).to(states.dtype)
    return out


def sample(moved: torch.Tensor, *, ratio: float) -> torch.Tensor:
    """Which of the moved positions are recomputed: some at even distances."""
    none = torch.empty(0)
    situation = RepairSituation(
        layer=0,
        layer_count=1,
        positions=moved,
        span_starts=none,
        span_ends=none,
        budget=round(ratio * len(moved)),
        attention=None,
        key_change=None,
        value_change=None,
    )
    return moved[Even().choose(situation)]


def place_moved(
    decoder: Decoder,
    codec: KVCodec,
    states: torch.Tensor,
    *,
    tokens: Sequence[int],
    exact: int,
    chunks: Sequence[Chunk],
    blocks: Mapping[int, KVBlock],
    ratio: float,
) -> int:
    """Fill ``states`` [2 * layers, heads, tokens, dim] behind the first ``exact`` positions, which it has.

    ``blocks`` are what was found, by the chunks' indices. Returns how many positions were computed.
    """
    end = len(tokens)
    is_moved = torch.zeros(end, dtype=torch.bool)
    for index, block in blocks.items():
        chunk = chunks[index]
        last = min(chunk.end, end)
        if chunk.start >= last:
            continue
        (found,) = codec.unpack(block.tensors)
        found = rotated(decoder, found.to(states.device), old=block.start, new=chunk.start)
        states[:, :, chunk.start : last] = found[:, :, : last - chunk.start]
        is_moved[chunk.start : last] = True
    is_moved[:exact] = False
    moved = is_moved.nonzero().flatten()
    computed = ~is_moved
    computed[:exact] = False
    computed[sample(moved, ratio=ratio)] = True
    positions = computed.nonzero().flatten().to(states.device)
    ids = torch.tensor(tokens, device=states.device)
    if len(positions):
        decoder.recompute(ids, positions, states)
    return len(positions)
