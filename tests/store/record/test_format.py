"""The chunk record: what was written comes back, and nothing else ever does."""

from __future__ import annotations

import builtins
import hashlib
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.errors import ConfigError, DamagedRecordError, ForeignRecordError, RecordError, RecordVersionError
from kvboost.store.record.format import RecordFormat, inspect, space_of
from kvboost.store.record.header import MAX_HEADER_BYTES, PAGE, header_length, info_of, seal_of
from kvboost.types import KVBlock, Namespace

DTYPES = (
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


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


NAMESPACE = Namespace(digest("model"), digest("tenant"))
PLAIN = RecordFormat(NAMESPACE)
KEYED = RecordFormat(NAMESPACE, mac_key=b"k" * 32)
SECRET = RecordFormat(NAMESPACE, encryption_key=b"e" * 32)
BOTH = RecordFormat(NAMESPACE, mac_key=b"k" * 32, encryption_key=b"e" * 32)
FORMATS = {"plain": PLAIN, "keyed": KEYED, "secret": SECRET, "both": BOTH}
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def block(name: str = "a", *, tensors: tuple[torch.Tensor, ...] | None = None, **fields: Any) -> KVBlock:
    if tensors is None:
        tensors = (torch.arange(6, dtype=torch.float32).reshape(1, 2, 3), torch.ones(5, dtype=torch.bfloat16))
    values: dict[str, Any] = {
        "key": digest(name),
        "parent_key": None,
        "content_key": digest("content " + name),
        "tokens": b"\x01\x00\x00\x00\x02\x00\x00\x00",
        "tensors": tensors,
        "nbytes": sum(t.numel() * t.element_size() for t in tensors),
        "bitwise": True,
    }
    return KVBlock(**(values | fields))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(one: KVBlock, other: KVBlock) -> None:
    assert replace(one, tensors=()) == replace(other, tensors=())
    assert [(t.dtype, t.shape) for t in one.tensors] == [(t.dtype, t.shape) for t in other.tensors]
    assert [raw(t) for t in one.tensors] == [raw(t) for t in other.tensors]  # NaN bits too


# What was written comes back

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
keys = st.binary(min_size=32, max_size=32)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    flat = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size)) + b"\0"), dtype=torch.uint8)
    tensor = flat[:size].view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def blocks(draw: Any) -> KVBlock:
    return block(
        tensors=tuple(draw(st.lists(tensors(), max_size=4))),
        key=draw(keys),
        parent_key=draw(st.none() | keys),
        content_key=draw(keys),
        tokens=draw(st.binary(max_size=200)),
        bitwise=draw(st.booleans()),
        start=draw(st.integers(0, 2**63 - 1)),
        context=draw(st.binary(max_size=128)),
        approx_depth=draw(st.integers(0, 2**32 - 1)),
    )


@settings(deadline=None)
@given(blocks(), st.sampled_from(list(FORMATS)), st.booleans())
@example(block(tensors=(), tokens=b""), "plain", True)
@example(block(tensors=(torch.tensor(1.5),), parent_key=bytes(32)), "both", False)
def test_a_block_comes_back_as_it_was(original: KVBlock, name: str, writable: bool) -> None:
    form = FORMATS[name]
    record = form.encode(original)
    data = record.join()
    assert len(data) == record.nbytes == sum(len(part) for part in record.parts) == form.size_of(original)
    assert_equal(form.decode(bytearray(data) if writable else data, original.key), original)
    info = form.info(data)
    assert all(getattr(info, field) == getattr(original, field) for field in info.__slots__)
    header = inspect(data)
    assert form.info(data[: header.header_bytes]) == info == info_of(header)
    assert (header.namespace, header.codec, header.tokens) == (NAMESPACE, "raw", len(original.tokens) // 4)
    written = [(run.dtype, run.shape) for run in header.runs for _ in range(run.count)]
    assert written == [(t.dtype, tuple(t.shape)) for t in original.tensors]
    assert header_length(data[:PAGE]) == header.header_bytes
    assert space_of(header) == form.space
    assert header.header_bytes % PAGE == 0


def test_tensors_are_not_copied() -> None:
    tensor = torch.arange(4096, dtype=torch.float32)
    written = PLAIN.encode(block(tensors=(tensor,)))
    tensor[0] = 77.0  # shows through where nothing was copied
    assert any(len(part) == 4096 * 4 and part[:4] == raw(tensor[:1]) for part in written.parts)
    buffer = bytearray(PLAIN.encode(block(tensors=(tensor,))).join())
    (found,) = PLAIN.decode(buffer, digest("a")).tensors
    buffer[-4:] = b"\0\0\0\0"
    assert found[-1] == 0.0
    constant = PLAIN.encode(block(tensors=(tensor,))).join()
    (found,) = PLAIN.decode(constant, digest("a")).tensors
    tracemalloc.start()
    again = PLAIN.decode(constant, digest("a"))
    assert tracemalloc.get_traced_memory()[1] < 16_000
    tracemalloc.stop()
    del constant
    assert_equal(again, block(tensors=(tensor,)))


def test_tensors_lie_where_a_vector_unit_wants_them() -> None:
    uneven = tuple(torch.ones(n, dtype=torch.uint8) for n in (1, 65, 3, 64))
    for run in inspect(PLAIN.encode(block(tensors=uneven * 2)).join()).runs:
        assert run.offset % 64 == run.stride % 64 == 0


def test_inference_tensors_and_parameters_can_be_written() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    original = block(tensors=(made, torch.nn.Parameter(torch.ones(2))))
    assert_equal(
        PLAIN.decode(PLAIN.encode(original).join(), original.key), replace(original, tensors=(made, torch.ones(2)))
    )


def test_many_tensors_take_a_longer_header() -> None:
    original = block(tensors=tuple(torch.full((1, 2, 3, 3 + n % 2), n, dtype=torch.float16) for n in range(300)))
    data = PLAIN.encode(original).join()
    assert header_length(data[:PAGE]) == 2 * PAGE
    assert_equal(PLAIN.decode(data, original.key), original)
    with pytest.raises(DamagedRecordError):
        PLAIN.info(data[:PAGE])


@pytest.mark.parametrize(
    "unfit",
    [
        block(key=b"short"),
        block(parent_key=b""),
        block(content_key=b"x" * 33),
        block(tensors=(torch.ones(2, dtype=torch.complex64),)),
        block(tensors=(torch.ones((1,) * 9),)),
        block(tensors=(torch.empty(0, 2**31),)),
        block(context=b"c" * 2**16),
        block(start=-1),
        block(approx_depth=-1),
        block(tensors=(torch.empty(64 * 2**20, dtype=torch.uint8),)),
        block(tensors=(torch.empty(0),) * 4097),
    ],
)
def test_what_cannot_be_read_again_is_not_written(unfit: KVBlock) -> None:
    for write in (PLAIN.encode, PLAIN.size_of):
        with pytest.raises(RecordError):
            write(unfit)


# Nothing else ever comes back


@every_format
def test_every_flipped_bit_is_detected(form: RecordFormat) -> None:
    data = bytearray(form.encode(block()).join())
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(RecordError):
                form.decode(data, digest("a"))
            data[at] ^= 1 << bit
    assert_equal(form.decode(data, digest("a")), block())


@every_format
def test_every_truncation_and_addition_is_detected(form: RecordFormat) -> None:
    data = form.encode(block()).join()
    for size in range(len(data)):
        with pytest.raises(DamagedRecordError):
            form.decode(data[:size], digest("a"))
    with pytest.raises(DamagedRecordError):
        form.decode(data + b"\0", digest("a"))


@every_format
def test_a_header_flipped_anywhere_gives_no_info(form: RecordFormat) -> None:
    data = bytearray(form.encode(block()).join()[:PAGE])
    for at in range(PAGE):
        data[at] ^= 1
        with pytest.raises(RecordError):
            form.info(data)
        data[at] ^= 1


@every_format
def test_a_swapped_record_is_foreign(form: RecordFormat) -> None:
    mac, aes = form._mac_key, b"e" * 32 if form._cipher else None
    data = form.encode(block()).join()
    others = [
        RecordFormat(Namespace(digest("other model"), NAMESPACE.tenant), mac_key=mac, encryption_key=aes),
        RecordFormat(Namespace(NAMESPACE.root, digest("other tenant")), mac_key=mac, encryption_key=aes),
        RecordFormat(NAMESPACE, codec="int8", mac_key=mac, encryption_key=aes),
        RecordFormat(NAMESPACE, mac_key=b"another key, long enough", encryption_key=aes),
        RecordFormat(NAMESPACE, mac_key=mac, encryption_key=b"f" * 32),
    ]
    for other in [*others, *(f for f in FORMATS.values() if f is not form)]:
        with pytest.raises(ForeignRecordError):
            other.decode(data, digest("a"))
        with pytest.raises(ForeignRecordError):
            other.info(data)
        with pytest.raises(ForeignRecordError):
            form.decode(other.encode(block()).join(), digest("a"))
        assert other.space != form.space
    with pytest.raises(ForeignRecordError):
        form.decode(data, digest("b"))
    assert RecordFormat(NAMESPACE, mac_key=mac, encryption_key=aes).space == form.space


@pytest.mark.parametrize("form", [KEYED, SECRET, BOTH], ids=["keyed", "secret", "both"])
def test_a_header_on_another_body_is_detected(form: RecordFormat) -> None:
    one, two = (form.encode(block(tensors=(torch.full((4,), n),))).join() for n in (1.0, 2.0))
    with pytest.raises(DamagedRecordError):
        form.decode(one[:PAGE] + two[PAGE:], digest("a"))


@pytest.mark.parametrize("form", [KEYED, BOTH], ids=["keyed", "both"])
def test_a_seal_without_the_key_is_worth_nothing(form: RecordFormat) -> None:
    data = bytearray(form.encode(block()).join())
    data[200] ^= 1  # in the content key
    data[24:56] = seal_of(data[:PAGE], None)
    with pytest.raises(RecordError):
        form.decode(data, digest("a"))
    data[24:56] = seal_of(data[:PAGE], b"guess" * 8)
    with pytest.raises(DamagedRecordError):
        form.info(data)


def test_the_wrong_key_fails_even_if_its_name_is_forged() -> None:
    """The id of the secrets is only a name: the seal and the tag decide."""
    other = RecordFormat(NAMESPACE, mac_key=b"q" * 32)
    other._secrets_id = KEYED._secrets_id
    with pytest.raises(DamagedRecordError):
        other.decode(KEYED.encode(block()).join(), digest("a"))
    thief = RecordFormat(NAMESPACE, encryption_key=b"q" * 32)
    thief._secrets_id = SECRET._secrets_id
    with pytest.raises(DamagedRecordError):
        thief.decode(SECRET.encode(block()).join(), digest("a"))


def test_encrypted_records_show_neither_tokens_nor_tensors() -> None:
    original = block(tokens=b"tokens that nobody may see......", tensors=(torch.full((8,), 1.25),))
    secret, plain = SECRET.encode(original).join(), PLAIN.encode(original).join()
    for shown in (original.tokens, raw(original.tensors[0])):
        assert shown in plain
        assert shown not in secret
    assert secret != SECRET.encode(original).join(), "a nonce was used twice"


def test_another_version_is_named_as_such() -> None:
    data = bytearray(PLAIN.encode(block()).join())
    data[8] = 2
    data[24:56] = seal_of(data[:PAGE], None)
    for read in (lambda: PLAIN.decode(data, digest("a")), lambda: PLAIN.info(data), lambda: inspect(data)):
        with pytest.raises(RecordVersionError, match="version 1"):
            read()


# Lies: a header whose checksum is right, as an attacker without a MAC key in the way would make it


def resealed(data: bytes, at: int, value: bytes) -> bytes:
    forged = bytearray(data)
    forged[at : at + len(value)] = value
    size = min(max(int.from_bytes(forged[12:16], "little"), PAGE), len(forged))
    forged[24:56] = seal_of(forged[:size], None)
    return bytes(forged)


HONEST = PLAIN.encode(block()).join()
FIELDS = {"header bytes": (12, 4), "record bytes": (16, 8), "tokens": (268, 4), "context": (272, 2), "codec": (274, 2)}
FIELDS |= {
    "runs": (276, 2),
    "tensors": (281, 2),
    "dimensions": (284, 1),
    "dimension 0": (285, 4),
    "dimension 1": (289, 4),
}


def test_the_offsets_used_here_are_the_formats() -> None:
    values = {name: int.from_bytes(HONEST[at : at + size], "little") for name, (at, size) in FIELDS.items()}
    expected = {"header bytes": PAGE, "record bytes": len(HONEST), "tokens": 8, "context": 0, "codec": 3, "runs": 2}
    assert values == expected | {"tensors": 1, "dimensions": 3, "dimension 0": 1, "dimension 1": 2}
    assert_equal(PLAIN.decode(resealed(HONEST, 0, HONEST[:8]), digest("a")), block())


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, 1, 5, 63, 64, 4095, 4097, 8192, 2**16, 2**20, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_a_lying_length_costs_nothing(field: str, value: int) -> None:
    """At most another shape over the same bytes, which only a MAC key can tell from an honest one."""
    at, size = FIELDS[field]
    value %= 2 ** (8 * size)
    forged = resealed(HONEST, at, value.to_bytes(size, "little"))
    tracemalloc.start()
    try:
        found = PLAIN.decode(forged, digest("a"))
    except RecordError:
        pass
    else:
        assert value < 4095, "a length beyond the record was believed"
        assert sum(len(raw(tensor)) for tensor in found.tensors) + len(found.tokens) <= len(forged) - PAGE
    finally:
        assert tracemalloc.get_traced_memory()[1] < 100_000, "memory was taken on a record's word"
        tracemalloc.stop()


def test_a_record_beyond_the_limit_is_refused_before_it_is_read() -> None:
    small = RecordFormat(NAMESPACE, max_bytes=PAGE + 100)
    with pytest.raises(DamagedRecordError, match="allowed"):
        small.decode(HONEST, digest("a"))
    with pytest.raises(RecordError, match="smaller chunks"):
        small.encode(block())


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1, 2**32 - 1), (2**32 - 1,) * 8])
def test_strides_cannot_overflow(shape: tuple[int, ...]) -> None:
    table = bytes((1, 0, 0, len(shape))) + b"".join(size.to_bytes(4, "little") for size in shape)
    with pytest.raises(DamagedRecordError):
        PLAIN.decode(resealed(HONEST, 281, table), digest("a"))


def test_empty_tensors_are_not_free() -> None:
    """They take no bytes of the record: without a limit, one number would make millions."""
    original = block(tensors=(torch.empty(0),) * 4096)
    data = PLAIN.encode(original).join()
    assert len(PLAIN.decode(data, original.key).tensors) == 4096
    with pytest.raises(DamagedRecordError):
        PLAIN.decode(resealed(data, 281, b"\xff\xff"), original.key)


def test_a_header_longer_than_allowed_is_refused() -> None:
    with pytest.raises(DamagedRecordError):
        header_length(resealed(HONEST, 12, (MAX_HEADER_BYTES + PAGE).to_bytes(4, "little")))


# Fuzzing; the benchmark record_fuzz does the same for millions


def survives(form: RecordFormat, data: bytes) -> None:
    for read in (lambda: form.decode(data, digest("a")), lambda: form.info(data), lambda: inspect(data)):
        try:
            read()
        except RecordError:
            continue


@given(st.binary(max_size=600), st.booleans())
def test_any_bytes_are_an_error_and_nothing_worse(data: bytes, as_if_begun: bool) -> None:
    survives(PLAIN, HONEST[: 24 + len(data) % 40] + data if as_if_begun else data)
    with pytest.raises(RecordError):
        PLAIN.decode(data, digest("a"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 340), st.binary(min_size=1, max_size=12), st.sampled_from(list(FORMATS)))
def test_a_mutated_header_with_the_right_seal_never_crashes(at: int, value: bytes, name: str) -> None:
    form = FORMATS[name]
    data = bytearray(form.encode(block()).join())
    data[at : at + len(value)] = value
    data[24:56] = seal_of(data[:PAGE], form._mac_key)
    survives(form, bytes(data))


# Settings


@pytest.mark.parametrize(
    "options",
    [{"mac_key": b"short"}, {"encryption_key": b"e" * 16}, {"codec": ""}, {"codec": "ü"}, {"codec": "x" * 256}],
)
def test_unfit_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RecordFormat(NAMESPACE, **options)
    with pytest.raises(ConfigError):
        RecordFormat(Namespace(b"short", digest("tenant")))


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'its extra crypto \(in a checkout: pip install "\.\[crypto\]"\)'):
        RecordFormat(NAMESPACE, encryption_key=b"e" * 32)
