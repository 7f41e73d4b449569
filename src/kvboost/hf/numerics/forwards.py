"""Other forwards for some modules of a model, in one thread and for the length of a step.

Used by :mod:`kvboost.hf.numerics.tiles` and by joint decoding. A pair of hooks per layer would do the same, but takes
40 us more: 10 ms of a short step of a model with 200 layers. Invariants: in other threads the modules are what they
were; the last thread to leave gives a module its own forward back.

The forwards of activation functions and rotary angles are here too. torch computes a function of many numbers in
vectors, and what is left at the end of a thread's share one by one, with another implementation whose last bit may
differ. So the rows are padded until every thread's share is made of whole vectors. Sums, products and roots are the
same either way.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

Forward = Callable[..., Any]

_lock = threading.Lock()


class _ByThread:
    """Stands in for a module's forward while some threads have others for it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.before: Forward | None = vars(module).get("forward")
        """What was set on the module itself, as Accelerate does; None for its class' forward."""
        self.forwards: dict[int, Forward | None] = {}
        """By thread; None while it runs, so that it may call the module's own."""
        self.__wrapped__ = module.forward  # by this name others find its parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        forward = self.forwards.get(thread)
        if forward is None:
            return self.__wrapped__(*args, **kwargs)
        self.forwards[thread] = None
        try:
            return forward(*args, **kwargs)
        finally:
            self.forwards[thread] = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """A copy of a module is in no step."""
        return copy.deepcopy(self.__wrapped__, memo)


def set_on(module: torch.nn.Module) -> Forward | None:
    """What somebody else set on a module in the place of its class' forward."""
    found = vars(module).get("forward")
    return found.before if isinstance(found, _ByThread) else found


@contextmanager
def replaced(forwards: Iterable[tuple[torch.nn.Module, Forward]]) -> Iterator[None]:
    """Within this block, and in this thread alone, these modules have these forwards. Blocks do not nest."""
    thread, entered = threading.get_ident(), []
    try:
        with _lock:
            for module, forward in forwards:
                found = vars(module).get("forward")
                standing = found if isinstance(found, _ByThread) else _ByThread(module)
                if thread in standing.forwards:
                    raise RuntimeError("a step cannot run within a step: call no engine from a hook of its model")
                entered.append((module, standing))
                standing.forwards[thread] = forward
                vars(module)["forward"] = standing
        yield
    finally:
        with _lock:
            for module, standing in entered:
                standing.forwards.pop(thread, None)
                if standing.forwards or vars(module).get("forward") is not standing:
                    continue
                # In one step each: other threads may call the module in between.
                if standing.before is not None:
                    vars(module)["forward"] = standing.before
                else:
                    del vars(module)["forward"]


_GRAIN = 32768  # numbers for which torch starts another thread
_GELU_GRAIN = 24576  # numbers from which GELU uses all threads
_VECTORS = 64  # numbers computed at a time, at most
_MAX_EXTRA = 1 << 16
_NO_FUNCTION = (torch.nn.Dropout, torch.nn.Identity, torch.nn.Embedding, torch.nn.Linear, Conv1D)


def functions_of(model: Any) -> list[tuple[torch.nn.Module, Forward]]:
    """The activation functions and rotary embeddings of a model, and for each a forward that pads what it is given."""
    return [
        (module, _rotary(module) if _frequencies(module) else _activation(module))
        for module in model.modules()
        if _frequencies(module) or (_is_called(module) and not any(module.children()) and not [*module.parameters()])
    ]


def _is_called(module: torch.nn.Module) -> bool:
    """Not a list of modules, of which adapters bring many, and nothing that computes no function."""
    return type(module).forward is not torch.nn.Module.forward and not isinstance(module, _NO_FUNCTION)


def _frequencies(module: torch.nn.Module) -> set[int]:
    """How many frequencies a rotary embedding has; some have a table for each kind of layer."""
    return {table.numel() for name, table in module.named_buffers(recurse=False) if name.endswith("inv_freq")}


def _activation(module: torch.nn.Module) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return module.forward(*args, **kwargs)
        rows = x.shape[-2]
        extra = missing(rows, (x.shape[-1],), torch.get_num_threads())
        if extra == 0 and x.is_contiguous():  # most steps: padding by nothing would copy all the same
            return module.forward(*args, **kwargs)
        output = module.forward(pad(x, (0, 0, 0, extra)).contiguous(), *args[1:], **kwargs)
        return output[..., :rows, :] if isinstance(output, torch.Tensor) and output.dim() >= 2 else output

    return forward


def _rotary(module: torch.nn.Module) -> Forward:
    widths = tuple(sorted({width for count in _frequencies(module) for width in (count, 2 * count)}))

    def forward(*args: Any, **kwargs: Any) -> Any:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        rows = positions.shape[-1]
        padded = pad(positions, (0, missing(rows, widths, torch.get_num_threads())))
        if "position_ids" in kwargs:
            kwargs["position_ids"] = padded
        else:
            args = (args[0], padded, *args[2:])
        found = module.forward(*args, **kwargs)
        if isinstance(found, torch.Tensor):  # cosine and sine as one complex number
            return found[..., :rows, :]
        return tuple(angles[..., :rows, :] for angles in found)

    return forward


@lru_cache(maxsize=4096)
def missing(rows: int, widths: tuple[int, ...], threads: int) -> int:
    """How many rows to add, so that for each width the shares of all threads are whole vectors."""
    for extra in range(_MAX_EXTRA):
        if all(_whole((rows + extra) * width, threads) for width in widths):
            return extra
    raise ValueError(f"no number of rows of {widths} splits into whole vectors for {threads} threads")


def _whole(numbers: int, threads: int) -> bool:
    shares = {min(threads, -(-numbers // _GRAIN) or 1)}
    if numbers > _GELU_GRAIN:
        shares.add(threads)
    return all(numbers % (share * _VECTORS) == 0 for share in shares)
