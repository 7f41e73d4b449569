"""Loads a model and its tokenizer the way Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.errors import ConfigError
from kvboost.hf.loaded_weights import find_checkpoint, remember_loaded
from kvboost.offload.weights import load_streamed


def load_model(
    name_or_path: str,
    *,
    dtype: Any,
    device: str | None,
    model_kwargs: dict[str, Any],
    weight_budget: int | None = None,
    weight_dir: str | Path | None = None,
) -> tuple[Any, Any]:
    """The model in eval mode on ``device``, and its tokenizer. With a budget too small for its weights, streamed."""
    looks_like_path = name_or_path.startswith((".", "/", "~"))
    path = Path(name_or_path).expanduser()
    if looks_like_path and not path.exists():
        raise ConfigError(f"there is no model folder at {name_or_path}; check the path, or give a model's hub name")
    source = str(path) if looks_like_path else name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_shared(model_kwargs))

        def load_whole() -> Any:
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **model_kwargs)

        if weight_budget is not None:
            streamed = load_streamed(
                source,
                dtype=dtype,
                device=_device(device),
                budget=weight_budget,
                weight_dir=weight_dir,
                load_whole=load_whole,
                model_kwargs=model_kwargs,
            )
            if streamed is not None:
                return streamed, tokenizer
        checkpoint = find_checkpoint(source, model_kwargs)
        model = load_whole()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # Transformers raises either for a folder that lacks files
        raise ConfigError(f"cannot load {name_or_path!r}: {error}") from error
    if device is not None or "device_map" not in model_kwargs:
        model = model.to(_device(device))
    model.eval()
    if checkpoint is not None:
        remember_loaded(model, checkpoint)
    return model, tokenizer


def load_tokenizer_of(name_or_path: str) -> Any:
    """The tokenizer alone; None if there is none."""
    try:
        return AutoTokenizer.from_pretrained(str(Path(name_or_path).expanduser()))
    except (OSError, ValueError):
        return None


def _device(asked: str | None) -> torch.device:
    """As asked, else the accelerator if there is one, else the CPU."""
    if asked is not None:
        return torch.device(asked)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _shared(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that mean the same to a tokenizer as to a model."""
    names = (
        "revision",
        "token",
        "cache_dir",
        "trust_remote_code",
        "local_files_only",
        "subfolder",
        "gguf_file",
    )
    return {name: model_kwargs[name] for name in names if name in model_kwargs}
