"""Names what vLLM computes, so that only equal KV is shared: weights, config, dtype, attention, versions, adapters.

Used by both sides of the connector. Invariant: every process of a server, and every server with the same model and
settings, derives the same fields; another vLLM version, block size or adapter derives others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost.core.keys import PromptKeys
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.hf.checkpoint import checkpoint_files
from kvboost.hf.code_digest import code_digest
from kvboost.hf.environment import describe_cpu
from kvboost.hf.fingerprint import CONFIG_NOISE
from kvboost.types import ModelSnapshot

_log = logging.getLogger(__name__)
_MAX_REQUEST_KINDS = 4096  # pairs of salt and adapter whose keys are kept
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def model_fields(vllm_config: Any, *, block_size: int, version: str) -> dict[str, str]:
    """The fingerprint fields of the model that a vLLM server runs, without adapter."""
    model = vllm_config.model_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in CONFIG_NOISE}
    text = json.dumps(config, sort_keys=True, default=str)
    device = vllm_config.device_config.device_type
    compiled = "eager" if model.enforce_eager else f"compiled:{vllm_config.compilation_config.compute_hash()}"
    return {
        "weights": _weights(model, vllm_config.load_config),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "rope": f"{model.max_model_len}",  # by which some choose their frequencies; the rest is in the config
        "dtype": f"{model.dtype}|{model.quantization}",
        "attention": f"vllm|{vllm_config.attention_config.backend}|{vllm_config.cache_config.cache_dtype}|{block_size}",
        "adapter": "",
        "numerics": f"vllm={version}|torch={torch.__version__}|{_hardware(device)}|{compiled}|{model.code_revision}"
        f"|code={code_digest()}",
    }


def _hardware(device: str) -> str:
    """What kernels are chosen by."""
    if device == "cpu":
        return "|".join(describe_cpu())
    from vllm.platforms import current_platform

    return f"{device}={current_platform.get_device_name()}"


def _weights(model: Any, load: Any) -> str:
    """The digest of the checkpoint's files, its code included; one of its own for weights that no file tells."""
    if load.load_format not in ("auto", "safetensors", "hf"):
        _log.warning(
            "kvboost: weights loaded as %r cannot be told apart; KV is kept for this run only", load.load_format
        )
        return f"unknown:{uuid.uuid4()}"
    try:
        files = checkpoint_files(model.model, hub={"revision": model.revision})
    except (ConfigError, OSError) as error:
        _log.warning("kvboost: %s has no safetensors files (%s); KV is kept for this run only", model.model, error)
        return f"unknown:{uuid.uuid4()}"
    code = sorted(files[0].parent.glob("*.py")) if model.trust_remote_code else []
    return digest_files([*files, *code])


def digest_files(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of these files, whatever their names."""

    def one(file: Path) -> bytes:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # hashing releases the interpreter
        return hashlib.sha256(b"".join(pool.map(one, files))).hexdigest()


class Adapters:
    """The contents of adapters: after a restart a name may be given to other weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[list[Any], str | None]] = {}

    def digest(self, lora: Any) -> str | None:
        """Of an adapter's files when it was first used. None if they are not found, or have changed since.

        vLLM reads them again once it has dropped the adapter: then nobody can tell which of the two it has.
        """
        key, folder = (lora.lora_int_id, lora.lora_path), Path(lora.lora_path)
        files = [file for name in _ADAPTER_FILES if (file := folder / name).is_file()]
        found = [(file.name, (stat := file.stat()).st_ino, stat.st_size, stat.st_mtime_ns) for file in files]
        if key not in self._known or lora.load_inplace:
            while len(self._known) >= _MAX_REQUEST_KINDS:
                del self._known[next(iter(self._known))]
            if not files:
                _log.warning("kvboost: %s has no adapter files; the KV of its requests is not kept", lora.lora_path)
            self._known[key] = found, digest_files(files) if files else None
        before, digest = self._known[key]
        if digest is not None and found != before:
            _log.warning("kvboost: the files in %s have changed under one name; its KV is not kept", lora.lora_path)
            self._known[key] = before, (digest := None)
        return digest


class _Fixed:
    """A model that does not change while a server runs."""

    def __init__(self, fields: dict[str, str]) -> None:
        self._snapshot = ModelSnapshot(object(), fields)

    def snapshot(self) -> ModelSnapshot:
        return self._snapshot

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        return snapshot is self._snapshot


class RequestKeys:
    """The keys of requests: by ``cache_salt`` and adapter, which never share KV with others."""

    def __init__(
        self, fields: dict[str, str], *, chunker: Chunker, tenant: str, codec: str, key_salt: str = ""
    ) -> None:
        self._fields, self._tenant = fields, tenant
        self._made = partial(PromptKeys, chunker=chunker, codec=codec, keeps_decoded=False, salt=key_salt)
        self._adapters = Adapters()
        self._of: dict[tuple[str | None, str], PromptKeys] = {}

    def renew(self) -> None:
        """The weights have changed to something unknown: nothing that was stored is found any more."""
        self._fields = {**self._fields, "weights": f"unknown:{uuid.uuid4()}"}
        self._adapters = Adapters()
        self._of.clear()

    def of(self, salt: str | None, lora: Any) -> PromptKeys | None:
        """The keys of a request with this salt and this adapter (None for none); None for an unknown adapter."""
        adapter = self._adapters.digest(lora) if lora is not None else ""
        if adapter is None:
            return None
        if (known := self._of.get((salt, adapter))) is not None:
            return known
        tenant = self._tenant if salt is None else f"{self._tenant}\0salt\0{salt}"
        keys = self._made(identity=_Fixed({**self._fields, "adapter": adapter}), tenant=tenant)
        while len(self._of) >= _MAX_REQUEST_KINDS:
            del self._of[next(iter(self._of))]
        self._of[salt, adapter] = keys
        return keys

    def namespace(self) -> bytes:
        """What all records of this model and tenant descend from."""
        keys = self.of(None, None)
        assert keys is not None
        return keys.namespace()
