"""Keys: what they depend on, what they do not, and that they never change by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.keys import chunk_keys, fingerprint_root, key_pairs, paged_key, tail_keys, token_array, variant_key
from kvboost.errors import ConfigError
from kvboost.types import Chunk, Fingerprint

FINGERPRINT = Fingerprint(
    weights="w", config="c", rope="r", dtype="float32", attention="sdpa",
    adapter="", chunker="fixed:4", codec="none", numerics="n", tenant="",
)  # fmt: skip
TOKENS = [0, 1, 2, 255, 256, 65_536, 2**31, 2**32 - 1, 7, 7]
ENDS = [4, 8, 10]

# Computed once, and checked against a second implementation of the encoding. A change here orphans every
# cache on every disk: it needs a new version in the labels of hashing.py, never just new numbers below.
GOLDEN_ROOT = "3fdae5a63ff0332dd1d4b09445811607c87add14b4fcaa5b0866df72605bde84"
GOLDEN_KEYS = [
    (
        "b4c4195f84e353b292239142d583a04af989cfe605355446aab74ede708d6390",
        "d051107a0115c348efaa28e4444ed8ce9e2b7f81f666ddd46679b014c9257237",
    ),
    (
        "782cae3c447779284dcbd67f8d233e131d887f28f417ef88b2d706fcc7a44f73",
        "69463e8e69f02db7150cd1d35662daf87d49c548cf7b15b4f13f34dd6238b9c7",
    ),
    (
        "64e44a9663ae164f5a0a7d79a2681561e8a2d4af5308fd0dfba2d54fdc8e5067",
        "02dfe0ceb6240c108735a263c0abc765d346eb6effe460ccb122ebd8c83d5dd7",
    ),
]

ids = st.integers(0, 2**32 - 1)


@st.composite
def cut_texts(draw: Any, kinds: Any = ids, longest: int = 40) -> tuple[list[int], list[int]]:
    tokens = draw(st.lists(kinds, min_size=1, max_size=longest))
    ends = draw(st.sets(st.integers(1, len(tokens)), min_size=1))
    return tokens, sorted(ends)


def keys_of(fingerprint: Fingerprint, tokens: list[int], ends: list[int]) -> list[Chunk]:
    return chunk_keys(fingerprint_root(fingerprint), token_array(tokens), ends)


def test_golden_keys() -> None:
    assert fingerprint_root(FINGERPRINT).hex() == GOLDEN_ROOT
    chunks = keys_of(FINGERPRINT, TOKENS, ENDS)
    assert [(c.prefix_key.hex(), c.content_key.hex()) for c in chunks] == GOLDEN_KEYS


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_golden_keys_in_another_process(hash_seed: str) -> None:
    """Keys are shared between processes and machines: Python's own salted hash must have no part in them."""
    program = (
        "import json, sys\n"
        "from kvboost.core.keys import chunk_keys, fingerprint_root, token_array\n"
        "from kvboost.types import Fingerprint\n"
        "fingerprint, tokens, ends = json.load(sys.stdin)\n"
        "root = fingerprint_root(Fingerprint(**fingerprint))\n"
        "chunks = chunk_keys(root, token_array(tokens), ends)\n"
        "print(json.dumps([root.hex(), [[c.prefix_key.hex(), c.content_key.hex()] for c in chunks]]))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([dict(FINGERPRINT.items()), TOKENS, ENDS]),
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(finished.stdout) == [GOLDEN_ROOT, [list(pair) for pair in GOLDEN_KEYS]]


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_every_field_of_the_fingerprint_changes_every_key(field: str) -> None:
    """Whatever is left out of the keys mixes KV of two models, or of two tenants."""
    other = replace(FINGERPRINT, **{field: getattr(FINGERPRINT, field) + "x"})
    before, after = keys_of(FINGERPRINT, TOKENS, ENDS), keys_of(other, TOKENS, ENDS)
    names_before = {name for chunk in before for name in (chunk.prefix_key, chunk.content_key)}
    names_after = {name for chunk in after for name in (chunk.prefix_key, chunk.content_key)}
    assert len(names_before) == len(names_after) == 6
    assert not names_before & names_after


def test_text_does_not_wander_between_fields() -> None:
    """Fields have lengths: a value that holds the next field's name is not that field."""
    one = replace(FINGERPRINT, weights="aconfigb", config="c")
    other = replace(FINGERPRINT, weights="a", config="bconfigc")
    assert fingerprint_root(one) != fingerprint_root(other)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", max_size=2), min_size=10, max_size=10), st.data())
def test_equal_roots_mean_equal_fingerprints(values: list[str], data: Any) -> None:
    """Every field counts in its own place."""
    others = data.draw(st.permutations(values))
    same_root = fingerprint_root(Fingerprint(*values)) == fingerprint_root(Fingerprint(*others))
    assert same_root == (values == others)


@settings(max_examples=200, deadline=None)
@given(cut_texts())
def test_chunks_tile_and_chain(text: tuple[list[int], list[int]]) -> None:
    tokens, ends = text
    chunks = keys_of(FINGERPRINT, tokens, ends)
    assert [chunk.end for chunk in chunks] == ends
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]]
    assert [chunk.parent_key for chunk in chunks] == [None, *(chunk.prefix_key for chunk in chunks[:-1])]
    kept = b"".join(chunk.tokens for chunk in chunks)
    assert np.frombuffer(kept, dtype="<u4").tolist() == tokens[: ends[-1]]
    assert all(len(chunk.prefix_key) == len(chunk.content_key) == 32 for chunk in chunks)


@settings(max_examples=200, deadline=None)
@given(cut_texts(st.integers(0, 1), longest=6), cut_texts(st.integers(0, 1), longest=6))
def test_a_prefix_key_names_all_tokens_and_cuts_so_far(
    one: tuple[list[int], list[int]], other: tuple[list[int], list[int]]
) -> None:
    """Two kinds of token and few of them, so that texts often agree for a while."""
    for i, a in enumerate(keys_of(FINGERPRINT, *one)):
        for j, b in enumerate(keys_of(FINGERPRINT, *other)):
            same_tokens, same_cuts = one[0][: a.end] == other[0][: b.end], one[1][: i + 1] == other[1][: j + 1]
            assert (a.prefix_key == b.prefix_key) == (same_tokens and same_cuts)
            assert (a.content_key == b.content_key) == (a.tokens == b.tokens)


def test_another_cut_of_the_same_tokens_has_other_keys() -> None:
    """Other steps round differently: KV of another grid is not the same to the bit."""
    whole, halves, uneven = (keys_of(FINGERPRINT, TOKENS[:8], ends) for ends in ([8], [4, 8], [3, 8]))
    last = {chunks[-1].prefix_key for chunks in (whole, halves, uneven)}
    assert len(last) == 3
    assert len({chunks[-1].content_key for chunks in (whole, halves, uneven)}) == 3


def test_a_prefix_key_depends_on_its_parent() -> None:
    behind_a, behind_b = keys_of(FINGERPRINT, [1, 2, 9, 9], [2, 4]), keys_of(FINGERPRINT, [1, 3, 9, 9], [2, 4])
    assert behind_a[1].tokens == behind_b[1].tokens
    assert behind_a[1].prefix_key != behind_b[1].prefix_key
    (first,) = keys_of(FINGERPRINT, [9, 9], [2])
    assert first.prefix_key not in {behind_a[1].prefix_key, behind_b[1].prefix_key}


@settings(max_examples=100, deadline=None)
@given(st.lists(ids, min_size=1, max_size=10), st.lists(ids, min_size=1, max_size=10))
def test_a_content_key_does_not_depend_on_position(tokens: list[int], before: list[int]) -> None:
    (alone,) = keys_of(FINGERPRINT, tokens, [len(tokens)])
    behind = keys_of(FINGERPRINT, before + tokens, [len(before), len(before) + len(tokens)])
    assert behind[1].content_key == alone.content_key
    assert behind[1].prefix_key != alone.prefix_key


def test_prefix_and_content_keys_are_never_the_same() -> None:
    """The two trusts: approximate KV must not be found by an exact lookup."""
    chunks = keys_of(FINGERPRINT, [5, 5, 5, 5], [2, 4])
    assert not {c.prefix_key for c in chunks} & {c.content_key for c in chunks}


def test_keys_do_not_depend_on_the_type_of_the_ids() -> None:
    root = fingerprint_root(FINGERPRINT)
    big_endian = np.asarray(TOKENS, dtype=">u4")
    assert chunk_keys(root, big_endian.view(), ENDS) == keys_of(FINGERPRINT, TOKENS, ENDS)


def test_no_ends_no_chunks() -> None:
    assert keys_of(FINGERPRINT, [], []) == []
    assert keys_of(FINGERPRINT, [1, 2], []) == []


@given(st.lists(ids, max_size=20))
def test_token_array_keeps_ids(tokens: list[int]) -> None:
    array = token_array(tokens)
    assert array.dtype == np.uint32
    assert array.tolist() == tokens


@pytest.mark.parametrize(
    "bad",
    [[-1], [1, -5], [2**32], [0, 2**40], [2**63], [2**70], [2**63, -1], [1.5], [2.0], ["7"], [True]],
    ids=repr,
)
def test_token_array_refuses_what_cannot_be_an_id(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"2\*\*32-1"):
        token_array(bad)


def test_token_array_wants_one_flat_sequence() -> None:
    for nested in ([[1, 2]], 7):
        with pytest.raises(ConfigError, match="flat"):
            token_array(nested)  # type: ignore[arg-type]


def test_pairs_of_keys_are_those_of_the_chunks() -> None:
    root, tokens = fingerprint_root(FINGERPRINT), token_array(TOKENS)
    chunks = chunk_keys(root, tokens, ENDS)
    assert list(key_pairs(root, tokens, ENDS)) == [(chunk.prefix_key, chunk.content_key) for chunk in chunks]


def test_a_tail_is_the_chunk_that_would_be_cut_there() -> None:
    root, tokens = fingerprint_root(FINGERPRINT), token_array(TOKENS)
    first, _, _ = chunk_keys(root, tokens, ENDS)
    behind = [chunk_keys(root, tokens, [4, end])[1] for end in (5, 6, 7)]
    assert tail_keys(root, tokens[4:7], first) == behind
    assert tail_keys(root, tokens[:2], None) == [chunk_keys(root, tokens, [end])[0] for end in (1, 2)]


def test_the_names_of_other_kinds_of_kv_stay_the_same() -> None:
    assert paged_key(b"p" * 32).hex() == "32e00f7bfb5e355cb9847452cdecd56dfd2d3d4f8b22b8477c800b34f7ff7753"
    assert (
        variant_key(b"c" * 32, b"context").hex() == "24aac8058d2cf8886d61e8f1cf3d21932c8545b7ff855432d705241df76959d1"
    )
