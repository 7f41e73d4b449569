"""The chunk record: one block as self-describing bytes, the same on disk and on a remote.

Used by every tier that keeps blocks outside the process. A record is a header (:mod:`kvboost.store.record.header`),
padded to whole pages, and a body: the token ids, then the tensors' raw bytes. The header carries a check of the body:
its CRC-32; with a MAC key its SHA-256, as the header is then sealed with that key; with an encryption key the nonce
of AES-256-GCM over the body, with the header as associated data and the tag at the end. Both keys are made of the one
in an engine's key file, for one tenant each.

Invariants: what was not written exactly so, for this key and namespace and with these secrets, is a
:class:`RecordError` and never anything else; reading allocates nothing larger than the record; no two tenants, and no
two purposes, have a key in common.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.errors import ConfigError, DamagedRecordError, ForeignRecordError, RecordError, with_extra
from kvboost.private import read_secret
from kvboost.store.record.header import (
    ALIGNMENT,
    KEY_BYTES,
    MAX_HEADER_BYTES,
    TAG_BYTES,
    VERSION,
    Buffer,
    RecordHeader,
    TensorRun,
    described,
    header_bytes_of,
    info_of,
    lay_out,
    pack_header,
    read_header,
    seal_of,
)
from kvboost.types import BlockInfo, KVBlock, Namespace

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record as pieces to be written one after the other; tensors of the CPU are not copied."""

    parts: tuple[memoryview, ...]
    nbytes: int

    def join(self) -> bytes:
        """All of it in one piece, copied."""
        return b"".join(self.parts)


def inspect(buffer: Buffer, *, max_bytes: int = 2**40) -> RecordHeader:
    """The header of any record, of any namespace. The bytes behind the header need not be given.

    Raises DamagedRecordError or RecordVersionError. A seal made with a MAC key is not checked.
    """
    view = _bytes_of(buffer)
    header = read_header(view, max_bytes)
    if not header.keyed and header.seal != seal_of(view[: header.header_bytes], None):
        raise DamagedRecordError("the header does not match its checksum")
    return header


def space_of(header: RecordHeader) -> bytes:
    """Where a record belongs: the :attr:`RecordFormat.space` of the format that wrote it."""
    return _space(header.namespace, header.secrets_id, header.codec)


class RecordFormat:
    """Writes and reads the records of one namespace and codec, with the same secrets. Thread-safe."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        codec: str = "raw",
        mac_key: bytes | None = None,
        encryption_key: bytes | None = None,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        if len(namespace.root) != KEY_BYTES or len(namespace.tenant) != KEY_BYTES:
            raise ConfigError("a namespace is made of two digests of 32 bytes; hash the names with SHA-256")
        if not codec.isascii() or not 0 < len(codec) < 256:
            raise ConfigError(f"codec={codec!r} must be a short ASCII name")
        if mac_key is not None and len(mac_key) < 16:
            raise ConfigError(f"a MAC key of {len(mac_key)} bytes can be guessed; give 32 random ones (os.urandom(32))")
        self.namespace = namespace
        self.codec = codec
        self.max_bytes = max_bytes
        self._mac_key = mac_key
        self._cipher = _cipher(encryption_key) if encryption_key is not None else None
        self._secrets_id = _secrets_id(mac_key, encryption_key)

    @property
    def space(self) -> bytes:
        """16 bytes: where these records belong. Of another version, namespace, codec or secret, it is another."""
        return _space(self.namespace, self._secrets_id, self.codec)

    def size_of(self, block: KVBlock) -> int:
        """How many bytes the record of ``block`` has. Raises RecordError if it cannot be written."""
        return self._header(block).record_bytes

    def encode(self, block: KVBlock) -> EncodedRecord:
        """The record of ``block``. Raises RecordError if it cannot be written."""
        header = self._header(block)
        body: list[memoryview] = []
        for raw in (memoryview(block.tokens), *(_raw_bytes(tensor) for tensor in block.tensors)):
            body += [raw, memoryview(bytes(-len(raw) % ALIGNMENT))] if len(raw) % ALIGNMENT else [raw]
        if self._cipher is not None:
            check = os.urandom(_NONCE_BYTES)
        elif self._mac_key is not None:
            check = _sha256(body)
        else:
            check = _crc32(body)
        packed = pack_header(replace(header, body_check=check), self._mac_key)
        if self._cipher is not None:
            body = [memoryview(self._cipher.encrypt(check, b"".join(body), bytes(packed)))]
        return EncodedRecord((memoryview(packed), *body), header.record_bytes)

    def decode(self, buffer: Buffer, key: bytes) -> KVBlock:
        """The block in ``buffer``, which holds the record of ``key`` and nothing else.

        The tensors are views into the buffer (of the decrypted body, where it was encrypted): it belongs to the
        block from now on. Raises a RecordError for whatever is not exactly that record.
        """
        view = _bytes_of(buffer)
        header = self._own_header(view)
        if header.key != key:
            raise ForeignRecordError("the record is of another key")
        if len(view) != header.record_bytes:
            raise DamagedRecordError(f"{len(view)} bytes of a record of {header.record_bytes}")
        body = view[header.header_bytes :]
        if self._cipher is not None:
            body = self._decrypted(body, header, bytes(view[: header.header_bytes]))
        elif self._mac_key is not None:
            if not hmac.compare_digest(_sha256([body]), header.body_check):
                raise DamagedRecordError("the body does not match its digest")
        elif _crc32([body]) != header.body_check[:4]:
            raise DamagedRecordError("the body does not match its checksum")
        whole = _tensor_over(body)
        tensors = tuple(tensor for run in header.runs for tensor in _tensors(whole, run))
        return KVBlock(**described(header), tokens=bytes(body[: header.token_bytes]), tensors=tensors)

    def info(self, buffer: Buffer) -> BlockInfo:
        """What a record's header says, checked but for the body, which need not be given. Raises RecordError."""
        return info_of(self._own_header(_bytes_of(buffer)))

    def _header(self, block: KVBlock) -> RecordHeader:
        """The header of the block's record, still without its checks."""
        keys = (block.key, block.content_key, block.parent_key if block.parent_key is not None else block.key)
        if any(len(key) != KEY_BYTES for key in keys):
            raise RecordError("a block with keys of other than 32 bytes cannot be written; make them with chunk_keys")
        if len(block.context) >= 2**16 or not 0 <= block.approx_depth < 2**32:
            raise RecordError("a block with so many marks or generations cannot be written")
        if not 0 <= block.start < 2**63:
            raise RecordError(f"a block that starts at {block.start} cannot be written")
        runs, body = lay_out(len(block.tokens), block.tensors, self.max_bytes)
        header_bytes = header_bytes_of(self.codec, block.context, runs)
        total = header_bytes + body + (TAG_BYTES if self._cipher is not None else 0)
        if header_bytes > MAX_HEADER_BYTES or total > self.max_bytes:
            raise RecordError(f"a record of {total:,} bytes is larger than {self.max_bytes:,}; use smaller chunks")
        return RecordHeader(
            **described(block),
            version=VERSION,
            header_bytes=header_bytes,
            record_bytes=total,
            namespace=self.namespace,
            codec=self.codec,
            token_bytes=len(block.tokens),
            runs=runs,
            keyed=self._mac_key is not None,
            encrypted=self._cipher is not None,
            secrets_id=self._secrets_id,
            seal=b"",
            body_check=b"",
        )

    def _own_header(self, view: memoryview) -> RecordHeader:
        """The header, if it is whole and of this format."""
        header = read_header(view, self.max_bytes)
        if header.namespace != self.namespace:
            raise ForeignRecordError("the record is of another model, setting or tenant")
        if header.codec != self.codec:
            raise ForeignRecordError(f"the record holds {header.codec}, not {self.codec}")
        if header.secrets_id != self._secrets_id or (header.keyed, header.encrypted) != (
            self._mac_key is not None,
            self._cipher is not None,
        ):
            raise ForeignRecordError("the record was made with another MAC or encryption key")
        if not hmac.compare_digest(header.seal, seal_of(view[: header.header_bytes], self._mac_key)):
            raise DamagedRecordError("the header does not match its seal")
        return header

    def _decrypted(self, body: memoryview, header: RecordHeader, associated: bytes) -> memoryview:
        from cryptography.exceptions import InvalidTag

        assert self._cipher is not None
        try:
            return memoryview(self._cipher.decrypt(header.body_check[:_NONCE_BYTES], body, associated))
        except InvalidTag as error:
            raise DamagedRecordError("the body does not decrypt: it was changed, or the key is another") from error


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _space(namespace: Namespace, secrets_id: bytes, codec: str) -> bytes:
    fields = (namespace.root, namespace.tenant, secrets_id, codec.encode())
    return hashlib.sha256(b"kvboost.space.%d" % VERSION + b"".join(fields)).digest()[:16]


def _crc32(parts: Sequence[memoryview]) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value.to_bytes(4, "little")


def _sha256(parts: Sequence[memoryview]) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; copied only if it lies scattered or on a device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)


class _Writable:
    """Lends numpy the memory of a read-only buffer: torch takes no other. Blocks are never written to."""

    def __init__(self, view: memoryview) -> None:
        self._owner = np.frombuffer(view, dtype=np.uint8)
        address = self._owner.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "shape": (len(view),), "typestr": "|u1", "data": (address, False)}


def _tensor_over(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor that shares and keeps their memory."""
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    array: Any = np.asarray(_Writable(view)) if view.readonly else np.frombuffer(view, dtype=np.uint8)
    return torch.from_numpy(array)


def _tensors(whole: torch.Tensor, run: TensorRun) -> Sequence[torch.Tensor]:
    """The tensors of a run as views of the body."""
    if not run.nbytes:
        return [torch.empty(run.shape, dtype=run.dtype) for _ in range(run.count)]
    rows = whole[run.offset : run.offset + run.count * run.stride].view(run.count, run.stride)
    rows = rows[:, : run.nbytes]
    if run.nbytes % ALIGNMENT:  # bytes between them: each is a view of its own
        return [row.view(run.dtype).view(run.shape) for row in rows.unbind(0)]
    return rows.view(run.dtype).view(run.count, *run.shape).unbind(0)  # a few calls for all layers of a model


def _cipher(key: bytes) -> AESGCM:
    if len(key) != 32:
        raise ConfigError(f"an AES-256 key has 32 bytes, not {len(key)}; make one with os.urandom(32)")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(f"encrypted records need the cryptography package; {with_extra('crypto')}") from error
    return AESGCM(key)


def _secrets_id(*keys: bytes | None) -> bytes:
    """Tells records of other secrets from damaged ones without giving anything away. Zeros without secrets."""
    if not any(keys):
        return bytes(8)
    ids = (bytes(32) if key is None else hmac.digest(key, b"kvboost.secret.1", "sha256") for key in keys)
    return hashlib.sha256(b"".join(ids)).digest()[:8]


def read_key(file: str | Path) -> bytes:
    """The 32 bytes in ``file``, raw or as 64 hex digits. Raises ConfigError for anything else, never with the key."""
    return read_secret(file, name="record_key_file")


def key_salt(file: str | Path | None) -> str:
    """The secret that the keys of protected records are derived with; empty without a key file.

    Names and headers hold those keys in the clear. Who could compute them could try guesses of a text on them.
    """
    return "" if file is None else hmac.digest(read_key(file), b"kvboost.salt.1", "sha256").hex()


def record_format(
    namespace: Namespace, *, codec: str, max_bytes: int, protection: str = "none", key: bytes | None = None
) -> RecordFormat:
    """The format of one tenant's records, ``protection`` as in the engine's settings, with keys of the tenant's own."""
    if protection == "none":
        return RecordFormat(namespace, codec=codec, max_bytes=max_bytes)
    if key is None:
        raise ConfigError(f"record_protection={protection!r} needs a key; give record_key_file")
    return RecordFormat(
        namespace,
        codec=codec,
        max_bytes=max_bytes,
        mac_key=_derived(key, b"kvboost.mac.1", namespace),  # also of encrypted ones: headers are read alone at times
        encryption_key=_derived(key, b"kvboost.encryption.1", namespace) if protection == "encrypt" else None,
    )


def _derived(key: bytes, purpose: bytes, namespace: Namespace) -> bytes:
    return hmac.digest(key, purpose + namespace.tenant, "sha256")
