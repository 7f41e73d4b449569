"""Runs the layers of a vLLM model over chosen positions of one sequence, outside of vLLM's own steps.

Used by the worker to repair moved KV. vLLM's step computes tokens behind what is cached; here tokens in the middle are
computed, each seeing all positions up to itself. Invariant: the modules are only called, never changed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvboost.approx.reposition import Move, Rotation, Rotations, turn_between
from kvboost.errors import UnsupportedModelError

_FAMILIES = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_ROTARIES = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
_ROWS = 1024  # of a mask at once
_WATCHED = 1  # the layer whose values show which positions changed most, as in CacheBlend


class Decoder:
    """A model of the Llama, Qwen2 or Qwen3 family."""

    def __init__(self, model: Any, layers: Sequence[Any]) -> None:
        """``layers`` are the decoder layers of ``model``, which embeds."""
        self._model, self._layers = model, layers
        rotary = layers[0].self_attn.rotary_emb
        self._table: torch.Tensor = rotary.cos_sin_cache
        self.rotation = Rotation(0, rotary.rotary_dim // 2, interleaved=not rotary.is_neox_style)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine at these positions, as the model uses them: [positions, frequencies] each."""
        cos, sin = self._table[positions].float().chunk(2, dim=-1)
        return cos, sin

    @torch.inference_mode()
    def recompute(
        self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, *, moved: torch.Tensor, keep: int
    ) -> int:
        """Compute ``positions`` [n] of ``tokens`` [t], and write their KV into ``states`` [2 * layers, heads, t, dim].

        The other positions are taken as they are. Of those marked in ``moved`` [n] only ``keep`` go on behind the
        second layer's projection: the ones whose values changed most there. Returns how many positions were computed,
        as a mean over the layers.
        """
        hidden = self._model.embed_input_ids(tokens[positions])
        residual = None
        computed = 0
        for index, layer in enumerate(self._layers):
            if residual is None:
                hidden, residual = layer.input_layernorm(hidden), hidden
            else:
                hidden, residual = layer.input_layernorm(hidden, residual)
            attention, keys, values = layer.self_attn, states[2 * index], states[2 * index + 1]
            before = values[:, positions] if index == _WATCHED else None
            query = _project(attention, hidden, positions, keys, values)
            computed += len(positions)
            if index == len(self._layers) - 1:
                break  # nobody reads what the last layer makes of it
            if before is not None:
                kept = most_changed(before, values[:, positions], moved, keep)
                positions, query, residual = positions[kept], query[kept], residual[kept]
            hidden, _ = attention.o_proj(_attend(query, keys, values, positions, scale=attention.scaling))
            hidden, residual = layer.post_attention_layernorm(hidden, residual)
            hidden = layer.mlp(hidden)
        return round(computed / len(self._layers))


def find_decoder(layers: dict[str, Any], names: Sequence[str]) -> Decoder:
    """The model that these attention layers belong to. Raises UnsupportedModelError if it is of another kind."""
    root = _root_of(layers[names[0]], names[0])
    if root is None:
        raise UnsupportedModelError("its module was not found")
    path, _, _ = names[0].partition(".layers.")
    try:
        decoders = [root.get_submodule(name.rpartition(".self_attn.")[0]) for name in names]
    except AttributeError as error:  # layers of a draft model
        raise UnsupportedModelError(f"not all of its layers belong to one model ({error})") from error
    kinds = {type(decoder).__name__ for decoder in decoders}
    if not kinds <= set(_FAMILIES):
        raise UnsupportedModelError(f"its layers are {', '.join(sorted(kinds))}; known are {', '.join(_FAMILIES)}")
    if hasattr(decoders[0].self_attn.qkv_proj, "base_layer"):
        # Such layers apply the adapters of the batch that runs, row by row.
        raise UnsupportedModelError("adapters are enabled")
    rotary = type(decoders[0].self_attn.rotary_emb).__name__
    if rotary not in _ROTARIES:
        raise UnsupportedModelError(f"its positions are encoded by {rotary}; known are {', '.join(_ROTARIES)}")
    return Decoder(root.get_submodule(path), decoders)


def _root_of(attention: Any, name: str) -> Any:
    """The module that has ``attention`` under this name. vLLM gives a connector the attention layers only."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.Module):  # not isinstance: it would wake lazy objects of other libraries
            try:
                if found.get_submodule(name) is attention:
                    return found
            except AttributeError:
                continue
    return None


def _project(
    attention: Any, hidden: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The queries [n, heads, dim]; their keys and values go to their positions."""
    qkv, _ = attention.qkv_proj(hidden)
    query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    dim = attention.head_dim
    if getattr(attention, "q_norm", None) is not None:
        query = attention.q_norm(query.reshape(len(query), -1, dim)).view(query.shape)
        key = attention.k_norm(key.reshape(len(key), -1, dim)).view(key.shape)
    query, key = attention.rotary_emb(positions, query.contiguous(), key.contiguous())
    for target, source in ((keys, key), (values, value)):
        target.index_copy_(1, positions, source.reshape(len(source), -1, dim).transpose(0, 1).to(target.dtype))
    queries: torch.Tensor = query.view(len(query), -1, dim)
    return queries


def most_changed(before: torch.Tensor, after: torch.Tensor, moved: torch.Tensor, keep: int) -> torch.Tensor:
    """Indices of the positions that were not moved, and of the ``keep`` moved ones that changed most: ascending.

    ``before`` and ``after`` are [heads, n, dim].
    """
    change = (after.float() - before.float()).square().sum(dim=(0, 2))
    change[~moved] = torch.inf
    return change.topk(min(len(change), int((~moved).sum()) + keep)).indices.sort().values


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Each query over all positions up to its own: [n, heads * dim]."""
    order = torch.arange(keys.shape[1], device=keys.device)
    parts = []
    for start in range(0, len(query), _ROWS):
        rows = slice(start, start + _ROWS)
        end = int(positions[rows][-1]) + 1
        out = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1).unsqueeze(0),
            keys[:, :end].unsqueeze(0),
            values[:, :end].unsqueeze(0),
            attn_mask=order[:end] <= positions[rows].view(-1, 1),
            scale=scale,
            enable_gqa=True,
        )
        parts.append(out[0].transpose(0, 1).reshape(out.shape[2], -1))
    return torch.cat(parts)


def build_moved(
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
