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
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvboost.core.identity import PromptKeys
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.hf.checkpoint import checkpoint_files
from kvboost.types import ModelSnapshot

_log = logging.getLogger(__name__)
_PIECE = 2**24
_MAX_REQUEST_KINDS = 4096  # pairs of salt and adapter whose keys are kept
_CONFIG_NOISE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def model_fields(vllm_config: Any, *, block_size: int, version: str) -> dict[str, str]:
    """The fingerprint fields of the model that a vLLM server runs, without adapter."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _CONFIG_NOISE}
    text = json.dumps(config, sort_keys=True, default=str)
    shards = f"tp={parallel.tensor_parallel_size}|pp={parallel.pipeline_parallel_size}"
    device = vllm_config.device_config.device_type
    compiled = "eager" if model.enforce_eager else f"compiled:{vllm_config.compilation_config.compute_hash()}"
    return {
        "weights": _weights(model, vllm_config.load_config),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "rope": "",  # in the config
        "dtype": f"{model.dtype}|{model.quantization}",
        "attention": f"vllm|{vllm_config.attention_config.backend}|{vllm_config.cache_config.cache_dtype}|{block_size}",
        "adapter": "",
        "numerics": f"vllm={version}|torch={torch.__version__}|{device}|{compiled}|{shards}",
    }


def _weights(model: Any, load: Any) -> str:
    """The digest of the checkpoint's files; one of its own for weights that no file tells."""
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
    return digest_files(files)


def digest_files(files: Sequence[Path]) -> str:
    """SHA-256 over the contents of these files, whatever their names."""

    def one(file: Path) -> bytes:
        hasher = hashlib.sha256()
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                hasher.update(piece)
        return hasher.digest()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # hashing releases the interpreter
        return hashlib.sha256(b"".join(pool.map(one, files))).hexdigest()


@lru_cache(maxsize=1024)
def _adapter(path: str, stamps: tuple[tuple[str, int, int], ...]) -> str:
    return digest_files([Path(path) / name for name, _, _ in stamps])


def adapter_digest(lora: Any) -> str:
    """The contents of an adapter's files: a name may be given to other weights after a restart."""
    folder = Path(lora.lora_path)
    present = [folder / name for name in _ADAPTER_FILES if (folder / name).is_file()]
    if not present:
        return f"unknown:{uuid.uuid4()}"  # shared with nobody
    stamps = tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in present)
    return _adapter(str(folder), stamps)


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

    def __init__(self, fields: dict[str, str], *, chunker: Chunker, tenant: str, codec: str) -> None:
        self._fields, self._chunker, self._tenant, self._codec = fields, chunker, tenant, codec
        self._of: dict[tuple[str | None, str], PromptKeys] = {}

    def of(self, salt: str | None, lora: Any) -> PromptKeys:
        """The keys of a request with this salt and this adapter (None for none)."""
        adapter = adapter_digest(lora) if lora is not None else ""
        if (known := self._of.get((salt, adapter))) is not None:
            return known
        tenant = self._tenant if salt is None else f"{self._tenant}\0salt\0{salt}"
        identity = _Fixed({**self._fields, "adapter": adapter})
        keys = PromptKeys(identity, chunker=self._chunker, tenant=tenant, codec=self._codec, keeps_decoded=False)
        while len(self._of) >= _MAX_REQUEST_KINDS:
            del self._of[next(iter(self._of))]
        self._of[salt, adapter] = keys
        return keys

    def namespace(self, *, rank: int) -> bytes:
        """What all records of this model and tenant descend from, for one worker's share of the heads."""
        root = self.of(None, None).namespace()
        return hashlib.sha256(b"kvboost.vllm.rank.1" + root + rank.to_bytes(4, "little")).digest()
