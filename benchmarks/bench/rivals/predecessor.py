"""kvboost 0.9.0, our predecessor, through its public API: the class, ``generate`` and ``reset_cache``.

It takes text and encodes it by itself; a prompt of which it would make other tokens is an error.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .protocol import Answer, Clock

_CACHE_BYTES = 2 * 2**30  # as ours has by default


class Predecessor:
    """Its engine with its defaults."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from importlib.metadata import version

        self.versions = {name: version(name) for name in ("kvboost", "torch", "transformers")}
        if not self.versions["kvboost"].startswith("0."):
            raise RuntimeError(
                f"this Python has kvboost {self.versions['kvboost']}, not 0.9.0; give it its own environment"
            )
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvboost import KVBoost

        self._folder = tempfile.TemporaryDirectory()
        model = _readable_by_4(Path(settings["model"]), Path(self._folder.name))
        # Its own from_pretrained takes no dtype and loads float16, which CPUs are slow at.
        dtype = settings.get("dtype", "auto")
        loaded = AutoModelForCausalLM.from_pretrained(
            str(model), dtype=dtype if dtype == "auto" else getattr(torch, dtype)
        )
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        engine: Any = KVBoost
        self._engine: Any = engine(loaded.eval(), self._tokenizer, max_cache_bytes=_CACHE_BYTES)
        self.dtype = str(loaded.dtype).rpartition(".")[2]

    def check(self, order: dict[str, Any]) -> None:
        """Whether it will read the tokens that the others get."""
        if list(self._tokenizer.encode(order["text"])) != order["tokens"]:
            raise RuntimeError("it makes other tokens of a prompt's text than the others get, which is no comparison")

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Its own call, with its callback for tokens."""
        tokens: list[int] = []

        def on_token(token: int) -> None:
            tokens.append(int(token))
            clock.token()

        result = self._engine.generate(order["text"], max_new_tokens=order["new"], do_sample=False, on_token=on_token)
        cached = round(result.kv_reuse_ratio * len(order["tokens"]))
        return Answer(tokens, cached=cached)

    def forget(self) -> None:
        """Empty its cache."""
        self._engine.reset_cache()


def _readable_by_4(model: Path, folder: Path) -> Path:
    """The model, or a folder of links to it whose tokenizer names a class that Transformers 4 has."""
    file = model / "tokenizer_config.json"
    if not file.is_file():
        return model
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") != "TokenizersBackend":
        return model
    for entry in model.iterdir():
        if entry.name != file.name:
            (folder / entry.name).symlink_to(entry.resolve())
    text = json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / file.name).write_text(text, encoding="utf-8")
    return folder


def make(name: str, settings: dict[str, Any]) -> Predecessor:
    """The contestant."""
    return Predecessor(settings)
