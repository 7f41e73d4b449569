"""The header of a chunk record: its layout, packed and read.

Used by :mod:`kvboost.store.record.format`, which adds the body. All numbers are little-endian::

    8s   magic               32s  namespace root        Q  start
    H    version             32s  tenant                I  approx_depth
    H    flags                8s  id of the secrets     I  bytes of token ids
    I    header bytes        32s  key                   H  bytes of context
    Q    record bytes        32s  parent key, or zeros  H  bytes of codec name
    32s  seal                32s  content key           H  runs of tensors
                             32s  check of the body

then the codec's name, the context, and for each run of equal tensors how many they are (H), their dtype (B), their
number of dimensions (B) and their dimensions (I each), then zeros up to a whole page. The seal is the SHA-256 of the
header without it, keyed (HMAC) where there is a MAC key. In the body, the token ids and then each tensor begin at a
multiple of 64.

Invariants: a reader believes no length before it has held it against the bytes at hand and against its limit; where a
tensor lies follows from the shapes, so no offset can lie; what cannot be read is a RecordError.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvboost.errors import DamagedRecordError, RecordError, RecordVersionError
from kvboost.types import TOKEN_BYTES, BlockInfo, KVBlock, Namespace

VERSION = 1
PAGE = 4096
"""The body begins at a multiple of this, so that a header can be read alone and past the page cache."""
MAX_HEADER_BYTES = 2**20

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What a record is read from. Anything with the buffer protocol and single bytes will do."""

MAGIC = b"\x89KVB\r\n\x1a\n"  # as PNG's: shows a file that went through a text conversion
_FIXED = struct.Struct("<8sHHIQ32s32s32s8s32s32s32s32sQIIHHH")
_SEAL = slice(24, 56)
_RUN = struct.Struct("<HBB")
_DIMENSION_BYTES = 4
ALIGNMENT = 64
_MAX_DIMENSIONS = 8
MAX_TENSORS = 4096
"""Of one block: empty ones take no bytes of a record, but memory."""
KEY_BYTES = 32
TAG_BYTES = 16
"""Behind an encrypted body."""

_BITWISE, _HAS_PARENT, _MAC, _ENCRYPTED = 1, 2, 4, 8
_KNOWN_FLAGS = _BITWISE | _HAS_PARENT | _MAC | _ENCRYPTED

# The number in the record is the place in this table: append only.
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float64,
)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Consecutive tensors of one dtype and shape; ``offset`` counts from the body's beginning, before encryption."""

    count: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stride(self) -> int:
        """From the beginning of one to the next, in bytes."""
        return aligned(self.nbytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class RecordHeader(BlockInfo):
    """What a record says about itself and its block. Nothing of it is proven before its seal is checked."""

    version: int
    header_bytes: int
    record_bytes: int
    namespace: Namespace
    codec: str
    token_bytes: int
    runs: tuple[TensorRun, ...]
    """The tensors, in order."""
    keyed: bool
    """Sealed with a MAC key."""
    encrypted: bool
    secrets_id: bytes
    seal: bytes
    body_check: bytes

    @property
    def tokens(self) -> int:
        """How many tokens the block holds."""
        return self.token_bytes // TOKEN_BYTES


def described(block: KVBlock | BlockInfo) -> dict[str, Any]:
    """What a :class:`BlockInfo` says, by name."""
    return {name: getattr(block, name) for name in BlockInfo.__slots__}


def info_of(block: KVBlock | BlockInfo) -> BlockInfo:
    """A block without its tensors and tokens."""
    return BlockInfo(**described(block))


def header_length(first_page: Buffer) -> int:
    """How many bytes :func:`inspect` and :meth:`RecordFormat.info` need, by the first page of a record."""
    view = memoryview(first_page)
    if len(view) < _FIXED.size or view[:8] != MAGIC:
        raise DamagedRecordError("these bytes do not begin as a record does")
    length = int.from_bytes(view[12:16], "little")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise DamagedRecordError(f"a header cannot have {length} bytes")
    return length


def pack_header(header: RecordHeader, mac_key: bytes | None) -> bytearray:
    """The header's bytes, with the seal that ``mac_key`` gives."""
    packed = bytearray(header.header_bytes)
    flags = (
        (_BITWISE if header.bitwise else 0)
        | (_HAS_PARENT if header.parent_key is not None else 0)
        | (_MAC if header.keyed else 0)
        | (_ENCRYPTED if header.encrypted else 0)
    )
    # In the order of the table above.
    record = (MAGIC, header.version, flags, header.header_bytes, header.record_bytes, b"")
    space = (header.namespace.root, header.namespace.tenant, header.secrets_id)
    keys = (header.key, header.parent_key or b"", header.content_key, header.body_check)
    sizes = (header.token_bytes, len(header.context), len(header.codec), len(header.runs))
    _FIXED.pack_into(packed, 0, *record, *space, *keys, header.start, header.approx_depth, *sizes)
    table = b"".join(
        _RUN.pack(run.count, _DTYPE_NUMBERS[run.dtype], len(run.shape)) + struct.pack(f"<{len(run.shape)}I", *run.shape)
        for run in header.runs
    )
    names = header.codec.encode() + header.context + table
    packed[_FIXED.size : _FIXED.size + len(names)] = names
    packed[_SEAL] = seal_of(packed, mac_key)
    return packed


def header_bytes_of(codec: str, context: bytes, runs: Sequence[TensorRun]) -> int:
    """How many bytes the header of such a record has."""
    table = sum(_RUN.size + _DIMENSION_BYTES * len(run.shape) for run in runs)
    return aligned(_FIXED.size + len(codec) + len(context) + table, PAGE)


def lay_out(token_bytes: int, tensors: Sequence[torch.Tensor], max_bytes: int) -> tuple[tuple[TensorRun, ...], int]:
    """Where the tensors go in the body, and the body's bytes. Raises RecordError for what no record can hold."""
    if len(tensors) > MAX_TENSORS:
        raise RecordError(f"{len(tensors)} tensors do not fit a record; join some")
    runs, body = [], aligned(token_bytes, ALIGNMENT)
    for (dtype, shape), equal in itertools.groupby(tensors, key=lambda tensor: (tensor.dtype, tuple(tensor.shape))):
        if dtype not in _DTYPE_NUMBERS or len(shape) > _MAX_DIMENSIONS:
            raise RecordError(f"a tensor {shape} of {dtype} cannot be written; use another dtype")
        run = TensorRun(len(list(equal)), dtype, shape, body)
        body += run.count * run.stride
        if max(body, _largest(run)) > max_bytes:
            raise RecordError(f"a tensor {shape} does not fit a record of {max_bytes:,} bytes; use smaller chunks")
        runs.append(run)
    return tuple(runs), body


def read_header(view: memoryview, max_bytes: int) -> RecordHeader:
    """The header's fields, every length held against the bytes at hand, the limit and the others."""
    header_bytes = header_length(view[:PAGE])
    if int.from_bytes(view[8:10], "little") != VERSION:
        raise RecordVersionError(
            f"this code reads records of version {VERSION}; remove this one, and it is written again"
        )
    if len(view) < header_bytes:
        raise DamagedRecordError(f"{len(view)} bytes of a header of {header_bytes}")
    fields = _FIXED.unpack_from(view)
    _, version, flags, _, total, seal, root, tenant, secrets_id, key, parent, content, check = fields[:13]
    start, approx_depth, token_bytes, context_bytes, codec_bytes, run_count = fields[13:]
    if flags & ~_KNOWN_FLAGS:
        raise DamagedRecordError("the record has flags that no writer sets")
    if not header_bytes <= total <= max_bytes:
        raise DamagedRecordError(f"a record of {total} bytes with a header of {header_bytes}, {max_bytes} allowed")
    at = _FIXED.size + codec_bytes + context_bytes
    if at + _RUN.size * run_count > header_bytes:
        raise DamagedRecordError("the header is shorter than what it is said to hold")
    names = bytes(view[_FIXED.size : at])
    if not names[:codec_bytes].isascii():
        raise DamagedRecordError("the codec has no readable name")
    runs, at, body = _read_table(view[:header_bytes], at, run_count, token_bytes, total)
    if aligned(at, PAGE) != header_bytes:
        raise DamagedRecordError("the header has another length than its fields")
    if header_bytes + body + (TAG_BYTES if flags & _ENCRYPTED else 0) != total:
        raise DamagedRecordError("the record has another length than its tokens and tensors")
    return RecordHeader(
        version=version,
        header_bytes=header_bytes,
        record_bytes=total,
        namespace=Namespace(root, tenant),
        codec=names[:codec_bytes].decode("ascii"),
        key=key,
        parent_key=parent if flags & _HAS_PARENT else None,
        content_key=content,
        bitwise=bool(flags & _BITWISE),
        start=start,
        approx_depth=approx_depth,
        context=names[codec_bytes:],
        token_bytes=token_bytes,
        nbytes=sum(run.count * run.nbytes for run in runs),
        runs=runs,
        keyed=bool(flags & _MAC),
        encrypted=bool(flags & _ENCRYPTED),
        secrets_id=secrets_id,
        seal=seal,
        body_check=check,
    )


def _read_table(
    header: memoryview, at: int, count: int, token_bytes: int, max_bytes: int
) -> tuple[tuple[TensorRun, ...], int, int]:
    """The tensors, where the table ends, and how many bytes tokens and tensors take; at most ``max_bytes``."""
    runs: list[TensorRun] = []
    body, tensors = aligned(token_bytes, ALIGNMENT), 0
    for _ in range(count):
        if at + _RUN.size > len(header):
            raise DamagedRecordError("the tensor table does not end within the header")
        equal, number, dimensions = _RUN.unpack_from(header, at)
        at += _RUN.size
        tensors += equal
        if number >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS or not equal or tensors > MAX_TENSORS:
            raise DamagedRecordError("tensors of a kind or number that no writer writes")
        if at + _DIMENSION_BYTES * dimensions > len(header):
            raise DamagedRecordError("the tensor table does not end within the header")
        run = TensorRun(equal, _DTYPES[number], struct.unpack_from(f"<{dimensions}I", header, at), body)
        at += _DIMENSION_BYTES * dimensions
        body += run.count * run.stride
        if max(body, _largest(run)) > max_bytes:
            raise DamagedRecordError("the tensors are larger than the record")
        runs.append(run)
    return tuple(runs), at, body


def _largest(run: TensorRun) -> int:
    """As if no dimension were 0: then the strides of the others cannot overflow either."""
    return math.prod(max(size, 1) for size in run.shape) * run.dtype.itemsize


def aligned(count: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-count // alignment) * alignment


def seal_of(header: Buffer, mac_key: bytes | None) -> bytes:
    """What the seal of this header must be."""
    view = memoryview(header)
    parts = (view[: _SEAL.start], view[_SEAL.stop :])
    hasher: Any = hashlib.sha256() if mac_key is None else hmac.new(mac_key, digestmod="sha256")
    for part in parts:
        hasher.update(part)
    digest: bytes = hasher.digest()
    return digest
