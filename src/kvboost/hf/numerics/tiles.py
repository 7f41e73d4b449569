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
from kvboost.hf.attention import NAME, JointStep, SharedStep, Step, attending
from kvboost.hf.cache import KVLayout
from kvboost.hf.numerics.forwards import Forward, functions_of, replaced, set_on
from kvboost.hf.numerics.own_weights import PackedWeights, Shape, WholeVectors, forward_of, is_own, shapes_of
from kvboost.hf.numerics.rows import (
    CALL_COST,
    PackedLinear,
    Rows,
    RowsInto,
    RowSizes,
    can_pack,
    can_pack_weight,
    cancelling,
    find_classes,
    run_rows,
    sizes_like,
    sizes_of_head,
    writer_of,
)
from kvboost.hf.packed_weights import is_packed
from kvboost.hf.peft_layers import WeightNames, walk

_PACKED_CALL_COST = 24  # less than CALL_COST, as nothing is reordered
_KNOWN = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
_MAX_TEST_BYTES = 1 << 26  # of a layer's weights, up to which it is kept to test the lengths of steps as they come
_GOOD_ENOUGH = 1.05  # overhead of a class, above which packed weights may be worth their memory
_EXPERT_STEP = 32  # rows; how many come is never the same twice, so few sizes are tested when they are wanted
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
    if not isinstance(module, _KNOWN) and not all(matrix.is_contiguous() for matrix in matrices):
        return f"the weights of {name} are strided"
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
    own: Mapping[Shape, tuple[RowSizes, bool]]
    """Of modules with weights of their own, and whether they are packed."""
    packed_own: list[PackedWeights]


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
        self._head_sizes: dict[int, RowSizes] = {}
        self._known = known or {}
        plan = self._plan()
        layers, own = plan.layers, plan.own
        self._known = {}  # other numbers of threads are tested
        # For other numbers of threads too: what is packed is in the key.
        self._packed = frozenset(_shape(layer.module) for layer in layers if layer.packed is not None)
        self._packed |= {_own_name(shape) for shape, (_, packed) in own.items() if packed}
        added = _adapters_of(model)
        self.choices: Choices = {
            _name(layer.module, layer.module in added): (layer.sizes, layer.packed is not None) for layer in layers
        } | {_own_name(shape): chosen for shape, chosen in own.items()}
        """What was found with this thread's number of threads."""
        kinds = sorted({_kind(layer) for layer in layers if layer.module not in added})
        kinds += sorted(f"{_own_name(shape)}:{one.dense}{':packed' * packed}" for shape, (one, packed) in own.items())
        self.spec = f"tiles2:{granule}:{','.join(kinds)}"
        """Names what the bits depend on, beside the machine: the sizes of each shape, and whether it is packed."""

    @property
    def packed_bytes(self) -> int:
        """Memory of packed weights. Each number of threads that a step ran with has its own."""
        with self._lock:
            plans = list(self._plans.values())
        return sum(_packed_bytes(plan.layers) + sum(own.nbytes for own in plan.packed_own) for plan in plans)

    @contextmanager
    def step(self, cache: Any, rows: int, *, head: bool = False) -> Iterator[Step]:
        """Within this block a forward of ``rows`` tokens over ``cache`` has the bits of any other that covers them.

        With ``head`` the logits of its rows, too.
        """
        step = self._over(cache, cache.get_seq_length(), rows)
        with self._in_sizes(rows, head=head), attending(step):
            yield step

    @contextmanager
    def joint_step(self, caches: Sequence[Any], rows: Sequence[int]) -> Iterator[JointStep]:
        """The same for a forward of several sequences: ``rows`` tokens of each, one after the other."""
        parts = [self._over(cache, cache.get_seq_length(), count) for cache, count in zip(caches, rows, strict=True)]
        step = JointStep(parts, list(rows))
        with self._in_sizes(sum(rows)), attending(step):
            yield step

    @contextmanager
    def shared_step(self, texts: Sequence[tuple[Any, int, Sequence[int]]]) -> Iterator[SharedStep]:
        """The same of some texts, and of sequences that all go on from one of them; the logits too.

        Of each text its cache, how many rows it has over that, and how many each sequence has after those.
        """
        parts: list[Step] = []
        rows: list[int] = []
        for held, count, following in texts:
            start = held.get_seq_length()
            end = start + count
            held.reserve(end + max(following, default=0) + self.granule)  # not while a sequence lies in it
            parts += [self._over(held, start, count), *(self._over(held, end, more) for more in following)]
            rows += [count, *following]
        with self._in_sizes(sum(rows), head=True), attending(step := SharedStep(parts, rows)):
            yield step

    def _over(self, cache: Any, start: int, rows: int) -> Step:
        """Attention over the first ``start`` positions of ``cache`` and ``rows`` more tokens, padded with zeros."""
        end = start + rows
        padded = -(-end // self.granule) * self.granule
        cache.reserve(padded)
        cache.wipe(end, padded)
        return Step(cache, start, padded, self.granule)

    @contextmanager
    def _in_sizes(self, rows: int, *, head: bool = False) -> Iterator[None]:
        """Within this block the layers, with ``head`` the last one too, compute in the sizes that were tested."""
        plan = self._plan()
        layers = [(layer.module, layer.forward) for layer in plan.layers if not layer.runs_as_it_is(rows)]
        if head:
            layers.append(self._head())
        with replaced([*layers, *plan.functions]), WholeVectors() if plan.own else nullcontext():
            yield

    def _head(self) -> tuple[torch.nn.Module, Forward]:
        """The vocabulary projection, and a forward of it whose rows do not depend on each other."""
        module = self._model.get_output_embeddings()
        with self._lock:
            threads = torch.get_num_threads()
            if threads not in self._head_sizes:
                self._head_sizes[threads] = sizes_of_head(module)
            sizes = self._head_sizes[threads]

        def forward(x: torch.Tensor) -> torch.Tensor:
            return run_rows(module.forward, x.reshape(-1, x.shape[-1]), sizes).view(*x.shape[:-1], -1)

        return module, forward

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
        budget = self._budget - _packed_bytes(layers)
        own = _own_sizes(self._model, self._device, budget, self._packed, self._known)
        sizes = {shape: found for shape, (found, _) in own.items()}
        wanted = {shape for shape, (_, packed) in own.items() if packed}
        packed = {module: PackedWeights(module, wanted) for module in self._model.modules() if is_own(module, _KNOWN)}
        forwards = [(module, forward_of(module, sizes, weights)) for module, weights in packed.items()]
        return _Plan(layers, [*functions_of(self._model), *forwards], own, list(packed.values()))


def _packed_bytes(layers: list[_Layer]) -> int:
    return sum(layer.packed.nbytes for layer in layers if layer.packed is not None)


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
            limit = _GOOD_ENOUGH + (_MORE_IN_FLOAT32 if modules[0].weight.dtype == torch.float32 else 0.0)
            sizes, pack = _choose(modules[0], device, packable=packable, wanted=wanted, limit=limit)
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


def _own_sizes(
    model: Any, device: torch.device, budget: int, packed_shapes: frozenset[str] | None, known: Choices
) -> dict[Shape, tuple[RowSizes, bool]]:
    """The same for the shapes of modules with weights of their own.

    They are packed in float32 alone: without AMX, packed rows in bfloat16 take longer than the padding they save.
    """
    stacks: dict[Shape, list[torch.Tensor]] = {}
    for module in model.modules():
        for shape, weight in shapes_of(module) if is_own(module, _KNOWN) else ():
            stacks.setdefault(shape, []).append(weight)
    found: dict[Shape, tuple[RowSizes, bool]] = {}
    for shape, weights in stacks.items():
        outputs, inputs, dtype, bias = shape
        alike = torch.nn.Linear(inputs, outputs, bias=bias, device="meta", dtype=dtype)
        nbytes, name = sum(weight.nbytes for weight in weights), _own_name(shape)
        if name in known:
            sizes, pack = known[name]
            sizes = replace(sizes, test=_test_later(alike, device, sizes.dense, packed=pack))
        else:
            packable = dtype == torch.float32 and nbytes <= budget and all(map(can_pack_weight, weights))
            wanted = None if packed_shapes is None else name in packed_shapes
            sizes, pack = _choose(alike, device, packable=packable, wanted=wanted, limit=_GOOD_ENOUGH)
        budget -= nbytes if pack else 0
        found[shape] = replace(sizes, step=_EXPERT_STEP), pack
    return found


def _choose(
    module: Any, device: torch.device, *, packable: bool, wanted: bool | None, limit: float
) -> tuple[RowSizes, bool]:
    """The best class of a layer's shape, and whether weights are packed for it: if it pays, or as ``wanted``.

    It may if the best class has more overhead than ``limit``.
    """
    test, rows = _test_layer(module, device)

    def best(layer: Rows, call_cost: int) -> RowSizes:
        test_later = module.weight.nbytes <= _MAX_TEST_BYTES
        classes = find_classes(layer, rows, call_cost=call_cost, test_later=test_later)
        return min(classes, key=lambda sizes: sizes.overhead)

    if wanted:
        return best(PackedLinear(test), _PACKED_CALL_COST), True
    plain = best(test.forward, CALL_COST)
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
