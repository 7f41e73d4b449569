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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from kvboost.errors import ConfigError
from kvboost.hf.checkpoint import Shards, checkpoint_files
from kvboost.hf.peft_layers import merges_missed
from kvboost.hf.weights import TensorStates, TensorWatch, Weight, weights_by_owner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
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


def read_kept(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    """What ``parse`` makes of a file's JSON; None if nothing was kept, or it cannot be used."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("what was kept in %s cannot be used and is made anew: %r", path, error)
        return None


def keep(path: Path, content: Any) -> None:
    """Write a file whole or not at all: other processes read it. The oldest beside it go."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as new:
            try:
                new.write(json.dumps(content))
                new.flush()
                os.replace(new.name, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(new.name)
                raise
    except OSError as error:
        _log.debug("%s cannot be kept, the next start makes it again: %r", path, error)
        return
    with suppress(OSError):  # another process may remove them too
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST]:
            old.unlink()


class Checkpoint(Shards):
    """The safetensors files that a model is about to be loaded from."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__([file.resolve() for file in files])
        self.identity = self.identify()
        """What the files were before."""


class LoadedWeights:
    """The weights that came out of a checkpoint as it holds them, and their digests from an earlier start."""

    def __init__(self, path: Path, states: dict[str, TensorStates]) -> None:
        self._path, self._states = path, states
        self._watch = TensorWatch()
        self._merges_missed = merges_missed()
        self._is_whole = True

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadedWeights, (self._path, {})  # a copy of the model was not loaded from anywhere

    def unchanged(self, weight: Weight) -> bool:
        """Whether this weight is as it was loaded."""
        if merges_missed() != self._merges_missed:
            return False
        return self._states.get(weight.name) == self._watch.states([weight.tensor])

    def read(self, weights: Sequence[Weight]) -> dict[str, bytes | None]:
        """The digests of unchanged weights from an earlier start, by name; None for those that it did not keep."""
        unchanged = [weight.name for weight in weights if self.unchanged(weight)]
        found = (read_kept(self._path, _parsed) if unchanged else None) or {}
        self._is_whole = found.keys() >= set(unchanged)
        return {name: found.get(name) for name in unchanged}

    def keep(self, digests: Mapping[str, bytes | None]) -> None:
        """Keep these for the next start, if they are more than was read."""
        if not self._is_whole:
            keep(self._path, {"digests": {name: digest.hex() for name, digest in digests.items() if digest}})


def _parsed(content: Any) -> dict[str, bytes]:
    found = {str(name): bytes.fromhex(digest) for name, digest in content["digests"].items()}
    if any(len(digest) != hashlib.sha256().digest_size for digest in found.values()):
        raise ValueError("a digest is cut off")
    return found


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
    if getattr(model.config, "quantization_config", None) is not None or checkpoint.identify() != checkpoint.identity:
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
    # Everything that decides which tensors this model gets from these files.
    parts = [_VERSION, checkpoint.identity, torch.__version__, transformers.__version__]
    made = f"{type(model).__module__}.{type(model).__qualname__}"
    types = [(weight.name, str(weight.tensor.dtype)) for weight in weights]
    key = hashlib.sha256(json.dumps([*parts, made, str(model.config), types]).encode()).hexdigest()
    path = cache_directory() / "weight-digests" / f"{key}.json"
    setattr(model, _ATTRIBUTE, LoadedWeights(path, states))


def claim_loaded(model: Any) -> LoadedWeights | None:
    """What is known of a model that was just loaded. Only once: later a hidden change may have happened."""
    loaded: LoadedWeights | None = getattr(model, _ATTRIBUTE, None)
    if loaded is not None:
        setattr(model, _ATTRIBUTE, None)
    return loaded
