"""Steps of an accelerator behind a prefix: torch's flash kernel, causal from the lower right, without a mask.

Used by :class:`kvboost.hf.runner.ModelRunner` where :func:`probe_lower_right` found that the model allows it. With a
dense mask, as Transformers makes one for such a step, torch takes another kernel, for which keys and values are
repeated for every head. Layers with a window keep their mask. Invariant: results are those under the mask, up to
rounding.

Where the user has made torch's products independent of their rows (on Hopper: cuBLASLt without a workspace for split
sums, and means likewise; vLLM's ``enable_batch_invariant_mode`` does it), KV may be bitwise without a grid: the same
attention, in whole sums, is tried on a longer text by :func:`probe_whole_sums`. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import causal_mask_function

from kvboost.hf import row_pages
from kvboost.hf.attention import NAME, Call, Plan, UnsupportedAttentionError, attending, layer_of
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.layers import decoder_of

_PROBE_TOKENS, _PROBE_START = 24, 16
WHOLE = 2048  # tokens of the longest step that was found to have the bits of shorter ones
_CUTS = (1,), (7, 300), (1024, 1031)
PROBE_ERROR = 0.05  # of the norm of what is compared: rounding is far less, and a mask that is lost far more
_FAILURES = UnsupportedAttentionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError


@dataclass
class LowerRight(Plan):
    """One forward of one sequence over a cache that holds ``start`` positions."""

    start: int
    whole_sums: bool = False
    """Whether a row's sums must not depend on how many rows and keys there are."""
    causal: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """Stands for the causal mask: the model only hands it on, or accelerate does, to another device."""
    calls: int = 0
    """Attention calls without a mask so far."""
    ends: dict[torch.device, list[torch.Tensor]] = field(default_factory=dict)
    """Where queries and keys begin and end, for whole sums."""

    def mask(self, **asked: Any) -> torch.Tensor | None:
        """Nothing for causal attention: a single sequence has no padding."""
        if asked["mask_function"] is not causal_mask_function:
            return super().mask(**asked)
        return self.causal if self.start or self.whole_sums else None

    def attend(self, call: Call) -> torch.Tensor:
        """Each new row sees what is before it. Heads that share keys are the kernel's to find."""
        if call.mask is None or call.mask.numel():
            return call.plain()
        if call.more_than_a_mask or call.options.get("dropout"):
            raise UnsupportedAttentionError("it needs more than a mask")
        self.calls += 1
        if self.whole_sums:
            return self._in_whole_sums(call)
        return _attend(call.query, call.key, call.value, call.scale).transpose(1, 2).contiguous()

    def _in_whole_sums(self, call: Call) -> torch.Tensor:
        query, key, value = (states[0].transpose(0, 1) for states in (call.query, call.key, call.value))
        longest = len(query), len(key)
        if query.device not in self.ends:
            self.ends[query.device] = [torch.arange(2, dtype=torch.int32, device=query.device) * n for n in longest]
        ends = self.ends[query.device]
        options = {"scale": call.scale, "window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
        found: torch.Tensor = row_pages.varlen_attn(query, key, value, *ends, *longest, **options)
        return found[None].contiguous()


@dataclass
class JointLowerRight(Plan):
    """One forward of several sequences, whose rows lie one after the other, each over a cache of its own."""

    caches: Sequence[SlabCache]
    rows: list[int]
    """Rows of each."""
    calls: int = 0
    """Layers that attended so far."""

    def mask(self, **asked: Any) -> torch.Tensor | None:
        """What stands for each one's causal mask."""
        if asked["mask_function"] is not causal_mask_function:
            raise UnsupportedAttentionError("some of its layers have a window")
        return torch.empty(0, dtype=torch.bool)

    def attend(self, call: Call) -> torch.Tensor:
        """Attention of each sequence to its own cache."""
        layer, found = layer_of(call), []
        self.calls += 1
        for cache, query in zip(self.caches, torch.split(call.query, self.rows, dim=2), strict=True):
            held = cache.layers[layer]
            seen = slice(0, held.get_seq_length())
            found.append(_attend(query, held.key_store[:, :, seen], held.value_store[:, :, seen], call.scale))
        return torch.cat(found, dim=2).transpose(1, 2).contiguous()


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    bias: Any = causal_lower_right(query.shape[2], key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=True
    )


def _flash_takes(layout: KVLayout, *, heads: int) -> bool:
    """Whether torch's flash kernel takes this model's keys and values."""
    pairs = layout.slots[: len(layout.slots) - len(layout.indexed)]
    for keys, values in {*zip(pairs[::2], pairs[1::2], strict=True)}:
        query = torch.empty(1, heads, 1, keys.dim, dtype=keys.dtype, device=keys.device)
        key, value = (
            torch.empty(1, one.heads, 1, one.dim, dtype=one.dtype, device=one.device) for one in (keys, values)
        )
        if not can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True)):
            return False
    return True


@torch.no_grad()
def probe_lower_right(model: Any, layout: KVLayout) -> str | None:
    """Why this model's steps need masks on its device; None if they do not, after running one both ways."""
    if model.config._attn_implementation != NAME:
        return f"its attention is {model.config._attn_implementation!r}, not {NAME!r}"
    if any(spec.device.type == "cpu" for spec in layout.slots):
        return "CPUs have steps of their own"
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0)
    if not heads or not _flash_takes(layout, heads=heads):
        return "torch's flash kernel does not take its keys on this device"
    ids, decoder = _text(model, _PROBE_TOKENS), decoder_of(model)

    def behind(plan: Plan) -> torch.Tensor:
        cache = SlabCache(layout, capacity=_PROBE_TOKENS)
        decoder(input_ids=ids[:, :_PROBE_START], past_key_values=cache, use_cache=True)
        with attending(plan):
            output = decoder(input_ids=ids[:, _PROBE_START:], past_key_values=cache, use_cache=True)
        found: torch.Tensor = output[0]
        return found

    plan, expected = LowerRight(_PROBE_START), behind(Plan())
    try:
        found = behind(plan)
    except _FAILURES as error:
        return f"its forward does not run without a mask: {error}"
    if not plan.calls:
        return "none of its layers has plain causal attention"
    if not (found - expected).norm() <= PROBE_ERROR * expected.norm():
        return "its attention computes something else without a mask"
    return None


@torch.no_grad()
def probe_whole_sums(model: Any, layout: KVLayout, *, max_positions: int | None) -> str | None:
    """Why KV has other bits when its text is computed in other steps; None if several cuts of a text gave the same."""
    if not all(row_pages.has_kernel(spec.device) for spec in layout.slots):
        return "torch has no attention in whole sums for this device"
    tokens = min(WHOLE, max_positions or WHOLE)
    ids, decoder = _text(model, tokens), decoder_of(model)

    def prefilled(cuts: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        cache, start = SlabCache(layout, capacity=tokens), 0
        for end in (*(cut for cut in cuts if cut < tokens), tokens):
            with attending(LowerRight(start, whole_sums=True)):
                decoder(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
            start = end
        return cache.span(0, tokens)

    try:
        cold = prefilled(())
        for cuts in _CUTS:
            if not all(torch.equal(one, other) for one, other in zip(cold, prefilled(cuts), strict=True)):
                return f"a prefill resumed at {cuts} has other bits"
    except _FAILURES as error:
        return f"its attention does not run in whole sums: {error}"
    return None


def _text(model: Any, tokens: int) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    ids: torch.Tensor = torch.arange(tokens, device=weight.device) * 7919 % min(weight.shape[0], 30_000)
    return ids[None]
