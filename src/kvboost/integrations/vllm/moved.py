"""Builds the KV of a prompt from chunks that were computed elsewhere: re-rotated, gaps computed, some recomputed.

Used by the worker for a request that allows approximate reuse. Invariant: afterwards every position has KV; those
before the first moved chunk are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvboost.approx.reposition import Move, Rotations, turn_between
from kvboost.integrations.vllm.decoder import Decoder


def place_moved(
    decoder: Decoder, states: torch.Tensor, moves: Iterable[Move], *, tokens: Sequence[int], exact: int, ratio: float
) -> tuple[int, int]:
    """Fill ``states`` [2 * layers, heads, tokens, dim] behind the first ``exact`` positions, which it has.

    ``moves`` are what was found; a share ``ratio`` of it is recomputed, those that changed most. Returns how many
    positions were computed because nothing was found for them, and how many were recomputed.
    """
    is_moved = torch.zeros(len(tokens), dtype=torch.bool)
    for move in moves:
        end = min(move.new_end, len(tokens))
        states[:, :, move.new_start : end] = rotated(decoder, move, device=states.device)[:, :, : end - move.new_start]
        is_moved[move.new_start : end] = True
    keep = round(ratio * int(is_moved.sum()))
    computed = torch.ones_like(is_moved) if keep else ~is_moved
    computed[:exact] = False
    positions = computed.nonzero().flatten()
    if not len(positions):
        return 0, 0
    gaps = int((~is_moved[exact:]).sum())
    moved = is_moved[positions].to(states.device)
    count = decoder.recompute(
        torch.tensor(tokens, device=states.device), positions.to(states.device), states, moved=moved, keep=keep
    )
    return gaps, count - gaps


def rotated(decoder: Decoder, move: Move, *, device: torch.device) -> torch.Tensor:
    """A block's KV [2 * layers, heads, tokens, dim] as it would be at its new position, but for the text before it."""
    (states,) = (tensor.to(device) for tensor in move.tensors)
    if move.stays:
        return states
    steps = torch.arange(move.tokens, device=device)
    turn = turn_between(*decoder.angles(torch.cat([steps + move.old_start, steps + move.new_start])))
    out = states.clone()
    out[::2] = Rotations([decoder.rotation], [turn]).apply(0, states[::2].float()).to(states.dtype)
    return out
