"""Blocks and namespaces for the tests of tiers."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import torch

from kvboost.types import Chunk, KVBlock, Namespace

SIZE = 1000
"""Bytes of a block's tensors where their number does not matter."""


def namespace(name: str = "model", *, tenant: str = "tenant") -> Namespace:
    """A namespace by its names."""
    return Namespace(hashlib.sha256(name.encode()).digest(), hashlib.sha256(tenant.encode()).digest())


def block_of(chunk: Chunk, nbytes: int = SIZE) -> KVBlock:
    """The block of ``chunk``, with tensors of ``nbytes`` bytes that only it has."""
    seed = int.from_bytes(chunk.prefix_key[:4], "little")
    raw = torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes) + b"\0"), dtype=torch.uint8)[:nbytes]
    return KVBlock(
        key=chunk.prefix_key,
        parent_key=chunk.parent_key,
        content_key=chunk.content_key,
        tokens=chunk.tokens,
        tensors=(raw[: nbytes // 3], raw[nbytes // 3 :]),
        nbytes=nbytes,
        bitwise=True,
        start=chunk.start,
        tenant=chunk.tenant,
    )


def assert_same(found: KVBlock | None, stored: KVBlock) -> None:
    """The block that was loaded is the one that was stored, to the bit."""
    assert found is not None, "a stored block was not found"
    assert replace(found, tensors=()) == replace(stored, tensors=()), "a field of the block changed"
    kinds = [[(t.dtype, t.shape) for t in block.tensors] for block in (found, stored)]
    assert kinds[0] == kinds[1], "the tensors' shapes or dtypes changed"
    assert [_raw(t) for t in found.tensors] == [_raw(t) for t in stored.tensors], "the tensors' bits changed"


def _raw(tensor: torch.Tensor) -> bytes:
    raw: bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw
