"""Other forwards for some modules of a model, in one thread and for the length of a step.

Used by :mod:`kvboost.hf.numerics.tiles`. A pair of hooks would do the same, but costs some 40 us per layer and step,
which is a tenth of a short step of a small model. Invariants: in other threads the modules are what they were; the last
thread to leave gives a module its own forward back.
"""

from __future__ import annotations

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
        self._own = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        forward = self.forwards.get(thread)
        if forward is None:
            return self._own(*args, **kwargs)
        self.forwards[thread] = None
        try:
            return forward(*args, **kwargs)
        finally:
            self.forwards[thread] = forward


@contextmanager
def replaced(forwards: Iterable[tuple[torch.nn.Module, Forward]]) -> Iterator[None]:
    """Within this block, and in this thread alone, these modules have these forwards. Blocks do not nest."""
    thread, taken = threading.get_ident(), []
    try:
        with _lock:
            for module, forward in forwards:
                found = vars(module).get("forward")
                standing = found if isinstance(found, _ByThread) else _ByThread(module)
                module.forward = standing
                standing.forwards[thread] = forward
                taken.append((module, standing))
        yield
    finally:
        with _lock:
            for module, standing in taken:
                standing.forwards.pop(thread, None)
                if not standing.forwards and vars(module).get("forward") is standing:
                    del module.forward
                    if standing.before is not None:
                        module.forward = standing.before
