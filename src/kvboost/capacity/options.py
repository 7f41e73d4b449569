"""What fits as asked, and what would fit with streamed weights, paged KV, fewer bits or smaller caches.

Used by ``kvboost doctor``. Invariant: an option that is said to fit has a plan whose peak is within the room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvboost.capacity.memory import MemoryPlan, ModelShape, WeightMemory, Workload, plan_memory
from kvboost.capacity.speed import Rates, Speed, expected_speed
from kvboost.errors import ConfigError

_SHARES = (2, 4, 8)  # a half, a quarter, an eighth of the KV stays in memory


@dataclass(frozen=True)
class Option:
    """One way to run it."""

    name: str
    change: str
    """The settings that make it so; empty for what was asked."""
    plan: MemoryPlan
    fits: bool
    speed: Speed | None


def plan_options(
    shape: ModelShape,
    weights: WeightMemory,
    work: Workload,
    *,
    room: int,
    runtime: int,
    stored: Mapping[int, int],
    stream: Callable[[int], WeightMemory | None],
    rates: Rates | None = None,
) -> list[Option]:
    """As asked first, then what takes less.

    ``room`` is the memory there is, ``stored`` the bytes of a stored token by bits, ``stream`` what a weight budget
    leaves in memory (None if it is too small for the model).
    """

    def option(name: str, change: str, of: WeightMemory, asked: Workload) -> Option:
        plan = plan_memory(shape, of, asked, runtime=runtime)
        speed = expected_speed(shape, asked, plan, rates) if rates is not None else None
        return Option(name, change, plan, plan.peak <= room, speed)

    found = [option("as asked", "", weights, work)]
    over = found[0].plan.peak - room
    for bits in (8, 4):
        if stored[bits] < work.stored_per_token and work.cache_bytes:
            # As many chunks as before, in less memory.
            share = _round(work.cache_bytes * stored[bits] // work.stored_per_token)
            less = replace(work, stored_per_token=stored[bits], packed=True, cache_bytes=share)
            found.append(
                option(f"KV stored in {bits} bits", f"kv_cache_bits={bits}, cache_bytes={_text(share)}", weights, less)
            )
    if over > 0 and work.cache_bytes:
        share = _round(max(0, work.cache_bytes - over))
        found.append(
            option("a smaller cache", f"cache_bytes={_text(share)}", weights, replace(work, cache_bytes=share))
        )
    budgets = [weights.memory - over] if over > 0 else []
    for budget in map(_round, (*budgets, *(weights.memory // share for share in _SHARES))):
        if budget > 0 and (streamed := stream(budget)) is not None and streamed.streamed:
            found.append(option("weights streamed", f"weight_budget={_text(budget)}", streamed, work))
            break
    # Requests side by side are not paged: several of them run one after the other, each as this one.
    if work.batch == 1 and (found_pages := _paged(option, weights, work, shape)) is not None:
        paged, budget_of_kv = found_pages
        found.append(paged)
        smallest = next((o for o in found if o.name == "weights streamed"), None)
        if smallest is not None:
            change = f"{smallest.change}, {paged.change}"
            found.append(option("both", change, smallest.plan.weights, replace(work, kv_bytes=budget_of_kv)))
    return found


def _round(size: int) -> int:
    """A size that is easy to write, and no larger."""
    return size - size % 10**6 if size >= 10**7 else size


def _text(size: int) -> str:
    return f"{size // 10**6}MB" if size and size % 10**6 == 0 else str(size)


def _paged(
    option: Callable[[str, str, WeightMemory, Workload], Option],
    weights: WeightMemory,
    work: Workload,
    shape: ModelShape,
) -> tuple[Option, int] | None:
    """The largest share of the KV in memory with which it fits, else the smallest that pages allow; and its bytes."""
    best: tuple[Option, int] | None = None
    for share in _SHARES:
        budget = _round(work.context * shape.kv_per_token // share)
        try:
            asked = replace(work, kv_bytes=budget)
            best = option("KV paged", f"kv_bytes={_text(budget)}", weights, asked), budget
        except ConfigError:  # less than a page for every layer
            break
        if best[0].fits:
            break
    return best
