"""A model's weights: where they are, their digests, and whether they have changed.

Used by the fingerprint, by memory estimates and by ``describe``. Weights are hashed only after one was written or
replaced. A weight streamer attaches itself with :func:`attach_streamed_weights`: this package need not import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers.utils.logging import is_progress_bar_enabled

from kvboost.capacity import WeightMemory
from kvboost.errors import UnsupportedModelError
from kvboost.hf.packed_weights import packed, tensors_of
from kvboost.hf.peft_layers import WeightNames, walk

if TYPE_CHECKING:
    from hashlib import _Hash

_ATTRIBUTE = "_kvboost_streamed_weights"


class StreamedWeights(Protocol):
    """What streams the weights of one model."""

    @property
    def memory(self) -> WeightMemory:
        """Bytes in memory, in buffers and on disk."""
        ...

    def holds(self, module: torch.nn.Module, key: str) -> bool:
        """Whether this parameter is streamed, so that its tensor does not identify its content."""
        ...

    def digest(self, module: torch.nn.Module, key: str, name: str) -> bytes:
        """The digest of a streamed parameter under this name: the same as if it were in memory."""
        ...


def attach_streamed_weights(model: Any, weights: StreamedWeights) -> None:
    """Register ``weights`` as the streamer of ``model``."""
    setattr(model, _ATTRIBUTE, weights)


def streamed_weights_of(model: Any) -> StreamedWeights | None:
    """What streams this model's weights; None if they are all in memory."""
    return getattr(model, _ATTRIBUTE, None)


def weights_of(model: Any) -> WeightMemory:
    """Where a loaded model's weights are, in bytes."""
    streamed = streamed_weights_of(model)
    if streamed is not None:
        return streamed.memory
    weights = [(module, one) for module in model.modules() for one in module.parameters(recurse=False)]
    weights += [(module, one) for module in model.modules() for one in module.buffers(recurse=False)]
    unique = {id(part): part for module, one in weights for part in tensors_of(module, one)}.values()
    return WeightMemory(sum(part.numel() * part.element_size() for part in unique))


def describe_weights(model: Any) -> str:
    """Where a loaded model's weights are, in words."""
    if streamed_weights_of(model) is None:
        return "in memory"
    memory = weights_of(model)
    return (
        f"streamed: {memory.streamed / 1e6:.1f} MB are read in each step, {memory.resident / 1e6:.1f} MB stay, "
        f"buffers take {memory.buffers / 1e6:.1f} MB"
    )


_HASH_PIECE = 16 * 2**20  # elements


class ModuleTree:
    """The modules of a model and their tensors, walked again only where the tree has changed. Thread-safe.

    A request looks twice, behind a forward that leaves nothing of a model in the processor's caches. So it looks at
    the tables of the modules, which stay with them, and not at the modules.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._walked = _Walked([])

    def modules(self) -> list[torch.nn.Module]:
        """Every module once."""
        return self._current().modules

    def tensors(self) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Every parameter and buffer, with the module that has it and its name there."""
        walked = self._current()
        owned = compress(zip(walked.owners, walked.tables, strict=True), walked.tables)  # most tables are empty
        return [
            (module, name, tensor) for module, table in owned for name, tensor in table.items() if tensor is not None
        ]

    def _current(self) -> _Walked:
        walked = self._walked
        if not walked.modules or walked.children() != walked.known:  # modules are equal only to themselves
            walked = _Walked(list(walk(self._model)))
            if set(walked.known) - {None} <= set(walked.modules):  # else another thread adds to it
                self._walked = walked
        return walked


class _Walked:
    """What one walk found."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.modules = modules
        self._below = [module._modules for module in modules]
        self.owners = [*modules, *modules]
        self.tables: list[Mapping[str, torch.Tensor | None]] = [module._parameters for module in modules]
        self.tables += [module._buffers for module in modules]
        self.known = self.children()

    def children(self) -> list[torch.nn.Module | None]:
        """The children of all of them now."""
        return list(chain.from_iterable([below.values() for below in self._below if below]))


class TensorStates(NamedTuple):
    """Change when one of several tensors is written to, moved or exchanged. One entry for each tensor."""

    storages: tuple[StorageWeakRef, ...]
    tensors: tuple[int, ...]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]


class TensorWatch:
    """Identifies the states of tensors so that a dead tensor's state never recurs.

    Ids and addresses of dead tensors are reused. A weak reference to the storage keeps its identity taken,
    though not its memory. (A weak reference to the tensor would forbid ``torch.utils.swap_tensors`` to the user.)
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def states(self, tensors: Sequence[torch.Tensor]) -> TensorStates:
        """The tensors' current states. In columns: a request asks twice for hundreds of tensors."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        keys, known = [storage._cdata for storage in storages], self._storages
        for key, storage in zip(keys, storages, strict=True) if not known.keys() >= set(keys) else ():
            # Two threads may both come here: the references are equal, and either keeps the identity taken.
            known.setdefault(key, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return TensorStates(
            storages=tuple([known[key] for key in keys]),
            tensors=tuple(map(id, tensors)),
            versions=_versions(tensors),
            addresses=tuple([tensor.data_ptr() for tensor in tensors]),
        )

    def forget_all_but(self, states: TensorStates) -> None:
        """Drop storages that ``states`` does not have. Holders of older states keep their own references."""
        self._storages = {storage.cdata: storage for storage in states.storages}


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # inference tensors count no versions: a write to one of those goes unnoticed
        return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


class Weight(NamedTuple):
    """One weight of a model."""

    name: str
    """Without PEFT's parts: the name it has in the model alone."""
    path: str
    """The name it has now."""
    tensor: torch.Tensor
    module: Any
    """The module that has it: quantisation libraries keep a part of a weight there."""

    @property
    def key(self) -> str:
        """What its module calls it."""
        return self.path.rpartition(".")[2]


def weights_by_owner(model: Any) -> dict[str | None, list[Weight]]:
    """Every weight once, by the adapter it belongs to (None: the base model), sorted by name."""
    names = WeightNames(model)
    owned: dict[str | None, list[Weight]] = {None: []}
    seen: set[int] = set()
    modules = list(model.named_modules())
    found = [(path, module, each) for path, module in modules for each in module._parameters.items()]
    found += [(path, module, each) for path, module in modules for each in module._buffers.items()]
    for path, module, (key, tensor) in found:
        path = f"{path}.{key}" if path else key
        # Tied weights count once; rotary tables are state of the module and have a field of their own.
        if tensor is not None and id(tensor) not in seen and not path.endswith("inv_freq"):
            seen.add(id(tensor))
            owner, name = names.owner_and_name(path)
            owned.setdefault(owner, []).append(Weight(name, path, tensor, module))
    return {owner: sorted(weights, key=lambda weight: weight.name) for owner, weights in owned.items()}


def digest_weights(model: Any, weights: Sequence[Weight], known: dict[str, bytes | None] | None = None) -> str:
    """SHA-256 over these weights: name, type, shape, bytes. The same whether or not digests are ``known``.

    Of the names in ``known`` those without a digest get theirs.
    """
    known = known if known is not None else {}
    streamer = streamed_weights_of(model)

    def one(weight: Weight) -> bytes:
        if (digest := known.get(weight.name)) is not None:
            return digest
        if streamer is not None and streamer.holds(weight.module, weight.key):
            return streamer.digest(weight.module, weight.key, weight.name)
        return _digest(weight)

    hidden = None if is_progress_bar_enabled() else True  # None: also where nobody looks, as in a log file
    try:
        with (
            ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool,  # hashing releases the GIL
            tqdm(total=len(weights), desc="hashing the weights", delay=1, leave=False, disable=hidden) as bar,
        ):
            digests = []
            for digest in pool.map(one, weights):
                digests.append(digest)
                bar.update()
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"the weights cannot be read to tell this model from others (offloaded or quantised? {error}). "
            "Pass strict=False to run it without reuse."
        ) from error
    known.update((weight.name, digest) for weight, digest in zip(weights, digests, strict=True) if weight.name in known)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(weight: Weight) -> bytes:
    """The digest of one weight, of all its parts if it is packed."""
    found = packed(weight.module, weight.tensor)
    if found is None:
        return digest_tensor(weight.name, weight.tensor)
    parts = [digest_tensor(f"{weight.name}:{number}", part) for number, part in enumerate(found.tensors)]
    shape = [str(weight.tensor.dtype), list(weight.tensor.shape)]
    return hashlib.sha256(json.dumps([weight.name, found.kind, shape]).encode() + b"".join(parts)).digest()


def digest_tensor(name: str, tensor: torch.Tensor) -> bytes:
    """The digest of one weight in memory."""
    hasher = weight_hasher(name, tensor.dtype, tensor.shape)
    flat = tensor.detach().contiguous().view(-1)
    for start in range(0, flat.numel(), _HASH_PIECE):  # so that no whole GPU tensor is copied to host memory
        piece = flat[start : start + _HASH_PIECE].cpu().view(torch.uint8)
        hasher.update(piece.numpy().data)
    return hasher.digest()


def weight_hasher(name: str, dtype: torch.dtype, shape: Sequence[int]) -> _Hash:
    """A hasher to update with the weight's bytes, in order."""
    return hashlib.sha256(json.dumps([name, str(dtype), list(shape)]).encode())
