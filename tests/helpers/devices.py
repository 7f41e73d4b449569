"""Pretended accelerators: tensors that say they are on ``cuda:N``, hold their data in host memory, and are counted.

For tests of code that no machine here can run. ``with Devices() as devices`` makes every op on such tensors run on the
host and be recorded: copies between devices, kernel launches, and whatever makes the host wait for a device. Ops that
mix devices fail as they do with CUDA. Unlike torch's FakeTensorMode it computes real numbers, so code whose shapes
depend on data runs too, and results can be held against a run on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")
# The size of their result, or the result itself, is known to the host only once the device is done.
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
}
_FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_UNGUARDED = {torch.Tensor.nonzero: torch.ops.aten.nonzero, torch.Tensor.__invert__: torch.ops.aten.bitwise_not}
_SCALARS: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__bool__: bool,
    torch.Tensor.item: lambda value: value,
}


class PretendedTensor(torch.Tensor):
    """A tensor on a simulated device; ``data_on_host`` is what it holds."""

    __module__ = "torch.simulated"  # taken for torch's own, as FakeTensor is, and not for a library's packed weight
    data_on_host: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device) -> PretendedTensor:
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        made.data_on_host = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not Devices.active:
            raise RuntimeError(f"{func} on a simulated device outside of `with Devices()`")
        return Devices.active[-1].run(func, args, kwargs)  # in another thread than the mode's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These methods of torch ask for CUDA's device guard, which a build without CUDA does not have.
        if func is torch.Tensor.__getitem__ and isinstance(args[0], cls):
            view, indices = _viewed(*args)
            return torch.ops.aten.index(view, indices) if indices else view
        if func is torch.Tensor.__setitem__ and isinstance(args[0], cls):
            view, indices = _viewed(*args[:2])
            value = args[2] if isinstance(args[2], torch.Tensor) else torch.tensor(args[2], dtype=view.dtype)
            if indices:
                torch.ops.aten.index_put_(view, indices, value)
            elif value.dim() or isinstance(value, cls):
                view.copy_(value)
            else:
                view.fill_(args[2])
            return None
        if func is torch.Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.aten.copy_(*args, **(kwargs or {}))
        if func in _SCALARS:
            return _SCALARS[func](torch.ops.aten._local_scalar_dense(args[0]))
        if func in _UNGUARDED:
            return _UNGUARDED[func](*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def record_stream(self, stream: Any) -> None:
        """Their memory is the host's, and is there as long as it is referred to."""

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"PretendedTensor({self.data_on_host}, device={self.device})"


@dataclass(frozen=True)
class Event:
    """Something a device was asked to do.

    ``kind`` is ``upload``, ``download``, ``transfer`` (from device to device), ``wait`` or ``launch``; ``float64`` for
    a result on a device, which MPS would refuse, ``pin`` for pinned memory of the host.
    """

    kind: str
    op: str
    nbytes: int = 0
    pinned: bool = False
    """Of an upload: whether it began in pinned memory."""


class Devices(TorchDispatchMode):
    """Runs and records the ops on simulated devices. Only the thread that entered it can make tensors there."""

    active: ClassVar[list[Devices]] = []

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.pinned: list[torch.Tensor] = []
        """Host memory [bytes] that the devices copy from without another copy."""
        self._patches = ExitStack()

    def __enter__(self) -> Devices:
        self._patches.enter_context(mock.patch("torch.cuda._lazy_init"))  # there is no CUDA to initialise
        properties = SimpleNamespace(name="simulated", major=9, minor=0, multi_processor_count=1, total_memory=2**34)
        self._patches.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=properties))
        self._patches.enter_context(mock.patch("torch.cuda.mem_get_info", return_value=(2**33, 2**34)))
        # No streams: copies are made at once, as on a device that has one queue for everything.
        if hasattr(torch.cuda, "stream"):
            self._patches.callback(setattr, torch.cuda, "stream", torch.cuda.stream)
            del torch.cuda.stream
        # So that torch.tensor(..., device=...) is a tensor of the host and a copy, as it is with CUDA.
        before = torch._C._only_lift_cpu_tensors()
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, before)
        torch._C._set_only_lift_cpu_tensors(True)
        Devices.active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        Devices.active.remove(self)
        self._patches.close()

    @property
    def counts(self) -> Counter[str]:
        """How many events of each kind there were. A download is counted as a wait, too."""
        counts = Counter(event.kind for event in self.events)
        counts["wait"] += counts["download"]
        return counts

    def of(self, kind: str) -> Counter[str]:
        """The ops behind the events of one kind."""
        return Counter(event.op for event in self.events if event.kind == kind)

    @property
    def unpinned_bytes(self) -> int:
        """What was uploaded from pageable memory: each such copy makes the host wait."""
        return sum(event.nbytes for event in self.events if event.kind == "upload" and not event.pinned)

    def pinned_memory_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The pinned memory that a tensor of the host lies in."""
        inside = (memory for memory in self.pinned if 0 <= tensor.data_ptr() - memory.data_ptr() < len(memory))
        return next(inside, None)

    def during(self, work: Callable[[], Any]) -> Counter[str]:
        """The counts of what ``work`` does."""
        self.events.clear()
        work()
        return self.counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op on the host, and record it if it is on a simulated device."""
        kwargs = dict(kwargs or {})
        op = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = kwargs.get("device")
        if op == "copy_":
            device = args[0].device
            self._copied(op, args[1], device)
        elif op == "_to_copy":
            device = tensors[0].device if wanted is None else _indexed(wanted)
            self._copied(op, tensors[0], device)
        else:
            device = _common_device(op, tensors) if wanted is None else _indexed(wanted)
            if device != CPU:
                self._launched(func, op, args, tensors, device)
        if wanted is not None:
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            self.events.append(Event("pin", op))
        wrappers = {id(t.data_on_host): t for t in tensors if isinstance(t, PretendedTensor)}
        on_host = tree_map_only(PretendedTensor, lambda tensor: tensor.data_on_host, (args, kwargs))
        result = func(*on_host[0], **on_host[1])
        if device == CPU:
            return result
        if any(isinstance(part, torch.Tensor) and part.dtype == torch.float64 for part in tree_leaves(result)):
            self.events.append(Event("float64", op))
        return tree_map_only(torch.Tensor, lambda part: _wrapped(part, wrappers, device), result)

    def _copied(self, op: str, source: torch.Tensor, target: torch.device) -> None:
        if source.device == target:
            kind = "launch"
        elif source.device == CPU:
            kind = "upload"
        else:
            kind = "download" if target == CPU else "transfer"
        if kind != "launch" or target != CPU:
            pinned = kind == "upload" and self.pinned_memory_of(source) is not None
            self.events.append(Event(kind, op, source.numel() * source.element_size(), pinned))

    def _launched(self, func: Any, op: str, args: Any, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        waits = op in _WAITING or (op == "repeat_interleave" and func._overloadname == "Tensor")
        if op in _INDEXING:
            for index in tree_leaves(args[1]):
                if isinstance(index, torch.Tensor):
                    waits = waits or _is_mask(index)
                    if index.device != device:
                        self._copied(op, index, device)
        if waits:
            self.events.append(Event("wait", op))
        if not func.is_view and op not in _FREE:
            self.events.append(Event("launch", op))


def _viewed(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What ``tensor[index]`` does by views, and the tensors it then indexes the dimensions with."""
    items = index if isinstance(index, tuple) else (index,)
    items = tuple(torch.tensor(item) if isinstance(item, list) else item for item in items)
    used = sum(item.dim() if _is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis)
    view, dim = tensor, 0
    indices: list[torch.Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            dim += tensor.dim() - used
        elif item is None:
            view, dim = view.unsqueeze(dim), dim + 1
        elif isinstance(item, slice):
            view, dim = torch.ops.aten.slice(view, dim, item.start, item.stop, item.step or 1), dim + 1
        elif isinstance(item, torch.Tensor) and (item.dim() or _is_mask(item)):
            indices += [None] * (dim - len(indices)) + [item]
            dim += item.dim() if _is_mask(item) else 1
        else:
            view = view.select(dim, int(item))
    return view, indices


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


def _wrapped(result: torch.Tensor, wrappers: dict[int, Any], device: torch.device) -> torch.Tensor:
    same = wrappers.get(id(result))
    return PretendedTensor(result, device) if same is None else same


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


def _common_device(op: str, tensors: list[torch.Tensor]) -> torch.device:
    """The device an op runs on; RuntimeError where CUDA would raise one."""
    if op in _INDEXING:
        return tensors[0].device  # indices on the host are copied
    found = {tensor.device for tensor in tensors}
    if len(found) > 1:
        found = {
            tensor.device for tensor in tensors if tensor.dim() or tensor.device != CPU
        }  # host scalars are arguments
    if len(found) > 1:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {sorted(map(str, found))}")
    return found.pop() if found else CPU


def on_device(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A copy of ``tensor`` on a simulated device."""
    if torch.device(device).type == "cpu":
        return tensor.clone()
    with mock.patch("torch.cuda._lazy_init"):
        return PretendedTensor(tensor.detach().clone(), _indexed(device))


def put(model: Any, place: Callable[[str], str]) -> Any:
    """Put each parameter and buffer of ``model`` on the device that ``place`` gives for its name."""
    with Devices():
        for prefix, module in model.named_modules():
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    if tensor is not None:
                        there = on_device(tensor.detach(), place(f"{prefix}.{name}" if prefix else name))
                        kind[name] = torch.nn.Parameter(there, False) if kind is module._parameters else there
    return model


def spread(model: Any, *, layers: int, devices: int) -> Any:
    """Put a Llama's layers evenly on so many devices, as ``device_map`` would."""
    places = {"model.embed_tokens": "cuda:0", "model.rotary_emb": "cuda:0"}
    places |= {f"model.layers.{index}": f"cuda:{index * devices // layers}" for index in range(layers)}
    places |= {"model.norm": f"cuda:{devices - 1}", "lm_head": f"cuda:{devices - 1}"}
    put(model, lambda name: next(place for prefix, place in places.items() if name.startswith(f"{prefix}.")))
    if devices > 1:
        with Devices():
            attach_align_device_hook_on_blocks(  # as accelerate's dispatch_model does it
                model,
                execution_device={name: torch.device(place) for name, place in {**places, "": "cuda:0"}.items()},
                offload=dict.fromkeys(places, False),
                skip_keys=model._skip_keys_device_placement,
            )
    return model


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The data of a tensor, without recording a copy."""
    return tensor.data_on_host if isinstance(tensor, PretendedTensor) else tensor
