"""Loads a whole model, and its tokenizer, the way Transformers does.

Used by ``kvboost.offload.weights`` for every model that need not be streamed, and by measurements.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.errors import ConfigError
from kvboost.hf.loaded_weights import find_checkpoint, remember_loaded

_log = logging.getLogger(__name__)

_HUB_NAME = r"[\w.-]+(/[\w.-]+)?"
_CONFIGS = ("config.json", "adapter_config.json")
_ELSEWHERE = {"gguf_file", "subfolder"}  # arguments with which config.json is not in the folder itself
# Arguments that mean the same to a tokenizer as to a model.
_TOKENIZER = ("revision", "token", "cache_dir", "trust_remote_code", "local_files_only", "subfolder", "gguf_file")


@dataclass(frozen=True)
class ModelSource:
    """A model that is not loaded yet, and how Transformers shall load it."""

    name: str
    """A folder or a hub name."""
    dtype: Any = "auto"
    device: str | None = None
    """None is the accelerator if there is one, else the CPU."""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of ``from_pretrained``."""

    @property
    def path(self) -> str:
        """What ``from_pretrained`` takes. Raises ConfigError for a folder that is not there."""
        folder = Path(self.name).expanduser()
        # A hub name is a name, or an owner and a name.
        if not folder.exists() and not self.name.startswith((".", "/", "~")) and re.fullmatch(_HUB_NAME, self.name):
            return self.name
        if not folder.exists():
            raise ConfigError(f"there is no model folder at {self.name}; check the path, or give a model's hub name")
        if not folder.is_dir():
            raise ConfigError(f"{self.name} is a file; give the folder of a model, or a model's hub name")
        return str(folder)

    @property
    def torch_device(self) -> torch.device:
        """Where the model goes. Raises ConfigError for a device that torch does not see."""
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if self.device is None:
            return found or torch.device("cpu")
        try:
            wanted = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"{self.device!r} is no device; give cpu, cuda, cuda:1, xpu or mps") from error
        if wanted.type not in ("cpu", "meta") and (found is None or found.type != wanted.type):
            raise ConfigError(
                f"torch {torch.__version__} sees no {wanted.type} device; install its build for that device and see "
                "that the driver lists it, or use device='cpu'"
            )
        return wanted


def load_resident(source: ModelSource) -> Any:
    """The whole model in eval mode on its device.

    Weights go from their files straight to an accelerator: by way of the host they would need its memory too.
    """
    checkpoint = find_checkpoint(source.path, dict(source.model_kwargs))
    device, placed = source.torch_device, "device_map" in source.model_kwargs
    if not placed and device.type != "cpu" and find_spec("accelerate") is not None:
        model = load_checkpoint(replace(source, model_kwargs={**source.model_kwargs, "device_map": device}))
    else:
        if not placed and device.type != "cpu":
            _log.warning("weights are loaded on the CPU first and then moved; install accelerate to load them directly")
        model = load_checkpoint(source)
        if source.device is not None or not placed:
            model = model.to(device)
    model.eval()
    if checkpoint is not None:
        remember_loaded(model, checkpoint)
    return model


def load_checkpoint(source: ModelSource) -> Any:
    """The whole model where and as Transformers loads it."""
    with loading_errors(source):
        return AutoModelForCausalLM.from_pretrained(source.path, dtype=source.dtype, **source.model_kwargs)


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer."""
    arguments = {name: source.model_kwargs[name] for name in _TOKENIZER if name in source.model_kwargs}
    with loading_errors(source):
        return AutoTokenizer.from_pretrained(source.path, **arguments)


@contextmanager
def loading_errors(source: ModelSource) -> Iterator[None]:
    """Turns what Transformers raises for a folder that lacks files, or has broken ones, into a ConfigError.

    So too for quantised weights whose library is not installed.
    """
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"the weights of {source.name!r} are damaged ({error}); download them again") from error
    except ImportError as error:
        raise ConfigError(f"cannot load {source.name!r}: {error}") from error
    except (OSError, ValueError) as error:
        folder, why = Path(source.name).expanduser(), str(error)
        if not folder.exists():
            why = f"there is no such folder here, and from the hub: {error}"
        elif not any((folder / name).is_file() for name in _CONFIGS) and not source.model_kwargs.keys() & _ELSEWHERE:
            why = "the folder has no config.json, so it is no model's; check the path"  # Transformers would guess
        raise ConfigError(f"cannot load {source.name!r}: {why}") from error
