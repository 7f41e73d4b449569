"""One layer's KV in pages of equal size: which of them are resident, which spilled, and attention over all of them.

Used by the paged cache. Every page gives its part of the attention and the logarithm of the sum it was divided by; the
parts' shares of one softmax over all follow from those. Invariants: positions ``[0, length)`` are whole pages in order
and one page being filled; each position holds the bits the model gave for it, wherever its page lies; attention is
computed in float32 at least, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicLayer

from kvboost.errors import ConfigError
from kvboost.hf.cache import TensorSpec
from kvboost.offload.kv.pager import Pager

_PARTS_AT_ONCE = 256  # queries times parts that wait to be joined: few calls for one query, little memory for many


def parts_at_once(queries: int) -> int:
    """How many parts may be computed and joined together for so many queries."""
    return max(1, _PARTS_AT_ONCE // queries)


class JoinedAttention:
    """Joins the attention of the same queries to parts of a sequence. Every query must see some of the first part."""

    def __init__(self) -> None:
        self._outputs: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._parts = 0

    def add(self, output: torch.Tensor, weight: torch.Tensor) -> None:
        """The outputs of some parts [parts, heads, queries, dim] and the logs of their sums [parts, heads, queries]."""
        self._outputs.append(output)
        self._weights.append(weight)
        self._parts += len(output)
        if self._parts > parts_at_once(output.shape[2]):
            self._join()

    def result(self) -> torch.Tensor:
        """[1, heads, queries, dim]."""
        if self._parts > 1:
            self._join()
        return self._outputs[0]

    def _join(self) -> None:
        weights = torch.cat(self._weights)
        total = weights.logsumexp(dim=0, keepdim=True)
        shares = (weights - total).exp_().unsqueeze(-1)
        self._outputs = [(torch.cat(self._outputs) * shares).sum(dim=0, keepdim=True)]
        self._weights, self._parts = [total], 1


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``query`` [1, heads, queries, dim] to the keys [parts, heads, keys, dim] of each part by itself.

    ``mask`` [queries, keys] says which of them it sees; without one, all. A query that sees none gets zeros, with the
    weight of minus infinity.
    """
    query = query.expand(len(keys), -1, -1, -1)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if mask is None and query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
        return output, weight.reshape(query.shape[:3])
    scores = (query @ keys.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weight = scores.logsumexp(dim=-1)
    shares = (scores - weight.clamp_min(torch.finfo(weight.dtype).min).unsqueeze(-1)).exp_()
    return shares @ values, weight


def attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens to each other: each sees itself and those before it, ``window`` at most.

    ``query`` has the shape [1, heads, tokens, dim], keys and values [1, key heads, tokens, dim].
    """
    tokens, groups = query.shape[2], query.shape[1] // keys.shape[1]
    keys = keys.to(query.dtype).repeat_interleave(groups, dim=1)
    values = values.to(query.dtype).repeat_interleave(groups, dim=1)
    plain = window is None or tokens <= window
    if plain and query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, is_causal=True, scale=scale
        )
        return output, weight.reshape(query.shape[:3])
    return attend(query, keys, values, scale=scale, mask=band(tokens, window, device=query.device))


def band(tokens: int, window: int | None, *, device: torch.device) -> torch.Tensor:
    """What new tokens see of each other, [tokens, tokens]."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_()
    return seen if window is None else seen.triu_(1 - window)


_ONE_SEQUENCE = "a paged cache holds one sequence: use no batch, no beams and no num_return_sequences with kv_bytes"


@dataclass
class Page:
    """A whole page: in a frame of memory, or in a slot of the spill."""

    frame: torch.Tensor | None
    slot: int | None


@dataclass(frozen=True)
class PageShape:
    """How one layer's keys and values lie in a frame."""

    keys: TensorSpec
    values: TensorSpec
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.tokens * (self.keys.bytes_per_row + self.values.bytes_per_row)

    def views(self, frame: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in frames [pages, bytes] or in one, [pages, heads, tokens, dim] each."""
        frames, middle = frame if frame.dim() == 2 else frame[None], self.tokens * self.keys.bytes_per_row
        return self._view(self.keys, frames[:, :middle]), self._view(self.values, frames[:, middle : self.nbytes])

    def _view(self, spec: TensorSpec, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(spec.dtype).view(len(memory), spec.heads, self.tokens, spec.dim)


class PagedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer's page table. Attention goes through :meth:`attend`, which the cache calls instead of the kernel."""

    is_croppable = False

    def __init__(
        self,
        pager: Pager,
        shape: PageShape,
        *,
        resident: int,
        window: int | None,
        announce: Callable[[PagedLayer, torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._pager, self._shape, self._announce = pager, shape, announce
        self._may_stay = resident
        self.window = window
        self.pages: list[Page] = []
        self._tail: torch.Tensor | None = None
        self.length = 0
        self.dtype, self.device = shape.keys.dtype, shape.keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: frames are taken as tokens come."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the KV of new tokens, [1, heads, new, dim]; attention finds the KV before it by itself."""
        if key_states.shape[0] != 1:
            self._refuse()
        self._announce(self, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made for the new tokens among themselves; everything before is seen without one."""
        return query_length, self.length

    @torch.no_grad()
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        next_slots: Callable[[], list[int]],
    ) -> torch.Tensor:
        """Attention of new tokens to themselves and all before, [1, heads, new, dim]; then their KV is kept."""
        _, heads, new, dim = query.shape
        wide = query.to(torch.promote_types(query.dtype, torch.float32))
        groups = heads // keys.shape[1]
        # Heads that share keys become rows of one query, so no key is repeated.
        grouped = wide.reshape(1, keys.shape[1], groups * new, dim)
        joined = JoinedAttention()
        if new == 1:
            self.append(keys, values)
        else:
            output, weight = attend_causally(wide, keys, values, scale=scale, window=self.window)
            joined.add(
                output.reshape(1, keys.shape[1], groups * new, -1), weight.reshape(1, keys.shape[1], groups * new)
            )
        # In decoding the new token lies in the pages already and is seen like those before it.
        first_query = self.length - 1 if new == 1 else self.length
        at_once = parts_at_once(groups * new) if self.window is None else 1  # what a window hides differs by page
        with closing(self._parts(self._first_seen(first_query), next_slots, at_once=at_once)) as parts:
            for start, count, page_keys, page_values in parts:
                mask = self._mask(start, start + count, first_query, new, groups)
                joined.add(*attend(grouped, page_keys[:, :, :count], page_values[:, :, :count], scale=scale, mask=mask))
        if new > 1:
            self.append(keys, values)
        return joined.result().reshape(1, heads, new, -1).to(query.dtype)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the KV of new tokens, [1, heads, new, dim]. Pages that become whole stay or are spilled."""
        done, new, tokens = 0, keys.shape[2], self._shape.tokens
        while done < new:
            if self._tail is None:
                self._tail = self._pager.new_frame()
            filled = self.length % tokens
            count = min(tokens - filled, new - done)
            for store, states in zip(self._shape.views(self._tail), (keys, values), strict=True):
                store[:, :, filled : filled + count].copy_(states[:, :, done : done + count])
            done, self.length = done + count, self.length + count
            if filled + count == tokens:
                self._put_away(self._tail)

    def slots_ahead(self) -> list[int]:
        """The slots its next attention will read, in order."""
        first = self._first_seen(self.length) // self._shape.tokens
        return [page.slot for page in self.pages[first:] if page.slot is not None]

    def copy_to(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the KV from position ``first`` on into these, [1, heads, tokens, dim], which lie outside the budget."""
        last = first + keys.shape[2]
        with closing(self._parts(first, list, end=last)) as parts:
            for start, _, *pages in parts:
                begin, end = max(first, start), min(last, start + self._shape.tokens)
                for copy, page in zip((keys, values), pages, strict=True):
                    copy[:, :, begin - first : end - first] = page[:, :, begin - start : end - start]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: pages are only appended to. Requests with a draft are not paged."""
        raise ConfigError("a paged cache takes no tokens back, as a draft needs it; leave out the draft, or kv_bytes")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """A cache is made for one sequence: beams would need a page table each."""
        raise ConfigError(_ONE_SEQUENCE)

    reset = reorder_cache = batch_select_indices = _refuse

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused unless it changes nothing."""
        if repeats != 1:
            self._refuse()

    def _first_seen(self, query_position: int) -> int:
        return 0 if self.window is None else max(0, query_position - self.window + 1)

    def _parts(
        self, first: int, next_slots: Callable[[], list[int]], *, at_once: int = 1, end: int | None = None
    ) -> Generator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Pages that hold positions ``[first, end)``, by default to the last one: the first position, how many tokens
        each page holds, keys, values [pages, heads, tokens, dim]. Those in memory come first."""
        tokens = self._shape.tokens
        end = self.length if end is None else end
        away: list[tuple[int, int]] = []
        here: list[tuple[int, torch.Tensor]] = []
        for number in range(first // tokens, min(len(self.pages), -(-end // tokens))):
            page = self.pages[number]
            if page.frame is not None:
                here.append((number, page.frame))
            elif page.slot is not None:
                away.append((number, page.slot))
        if self._tail is not None and end > len(self.pages) * tokens:
            here.append((len(self.pages), self._tail))
        # Asked for before anything is computed, so that the first one is read meanwhile.
        self._pager.expect([slot for _, slot in away])
        for number, frame in here:
            yield number * tokens, min(self.length - number * tokens, tokens), *self._shape.views(frame)
        done = 0
        with closing(self._pager.read([slot for _, slot in away], then=next_slots())) as groups:
            for pages in groups:
                for part in (pages[begin : begin + at_once] for begin in range(0, len(pages), at_once)):
                    yield away[done][0] * tokens, tokens, *self._shape.views(part)
                    done += len(part)

    def _mask(self, start: int, stop: int, first_query: int, new: int, groups: int) -> torch.Tensor | None:
        """Which of ``[start, stop)`` the window shows to new tokens, [groups * new, stop - start]; None is all."""
        if self.window is None or start >= self._first_seen(first_query + new - 1):
            return None
        queries = torch.arange(first_query, first_query + new, device=self.device).unsqueeze(1)
        seen = torch.arange(start, stop, device=self.device) > queries - self.window
        return seen.repeat(groups, 1)

    def _put_away(self, frame: torch.Tensor) -> None:
        """The tail is whole: it stays if it may. A window keeps its newest pages, other layers their oldest."""
        staying = [page for page in self.pages if page.frame is not None]
        self._tail = None
        if len(staying) < self._may_stay:
            self.pages.append(Page(frame, None))
        elif self.window is None or not staying:
            self.pages.append(Page(None, self._pager.write(frame, owner=id(self))))
            self._tail = frame
        else:
            oldest = staying[0]
            assert oldest.frame is not None
            oldest.slot = self._pager.write(oldest.frame, owner=id(self))
            self._tail, oldest.frame = oldest.frame, None
            self.pages.append(Page(frame, None))
