"""Steps whose bits depend on the tokens alone: not on where a step begins, how long it is or what was cached.

Used by the runner around every forward that fills a cache. Linear layers run in tested sizes
(:mod:`kvboost.hf.numerics.rows`), activation functions on whole vectors (:mod:`kvboost.hf.numerics.forwards`),
attention over padded keys (:mod:`kvboost.hf.attention`); everything else in a decoder works on each row alone. No layer
is replaced: those that need it have another forward for the length of a step (:mod:`kvboost.hf.numerics.forwards`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from kvboost.errors import ConfigError
from kvboost.hf.attention import NAME, JointStep, Step, attending
from kvboost.hf.cache import KVLayout
from kvboost.hf.numerics.forwards import Forward, functions_of, replaced, set_on
from kvboost.hf.numerics.own_weights import Shape, WholeVectors, forward_of, is_own, shapes_of
from kvboost.hf.numerics.rows import (
    CALL_COST,
    PackedLinear,
    Rows,
    RowsInto,
    RowSizes,
    can_pack,
    cancelling,
    find_classes,
    run_rows,
    sizes_like,
    writer_of,
)
from kvboost.hf.packed_weights import is_packed
from kvboost.hf.peft_layers import WeightNames, walk

_PACKED_CALL_COST = 24  # less than CALL_COST, as nothing is reordered
_KNOWN = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
_MAX_TEST_BYTES = 1 << 26  # of a layer's weights, up to which it is kept to test the lengths of steps as they come
_GOOD_ENOUGH = 1.05  # overhead of a class, above which packed weights may be worth their memory
_MORE_IN_FLOAT32 = 0.2  # packed calls are hardly faster there; and a streamed model, never packed, rounds otherwise

Choices = Mapping[str, tuple[RowSizes, bool]]
"""By shape of layer: its sizes, and whether it is packed."""


@dataclass(frozen=True)
class _Layer:
    """How one linear layer is run."""

    module: torch.nn.Module
    sizes: RowSizes
    packed: PackedLinear | None
    into: RowsInto | None

    def runs_as_it_is(self, rows: int) -> bool:
        return self.packed is None and self.sizes.allows(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = run_rows(self.packed or self.module.forward, x.reshape(-1, x.shape[-1]), self.sizes, into=self.into)
        return result.view(*x.shape[:-1], -1)


def why_no_tiles(model: Any) -> str | None:
    """Why this model's layers cannot run in tiles, as far as its modules tell; None if they may."""
    if model.config._attn_implementation != NAME:
        return f"its attention is {model.config._attn_implementation!r}, not {NAME!r}"
    return next(filter(None, map(_own_way, model.modules())), None)


def _own_way(module: torch.nn.Module) -> str | None:
    """Why a layer's rounding cannot be tested with other weights than its own; None if it can, or it has none.

    No numbers can be made for packed weights whose sums would show the order in which they are added, and some layers
    pack the rows of a call together, as LLM.int8 does with outliers.
    """
    tensors: list[torch.Tensor | None] = [*module._parameters.values()]
    if not module._modules:  # GPTQ and AWQ keep their weights here; attention, which has children, its masks
        tensors += [buffer for buffer in module._buffers.values() if buffer is not None and is_packed(buffer)]
    matrices = [tensor for tensor in tensors if tensor is not None and tensor.dim() > 1]
    if not matrices:
        return None
    name = type(module).__name__
    if not isinstance(module, _KNOWN) and not is_own(module, _KNOWN):
        return f"{name} multiplies with weights in its own way"
    if any(map(is_packed, matrices)):
        return f"the weights of {name} are packed"
    if not isinstance(module, torch.nn.Embedding) and set_on(module) is not None:
        return f"the forward of {name} was replaced"
    return None


@dataclass(frozen=True)
class _Plan:
    """How a step is run with one number of threads."""

    layers: list[_Layer]
    functions: list[tuple[torch.nn.Module, Forward]]
    own: Mapping[Shape, RowSizes]
    """Of modules with weights of their own."""


class Tiles:
    """The linear layers and the attention of one model. Thread-safe."""

    def __init__(
        self, model: Any, layout: KVLayout, *, granule: int, budget: int, known: Choices | None = None
    ) -> None:
        """``granule`` is the multiple to which attention pads its keys; packed weights take at most ``budget`` bytes.

        What is packed is in the key, so the budget must be the same at every start. Shapes in ``known`` are not tested:
        it is what :attr:`choices` was on this machine, with this number of threads.
        """
        self.granule = granule
        self._model, self._device = model, layout.slots[0].device
        self._budget = budget
        self._lock = threading.Lock()
        self._modules: list[Any] = []
        self._plans: dict[int, _Plan] = {}
        self._packed: frozenset[str] | None = None
        self._known = known or {}
        plan = self._plan()
        layers, own = plan.layers, plan.own
        self._known = {}  # other numbers of threads are tested
        # For other numbers of threads too: what is packed is in the key.
        self._packed = frozenset(_shape(layer.module) for layer in layers if layer.packed is not None)
        added = _adapters_of(model)
        self.choices: Choices = {
            _name(layer.module, layer.module in added): (layer.sizes, layer.packed is not None) for layer in layers
        } | {_own_name(shape): (sizes, False) for shape, sizes in own.items()}
        """What was found with this thread's number of threads."""
        kinds = sorted({_kind(layer) for layer in layers if layer.module not in added})
        kinds += sorted(f"{_own_name(shape)}:{sizes.dense}" for shape, sizes in own.items())
        self.spec = f"tiles2:{granule}:{','.join(kinds)}"
        """Names what the bits depend on, beside the machine: the sizes of each shape, and whether it is packed."""

    @property
    def packed_bytes(self) -> int:
        """Memory of packed weights. Each number of threads that a step ran with has its own."""
        with self._lock:
            layers = [layer for plan in self._plans.values() for layer in plan.layers]
        return sum(layer.packed.nbytes for layer in layers if layer.packed is not None)

    @contextmanager
    def step(self, cache: Any, rows: int) -> Iterator[Step]:
        """Within this block a forward of ``rows`` tokens over ``cache`` has the bits of any other that covers them."""
        step = self._over(cache, rows)
        with self._in_sizes(rows), attending(step):
            yield step

    @contextmanager
    def joint_step(self, caches: Sequence[Any], rows: Sequence[int]) -> Iterator[JointStep]:
        """The same for a forward of several sequences: ``rows`` tokens of each, one after the other."""
        step = JointStep([self._over(*each) for each in zip(caches, rows, strict=True)], list(rows))
        with self._in_sizes(sum(rows)), attending(step):
            yield step

    def _over(self, cache: Any, rows: int) -> Step:
        """Attention over ``cache`` and ``rows`` more tokens, padded with zeros."""
        start = cache.get_seq_length()
        end = start + rows
        padded = -(-end // self.granule) * self.granule
        cache.reserve(padded)
        cache.wipe(end, padded)
        return Step(cache, start, padded, self.granule)

    @contextmanager
    def _in_sizes(self, rows: int) -> Iterator[None]:
        """Within this block the layers compute ``rows`` rows in the sizes that were tested."""
        plan = self._plan()
        layers = [(layer.module, layer.forward) for layer in plan.layers if not layer.runs_as_it_is(rows)]
        with replaced([*layers, *plan.functions]), WholeVectors() if plan.own else nullcontext():
            yield

    def weights_changed(self) -> None:
        """Pack again: weights may have changed without a trace."""
        with self._lock:
            self._plans.clear()

    def _plan(self) -> _Plan:
        """The plan for this thread's number of threads, by which kernels split their sums, and for today's adapters."""
        threads, modules = torch.get_num_threads(), list(walk(self._model))
        with self._lock:
            if modules != self._modules:
                reason = why_no_tiles(self._model)
                if reason is not None:
                    raise ConfigError(
                        f"an adapter was loaded with which prompts cannot be resumed at any token ({reason}); make a "
                        "new engine around the model with this adapter, or delete the adapter"
                    )
                self._plans.clear()
                self._modules = modules
            if threads not in self._plans:
                self._plans[threads] = self._make_plan()
            return self._plans[threads]

    def _make_plan(self) -> _Plan:
        added, linear = _adapters_of(self._model), _linear_modules(self._model)
        layers = _linear_layers(linear, added, self._device, self._budget, self._packed, self._known)
        own = _own_sizes(self._model, self._device, self._known)
        forwards = [(module, forward_of(module, own)) for module in self._model.modules() if is_own(module, _KNOWN)]
        return _Plan(layers, [*functions_of(self._model), *forwards], own)


def _adapters_of(model: Any) -> set[Any]:
    """The modules of adapters. They come and go, and are small: they do not decide what is packed."""
    names = WeightNames(model)
    return {module for path, module in model.named_modules() if names.owner_and_name(f"{path}.weight")[0]}


def _linear_modules(model: Any) -> list[Any]:
    """The linear layers of ``model`` but the vocabulary projection, which makes logits and no KV."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if module is not head and isinstance(module, torch.nn.Linear | Conv1D)]


def _shape(module: Any) -> str:
    """What the kernels of a layer depend on."""
    weight = module.weight
    size = "x".join(map(str, weight.shape))
    return f"{type(module).__name__}:{size}:{weight.dtype}:{'bias' if module.bias is not None else 'plain'}"


def _name(module: Any, added: bool) -> str:
    """A shape among :data:`Choices`: an adapter's layer is never packed, whatever its shape."""
    return f"{'adapter ' if added else ''}{_shape(module)}"


def _kind(layer: _Layer) -> str:
    """How a shape of layer is run."""
    return f"{_shape(layer.module)}:{layer.sizes.dense}{':packed' if layer.packed is not None else ''}"


def _linear_layers(
    linear: list[Any],
    added: set[Any],
    device: torch.device,
    budget: int,
    packed_shapes: frozenset[str] | None,
    known: Choices,
) -> list[_Layer]:
    """How these layers are run, each tested once per shape; packed weights take at most ``budget`` bytes.

    ``added`` are those of adapters, which are not packed. With ``packed_shapes``, exactly those are. Shapes in
    ``known`` are not tested.
    """
    by_shape: dict[tuple[str, bool], list[Any]] = {}
    for module in linear:
        by_shape.setdefault((_shape(module), module in added), []).append(module)
    layers = []
    for (shape, is_added), modules in by_shape.items():
        nbytes = sum(module.weight.nbytes for module in modules)
        packable = not is_added and nbytes <= budget and all(map(can_pack, modules))
        wanted = None if packed_shapes is None else not is_added and shape in packed_shapes
        if (name := _name(modules[0], is_added)) in known:
            sizes, pack = known[name]
            sizes = replace(sizes, test=_test_later(modules[0], device, sizes.dense, packed=pack))
        else:
            sizes, pack = _choose(modules[0], device, packable=packable, wanted=wanted)
        budget -= nbytes if pack else 0
        for module in modules:
            packed = PackedLinear(module) if pack else None
            into = writer_of(module) if packed is None else None
            layers.append(_Layer(module, sizes, packed, into))
    return layers


def _own_name(shape: Shape) -> str:
    """A shape among :data:`Choices`."""
    outputs, inputs, dtype, bias = shape
    return f"own:{outputs}x{inputs}:{dtype}:{'bias' if bias else 'plain'}"


def _own_sizes(model: Any, device: torch.device, known: Choices) -> dict[Shape, RowSizes]:
    """The sizes in which modules with weights of their own are run. How many rows come is never the same twice, so
    other sizes than these are not tested."""
    found: dict[Shape, RowSizes] = {}
    for module in model.modules():
        for shape in shapes_of(module) if is_own(module, _KNOWN) else ():
            if shape in found:
                continue
            if (name := _own_name(shape)) in known:
                found[shape] = known[name][0]
                continue
            outputs, inputs, dtype, bias = shape
            alike = torch.nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=dtype)
            found[shape] = replace(_choose(alike, device, packable=False, wanted=None)[0], test=None)
    return found


def _choose(module: Any, device: torch.device, *, packable: bool, wanted: bool | None) -> tuple[RowSizes, bool]:
    """The best class of a layer's shape, and whether weights are packed for it: if it pays, or as ``wanted``."""
    test, rows = _test_layer(module, device)

    def best(layer: Rows, call_cost: int) -> RowSizes:
        test_later = module.weight.nbytes <= _MAX_TEST_BYTES
        classes = find_classes(layer, rows, call_cost=call_cost, test_later=test_later)
        return min(classes, key=lambda sizes: sizes.overhead)

    if wanted:
        return best(PackedLinear(test), _PACKED_CALL_COST), True
    plain = best(test.forward, CALL_COST)
    limit = _GOOD_ENOUGH + (_MORE_IN_FLOAT32 if module.weight.dtype == torch.float32 else 0.0)
    if plain.overhead <= limit or not packable or wanted is not None:
        return plain, False
    packed = best(PackedLinear(test), _PACKED_CALL_COST)
    return (packed, True) if packed.overhead < plain.overhead else (plain, False)


def _test_later(module: Any, device: torch.device, size: int, *, packed: bool) -> Callable[[int], bool] | None:
    """A test of other sizes than those of a known class. What it needs is made when a size is first wanted."""

    @cache
    def made() -> Callable[[int], bool]:
        test, rows = _test_layer(module, device)
        return sizes_like(size, PackedLinear(test) if packed else test.forward, rows)

    return (lambda other: made()(other)) if module.weight.nbytes <= _MAX_TEST_BYTES else None


def _test_layer(module: Any, device: torch.device) -> tuple[Any, torch.Tensor]:
    """A layer of the same shape, and rows to test it with."""
    weight = module.weight
    if type(module) is torch.nn.Linear:
        rows, weights = cancelling(weight.shape[1], weight.shape[0])
        test: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
    elif type(module) is Conv1D:
        rows, weights = cancelling(weight.shape[0], weight.shape[1])
        test, weights = Conv1D(weight.shape[1], weight.shape[0]), weights.t()
    else:  # weights of its own kind: only the layer itself can be tested
        return module, cancelling(module.in_features, 1)[0].to(device)
    parameter = torch.empty_like(weight, requires_grad=False, device=device).copy_(weights)
    test.weight = torch.nn.Parameter(parameter, requires_grad=False)
    if module.bias is not None:
        test.bias = torch.nn.Parameter(torch.zeros_like(module.bias, device=device), requires_grad=False)
    return test, rows.to(device, weight.dtype)
