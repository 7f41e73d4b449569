"""Loads a model and its tokenizer the way Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost.errors import ConfigError


def load_model(name_or_path: str, *, dtype: Any, device: str | None, model_kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The model in eval mode on ``device``, and its tokenizer."""
    looks_like_path = name_or_path.startswith((".", "/", "~"))
    path = Path(name_or_path).expanduser()
    if looks_like_path and not path.exists():
        raise ConfigError(f"there is no model folder at {name_or_path}; check the path, or give a model's hub name")
    source = str(path) if looks_like_path else name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **_shared(model_kwargs))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **model_kwargs)
    except (OSError, ValueError) as error:  # Transformers raises either for a folder that lacks files
        raise ConfigError(f"cannot load {name_or_path!r}: {error}") from error
    if device is not None:
        model = model.to(device)
    elif "device_map" not in model_kwargs and torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    return model.eval(), tokenizer


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
