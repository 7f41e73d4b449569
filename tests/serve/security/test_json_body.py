"""Bodies mean what they mean to Python's parser, and are refused as it refuses them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.serve.security.json_body import parse

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def outcome(parser: Any, body: bytes) -> Any:
    try:
        return "value", repr(parser(body))
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


@settings(max_examples=200, deadline=None)
@given(_VALUES, st.booleans())
def test_values_are_those_of_pythons_parser(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert outcome(parse, body) == outcome(json.loads, body)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='[]{}",:0123456789.eE+-truefalsn \\u\n', max_size=40).map(str.encode))
@example(b"1" * 5000)
@example(b"[" * 5000)
@example(b'"\\ud800"')
@example(b"\xef\xbb\xbf[1]")
@example(b"1e400")
@example(b"-0")
@example(b"NaN")
@example(b"[1,]")
@example(b'{"a":1,"a":2}')
def test_what_is_broken_is_refused_in_the_same_words(body: bytes) -> None:
    assert outcome(parse, body) == outcome(json.loads, body)


def test_numbers_are_as_exact() -> None:
    for text in ("0.1", "1e-7", "123456789012345678901234567890", "2.2250738585072014e-308", "1.7976931348623157e308"):
        assert parse(text.encode()) == json.loads(text)
    assert math.isnan(parse(b"NaN"))
    with pytest.raises(json.JSONDecodeError):
        parse(b"{")
