"""Other forwards for some modules of a model, in one thread and for the length of a step.

Used by :mod:`kvboost.hf.numerics.tiles`. A pair of hooks per layer would do the same, but takes 40 us more: 10 ms of a
short step of a model with 200 layers. Invariants: in other threads the modules are what they were; the last thread to
leave gives a module its own forward back.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
