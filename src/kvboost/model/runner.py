"""Runs the model on chosen rows of a sequence: the one operation everything else is made of.

Called by the engine's prefill. Invariant: the same rows over the same cache run the same kernels on the
same shapes, whoever asks; that is what makes a warm run equal a cold one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.model.cache import SlabCache


class ModelRunner:
    """Forward passes of one causal language model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        # The decoder without its vocabulary projection: all a step needs whose logits nobody reads.
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        self._decoder = decoder if isinstance(decoder, torch.nn.Module) else model

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @torch.no_grad()
    def append(self, tokens: Sequence[int] | torch.Tensor, cache: SlabCache, *, logits: bool) -> torch.Tensor | None:
        """Compute ``tokens`` behind what the cache holds. Returns the last token's logits [vocab], if asked.

        The stock path of the model: its own mask and its own attention kernel.
        """
        ids = torch.as_tensor(tokens, device=self.device).view(1, -1)
        if not logits:
            self._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
            return None
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **keep)
        last: torch.Tensor = output.logits[0, -1]
        return last

    @torch.no_grad()
    def read_whole(self, tokens: Sequence[int]) -> tuple[torch.Tensor, Any]:
        """Plain Transformers: the whole prompt in one step. Returns the last logits [vocab] and the cache."""
        ids = torch.as_tensor(tokens, device=self.device).view(1, -1)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        output = self.model(input_ids=ids, use_cache=True, **keep)
        return output.logits[0, -1], output.past_key_values

    @torch.no_grad()
    def forward_rows(self, token_ids: Sequence[int], cache: SlabCache, rows: Sequence[int]) -> torch.Tensor:
        """Compute again the given rows of a sequence the cache already holds whole, in place.

        ``token_ids`` is that whole sequence, ``rows`` ascending positions in it. Each row attends to
        all rows up to itself, recomputed or not. Returns the logits of the last row, [vocab].
        """
        length = cache.get_seq_length()
        if len(token_ids) != length:
            raise ValueError(f"the cache holds {length} rows, the sequence has {len(token_ids)} tokens")
        if any(getattr(layer, "sliding_window", None) for layer in self.model.config.per_layer_config):
            raise UnsupportedModelError(
                "recomputing single rows is not built for sliding-window layers; use exact reuse for this model"
            )
        positions = torch.as_tensor(list(rows), device=self.device)
        ids = torch.as_tensor(list(token_ids), device=self.device)[positions].view(1, -1)
        visible = torch.arange(length, device=self.device) <= positions.view(-1, 1)  # [rows, length]
        mask: torch.Tensor = visible.view(1, 1, len(positions), length)
        if self.model.config._attn_implementation != "sdpa":  # sdpa takes booleans, the others an additive mask
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.where(mask, 0.0, lowest).to(self.model.dtype)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        with cache.rewriting(positions):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions.view(1, -1),
                past_key_values=cache,
                use_cache=True,
                **keep,
            )
        last: torch.Tensor = output.logits[0, -1]
        return last
