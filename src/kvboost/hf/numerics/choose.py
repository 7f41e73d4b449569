"""Chooses how a model is stepped through a prompt: by its device, and by running it.

Called once when an engine is made. On CPUs a model whose linear layers and attention can run in tiles may be resumed at
any token; any other is stepped on a fixed grid. On accelerators rounding depends on the shape of a step, so there is a
grid too, or ``numerics="fast"``.

In tiles attention pads its keys, so that a row's sums do not depend on how many come after it. torch's flash kernel
goes through keys in blocks of 512 and leaves the product with a block's values to a matrix kernel of the CPU, which
splits its sums by the block's length. So :func:`key_granule` runs it. Invariant: every multiple of the granule gives
the bits of a full block.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from kvboost.capacity import ModelShape, step_limit
from kvboost.errors import UnsupportedModelError
from kvboost.hf.attention import UnsupportedAttentionError, flash
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.device_memory import memory_available, memory_total
from kvboost.hf.layers import decoder_of, windows_by_layer
from kvboost.hf.lower_right import WHOLE, probe_lower_right, probe_whole_sums
from kvboost.hf.numerics.tiles import Choices, Tiles, why_no_tiles
from kvboost.hf.weights import weights_by_owner
from kvboost.steps import MaskedSteps, Numerics, StepRule

_GRID_ON_CPU = 128  # tokens; smaller steps stream the weights too often, larger ones leave more to recompute
_SHARE_TO_PACK = 4  # packed weights take at most this part of the memory beside the weights
_GRID_ELSEWHERE = 1024  # tokens; a step of a large model keeps a large accelerator busy
_CHECK_TOKENS = 72
_CHECK_CUTS = ((1,), (5, 40))
_CHECK_ERROR = 0.05  # of the states' norm; kernels round otherwise, but a mask or a bias that is lost changes far more
_log = logging.getLogger(__name__)


Unmasked = Literal["lower right", "whole sums"]


class KnownTiles(NamedTuple):
    """What an earlier measurement of this model on this machine found: with it nothing is run."""

    granule: int
    choices: Choices


@dataclass(frozen=True)
class ChosenNumerics:
    """How one model is stepped."""

    rule: StepRule
    tiles: Tiles | None
    reason: str | None
    """Why there are no tiles; None if there are."""
    unmasked: Unmasked | None = None
    """How steps run without a mask on an accelerator; None if they have one behind a prefix."""

    @property
    def spec(self) -> str:
        """Names what the bits depend on."""
        return f"{self.rule.spec}|{self.tiles.spec if self.tiles is not None else self.unmasked or 'steps'}"


def choose_numerics(
    model: Any,
    layout: KVLayout,
    shape: ModelShape,
    *,
    numerics: Numerics | None,
    packed_bytes: int | None = None,
    known: KnownTiles | None = None,
) -> ChosenNumerics:
    """The rule for this model; ``numerics`` None is ``"bitwise"`` on CPUs and ``"fast"`` elsewhere.

    Packed weights take at most ``packed_bytes``; None is a quarter of the memory beside the weights.
    """
    devices = {spec.device for spec in layout.slots}
    on_cpu = {device.type for device in devices} == {"cpu"}
    # By what is free now: but for a grid the length of a step is in no key.
    longest = step_limit(shape, available=min(memory_available(str(device)) for device in devices))
    if not on_cpu and model.config._attn_implementation == "eager":
        longest = min(longest, _GRID_ELSEWHERE)  # it has the scores of all heads in memory
    wanted = numerics or ("bitwise" if on_cpu else "fast")
    unmasked = None if on_cpu else _unmasked(model, layout)
    masked = _masked_steps(model, by_mask=unmasked is None)
    if wanted == "fast" and not layout.indexed:  # its KV depends on the steps by more than rounding
        return ChosenNumerics(StepRule(longest, numerics="fast", masked=masked), None, "numerics='fast'", unmasked)
    if not on_cpu:
        reason: str | None = "rounding depends on a step's shape on this device"
        if unmasked is not None and masked == "none" and not (layout.indexed or layout.states):
            reason = probe_whole_sums(model, layout, max_positions=shape.max_positions)
            if reason is None:
                return ChosenNumerics(StepRule(min(longest, WHOLE)), None, None, "whole sums")
        return ChosenNumerics(StepRule(_GRID_ELSEWHERE, _GRID_ELSEWHERE), None, reason, unmasked)
    budget = budget_to_pack(model) if packed_bytes is None else packed_bytes
    tiles, reason = _try_tiles(model, layout, budget, known)
    rule = StepRule(_GRID_ON_CPU, _GRID_ON_CPU)
    if tiles is not None:
        rule = StepRule(longest, masked=_masked_steps(model, by_mask=False))
    if reason is not None:
        _log.info("steps of %d tokens: %s", _GRID_ON_CPU, reason)
    return ChosenNumerics(rule, tiles, reason)


def _unmasked(model: Any, layout: KVLayout) -> Unmasked | None:
    reason = probe_lower_right(model, layout)
    if reason is not None:
        _log.info("steps behind a prefix have a mask: %s", reason)
    return "lower right" if reason is None else None


def _masked_steps(model: Any, *, by_mask: bool) -> MaskedSteps:
    """Which steps have a mask matrix. Where causality alone is not ``by_mask``, only layers with a window do."""
    if "flash" in model.config._attn_implementation:
        return "none"  # its kernels are told the window
    try:
        windowed = any(windows_by_layer(model))
    except UnsupportedModelError:
        windowed = True  # layers of a kind that is not known: whatever they hide is a matrix
    if windowed:
        return "all"
    return "later" if by_mask else "none"


def budget_to_pack(model: Any) -> int:
    """By what never changes between two starts: the model, and the memory there is in all, free or not."""
    weights = sum(weight.tensor.nbytes for weight in weights_by_owner(model)[None])
    return max(0, memory_total() - weights) // _SHARE_TO_PACK


def _try_tiles(model: Any, layout: KVLayout, budget: int, known: KnownTiles | None) -> tuple[Tiles | None, str | None]:
    reason, granule = why_no_tiles(model), None
    if layout.states:
        reason = "what a recurrent layer sums depends on where a step begins"
    elif layout.indexed:
        reason = "which of equally good positions its attention chooses depends on where a step ends"
    elif decoder_of(model) is model:
        reason = "its layers cannot be run without its vocabulary projection"
    elif layout.without_kv:
        reason = "some of its layers have no keys and values of their own"
    if reason is None:
        granule = key_granule(layout) if known is None else known.granule
        reason = "its attention rounds by the number of keys" if granule is None else None
    if granule is None:
        return None, reason
    tiles: Tiles | None = None
    try:
        tiles = Tiles(model, layout, granule=granule, budget=budget, known=known and known.choices)
        reason = _check(model, layout, tiles) if known is None else None
    except UnsupportedAttentionError as error:
        reason = f"its forward does not run in tiles: {error}"
    except Exception as error:  # noqa: BLE001 - what a model does is not known before: whatever fails, its own path works
        reason = f"its forward does not run in tiles: {type(error).__name__}: {error}"
        _log.warning("%s; please report this", reason)
    if tiles is not None and reason is None:
        sizes = tiles.packed_bytes / 1e6, budget / 1e6
        _log.info("packed copies of weights take %.1f MB; packed_bytes allows %.1f MB", *sizes)
        return tiles, None
    return None, reason


@torch.no_grad()
def _check(model: Any, layout: KVLayout, tiles: Tiles) -> str | None:
    """Prefill a short text in one step and in several: why their bits differ, or None if they do not."""
    vocab = min(model.get_input_embeddings().weight.shape[0], 30_000)
    ids = (torch.arange(_CHECK_TOKENS) * 7919 % vocab).view(1, -1)
    decoder = model.get_decoder()

    def prefill(cuts: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        cache = SlabCache(layout, capacity=_CHECK_TOKENS)
        start = 0
        for end in (*cuts, _CHECK_TOKENS):
            with tiles.step(cache, end - start) as step:
                output = decoder(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
            if step.calls != len(layout.slots) // 2:
                raise UnsupportedAttentionError("its attention is not Transformers' interface")
            start = end
        return cache.extract(0, _CHECK_TOKENS), output.last_hidden_state

    cold, states = prefill(())
    own = decoder(input_ids=ids, use_cache=False).last_hidden_state  # outside of a step
    if not (states - own).norm() <= _CHECK_ERROR * own.norm():
        return "its attention computes something else"
    cache = SlabCache(layout, capacity=_CHECK_TOKENS)
    # The last step is the whole model's, which may make masks of its own; one of few rows needs them.
    for start, end, part in ((0, _CHECK_TOKENS - 4, decoder), (_CHECK_TOKENS - 4, _CHECK_TOKENS, model)):
        with tiles.step(cache, end - start) as step:
            part(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        if step.calls != len(layout.slots) // 2:
            raise UnsupportedAttentionError("its attention is not Transformers' interface")
    for cuts in _CHECK_CUTS:
        for one, other in zip(cold, prefill(cuts)[0], strict=True):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                return f"a prefill resumed at {cuts} has other bits"
    return None


_BLOCK = 512  # keys
_GRANULES = (32, 64, 128, 256, _BLOCK)
_QUERIES = (32, 192, 768)  # from each of these on, the kernel takes more queries at a time


def key_granule(layout: KVLayout) -> int | None:
    """The smallest granule for all layers of a model; None if not even whole blocks give the same bits."""
    kinds = {(spec.dim, spec.dtype) for spec in layout.slots}
    differing = {keys for dim, dtype in kinds for keys in range(32, _BLOCK + 1, 32) if not _agrees(keys, dim, dtype)}
    return next((granule for granule in _GRANULES if not any(keys % granule == 0 for keys in differing)), None)


def _agrees(keys: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether so many keys give the bits of a full block with the others hidden."""
    value = torch.zeros(1, 1, _BLOCK, dim)
    value[0, 0, :keys] = cancelling_values(keys, dim, dtype)
    value = value.to(dtype)
    hidden = torch.zeros(_BLOCK, dtype=dtype).masked_fill_(torch.arange(_BLOCK) >= keys, float("-inf"))
    expected = _equal_weights(_QUERIES[0], value, hidden)[:, :, :1]
    return all(
        torch.equal(found, expected.expand_as(found))
        for found in (_equal_weights(queries, value[:, :, :keys], hidden[:keys]) for queries in _QUERIES)
    )


def _equal_weights(queries: int, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Attention that gives all visible keys the same weight."""
    query = value.new_zeros(1, 1, queries, value.shape[3])
    return flash(query, torch.zeros_like(value), value, hidden.expand(1, 1, queries, -1), None)


def attention_bits(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the kernel makes of some values: other bits on a CPU where a granule would have to be found again."""
    value = cancelling_values(_BLOCK, 64, dtype).to(dtype).view(1, 1, _BLOCK, 64)
    visible = torch.zeros(_BLOCK, dtype=dtype)
    return [_equal_weights(q, value[:, :, :keys], visible[:keys]) for q in _QUERIES[:2] for keys in (96, _BLOCK)]


def cancelling_values(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [count, dim] of many magnitudes whose sums over ``count`` are zero but for rounding."""
    generator = torch.Generator().manual_seed(count)
    half, places = count // 2, torch.randperm(count, generator=generator)
    magnitudes = 2.0 ** torch.randint(-9, 10, (half, dim), generator=generator)
    some = (torch.randn(half, dim, generator=generator) * magnitudes).to(dtype).float()
    values = torch.zeros(count, dim)
    values[places[:half]], values[places[half : 2 * half]] = some, -some
    return values
