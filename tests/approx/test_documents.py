from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvboost import ConfigError, GenerationMode
from kvboost.approx.documents import group_documents
from tests.approx.test_find import HEAD, QUESTION, engine_for, joined, text
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("prices_as_guessed")


@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    known=st.sets(st.integers(0, 11)),
    head=st.integers(0, 20),
    company=st.integers(0, 3),
    most=st.integers(30, 200),
)
def test_every_document_comes_once_as_new_and_in_company_where_it_fits(
    lengths: list[int], known: set[int], head: int, company: int, most: int
) -> None:
    documents = [[1000 * (i + 1) + j for j in range(n)] for i, n in enumerate(lengths)]
    start = list(range(head))
    read: list[int] = []
    missing = [i not in known for i in range(len(documents))]
    for tokens, ends, new in group_documents(
        documents, missing, head=start, context_documents=company, max_tokens=most
    ):
        assert tokens[:head] == start
        parts = [tokens[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        bodies = parts[1:] if head else parts
        assert all(part in documents for part in bodies)
        assert new >= 1
        assert len(tokens) <= most or new == 1
        read += [documents.index(part) for part in bodies[-new:]]
        assert len({documents.index(part) for part in bodies}) == len(bodies), "something stands twice in a prompt"
        if all(head + (company + 1) * n <= most for n in lengths):
            assert len(bodies) - new == min(company, len(documents) - 1)
    assert read == [i for i, wanted in enumerate(missing) if wanted]


def test_documents_fit_into_later_prompts_and_are_read_once(tiny: Callable[..., Any]) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=2048))
    documents = [text(30 + i, 90 + 7 * i) for i in range(6)]
    assert engine.warm_documents(documents, head=HEAD, progress=False) > 0
    assert engine.warm_documents(documents, head=HEAD, progress=False) == 0
    late = text(50, 64)
    assert engine.warm_documents([*documents, late], head=HEAD, progress=False) > 0
    chunks = engine.session.prefiller.chunk(late, [len(late)]).chunks
    with engine._store.lease_content(chunks, after=0) as found:
        assert found.blocks[0] is not None
        assert found.blocks[0].start == len(HEAD + documents[4] + documents[5]), "a late document has company too"
    tokens, ends = joined(HEAD, documents[3], documents[0], documents[5], QUESTION)
    reuse = engine.prefill(tokens, boundaries=ends).reuse
    assert reuse.exact_tokens == len(HEAD)
    assert reuse.moved_tokens == len(documents[3] + documents[0] + documents[5])
    assert engine.prefill(tokens, boundaries=ends, mode=GenerationMode.PREFIX_CACHE).reuse.moved_tokens == 0


def test_texts_a_key_and_a_model_without_reuse() -> None:
    engine = engine_for(tiny_model("llama", vocab_size=260), chunk_size=16, tokenizer=byte_tokenizer())
    seen: list[str] = []

    def key(document: Any) -> str:
        seen.append(document)
        return str(document)[::-1]

    texts = [f"document number {i} says {i * i} things" for i in range(5)]
    assert engine.warm_documents(iter(texts), head="You are kind.", key=key, progress=False) > 0
    assert sorted(seen) == sorted(texts)
    assert engine.warm_documents([], progress=False) == 0
    with pytest.raises(ConfigError, match="documents are prefilled for non-prefix reuse"):
        engine_for(engine.model, quality="exact").warm_documents(texts)


def test_a_document_that_is_too_long_is_left_out_and_said(tiny: Callable[..., Any]) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=256))
    documents = [text(30, 90), text(31, 250), text(32, 90)]
    with pytest.warns(UserWarning, match=r"1 of 3 documents do not fit behind the head into the 256"):
        assert engine.warm_documents(documents, head=HEAD, progress=False) > 0
    assert engine.parts is not None
    assert [engine.session.prefiller.knows(tokens) for tokens in documents] == [True, False, True]


def test_what_is_known_is_not_loaded_to_find_out(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama")
    documents = [text(30 + i, 90) for i in range(4)]
    with engine_for(model, disk_cache_dir=tmp_path) as engine:
        engine.warm_documents(documents, head=HEAD, progress=False)
    with engine_for(model, disk_cache_dir=tmp_path) as engine:
        assert engine.warm_documents(documents, head=HEAD, progress=False) == 0
        assert engine.cache_stats()["hot_chunks"] == 0


def test_parts_are_joined_as_documents_are_read() -> None:
    model = tiny_model("llama", vocab_size=260)
    engine = engine_for(model, chunk_size=16, tokenizer=byte_tokenizer(), force_approx=True)
    head, documents = "You are kind.", [f"document number {i} says {i * i} things, all of them true" for i in range(5)]
    engine.warm_documents(documents, head=head, progress=False)
    tokens, ends = engine.join([head, documents[3], documents[1], "Why?"])
    assert len(ends) == 3
    reuse = engine.prefill(tokens, boundaries=ends).reuse
    assert reuse.exact_tokens + reuse.moved_tokens == ends[-1]
    assert reuse.moved_tokens > 0
    with pytest.raises(ConfigError, match="a part at least"):
        engine.join([])
