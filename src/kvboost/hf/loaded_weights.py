"""Keeps the digests of a checkpoint's weights between starts, so that the second one need not hash them.

``load_model`` remembers what it loaded from safetensors files; the fingerprint claims it, once, for its first digest.
What is kept is the digest of each tensor as it was in memory, never of the file. What is trusted: that the same
versions of torch and Transformers make the same tensors again from files of the same path, inode, size, times, header
and sampled pages, for weights that the files hold under the same name and shape. A weight that was written to or
exchanged after loading is hashed, and so is everything the user says may have changed. A weight may have been loaded
as another type of float: they are rounded to it one by one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from kvboost.errors import ConfigError
from kvboost.hf.checkpoint import Shards, checkpoint_files
from kvboost.hf.peft_layers import merges_missed
from kvboost.hf.weights import TensorStates, TensorWatch, Weight, weights_by_owner

_log = logging.getLogger(__name__)
_VERSION = 1
_ATTRIBUTE = "_kvboost_loaded_weights"
_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
# With any other argument the weights may be other than the files': a state_dict, a quantisation, the user's own code.
_PLAIN = (*_HUB, "attn_implementation", "experts_implementation", "low_cpu_mem_usage")
_MOST = 64  # files of one kind: a container may give the same checkpoint another inode at every start


def cache_directory() -> Path:
    """Where what is found out at one start is kept for the next."""
    if own := os.environ.get("KVBOOST_CACHE_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvboost"


def write_whole(path: Path, content: str) -> None:
    """Write a file whole or not at all: other processes read it. The oldest beside it go. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise
    with suppress(OSError):  # another process may remove them too
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST]:
            old.unlink()


class Checkpoint:
    """The safetensors files that a model is about to be loaded from."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [file.resolve() for file in files]
        self._shards = Shards(self._files)
        self.tensors = self._shards.tensors
        self._identities = self._identify()

    @property
    def is_unchanged(self) -> bool:
        """Whether the files still are what they were."""
        return self._identify() == self._identities

    def key(self, model: Any, weights: Sequence[Weight]) -> str:
        """Names everything that decides which tensors this model gets from these files."""
        parts = [_VERSION, self._identities, torch.__version__, transformers.__version__]
        made = f"{type(model).__module__}.{type(model).__qualname__}"
        types = [(weight.name, str(weight.tensor.dtype)) for weight in weights]
        return hashlib.sha256(json.dumps([*parts, made, str(model.config), types]).encode()).hexdigest()

    def _identify(self) -> list[Any]:
        return [*map(_identify, self._files), self._shards.sample()]


class LoadedWeights:
    """The weights that came out of a checkpoint as it holds them, and their digests from an earlier start."""

    def __init__(self, path: Path, states: dict[str, TensorStates]) -> None:
        self._path, self._states = path, states
        self._watch = TensorWatch()
        self._merges_missed = merges_missed()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadedWeights, (self._path, {})  # a copy of the model was not loaded from anywhere

    def unchanged(self, weight: Weight) -> bool:
        """Whether this weight is as it was loaded."""
        if merges_missed() != self._merges_missed:
            return False
        return self._states.get(weight.name) == self._watch.states([weight.tensor])

    def read(self) -> dict[str, bytes]:
        """The digests of an earlier start by the weights' names; none if there was none."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            found = {str(name): bytes.fromhex(digest) for name, digest in content["digests"].items()}
            if any(len(digest) != hashlib.sha256().digest_size for digest in found.values()):
                raise ValueError("a digest is cut off")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.debug("the digests in %s cannot be used and the weights are hashed: %r", self._path, error)
            return {}
        return found

    def write(self, digests: dict[str, bytes]) -> None:
        """Keep these for the next start."""
        content = json.dumps({"digests": {name: digest.hex() for name, digest in digests.items()}})
        try:
            write_whole(self._path, content)
        except OSError as error:
            _log.debug("the weights' digests cannot be kept, the next start hashes again: %r", error)


def find_checkpoint(source: str, model_kwargs: dict[str, Any]) -> Checkpoint | None:
    """The files a model will be loaded from; None if its weights may come from anywhere else."""
    if not set(model_kwargs) <= set(_PLAIN):
        return None
    try:
        files = checkpoint_files(source, hub={name: model_kwargs[name] for name in _HUB if name in model_kwargs})
        single = files[0].parent / "model.safetensors"
        if single.exists() and single not in files:
            return None  # the files hold the model twice, and Transformers chooses
        return Checkpoint(files)
    except (ConfigError, OSError) as error:
        _log.debug("the weights' digests are not kept: %s", error)
        return None


def remember_loaded(model: Any, checkpoint: Checkpoint) -> None:
    """Call right after loading, before anybody else has the model."""
    if getattr(model.config, "quantization_config", None) is not None or not checkpoint.is_unchanged:
        return
    watch = TensorWatch()
    states: dict[str, TensorStates] = {}
    weights = weights_by_owner(model)[None]
    for weight in weights:
        stored = checkpoint.tensors.get(weight.path)
        if stored is None or stored.shape != tuple(weight.tensor.shape):
            continue
        if stored.dtype == weight.tensor.dtype or (
            stored.dtype.is_floating_point and weight.tensor.is_floating_point()
        ):
            states[weight.name] = watch.states([weight.tensor])
    path = cache_directory() / "weight-digests" / f"{checkpoint.key(model, weights)}.json"
    setattr(model, _ATTRIBUTE, LoadedWeights(path, states))


def claim_loaded(model: Any) -> LoadedWeights | None:
    """What is known of a model that was just loaded. Only once: later a hidden change may have happened."""
    loaded: LoadedWeights | None = getattr(model, _ATTRIBUTE, None)
    if loaded is not None:
        setattr(model, _ATTRIBUTE, None)
    return loaded


def _identify(file: Path) -> list[Any]:
    stat = file.stat()
    with file.open("rb") as stream:
        header = stream.read(8)
        header += stream.read(int.from_bytes(header, "little"))
    # The time of change too: nobody can set it back, and a deleted file's inode may come back at once. In an image or
    # on a FUSE mount none of these need say anything, hence the sampled pages.
    times = stat.st_mtime_ns, stat.st_ctime_ns
    return [str(file), stat.st_ino, stat.st_size, *times, hashlib.sha256(header).hexdigest()]
