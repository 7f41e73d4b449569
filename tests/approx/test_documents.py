from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvboost import ConfigError, GenerationMode, KVBoost
from kvboost.approx.documents import Document, join_group, named_documents, plan_groups
from kvboost.core.keys import token_array
from kvboost.scheduler.jobs import Finished, Job
from kvboost.scheduler.runner import BatchRunner
from tests.approx.test_find import HEAD, QUESTION, engine_for, joined, text
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer, word_tokenizer

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
    cut = [Document(i, tokens, [len(tokens)]) for i, tokens in enumerate(documents)]
    start = list(range(head))
    read: list[int] = []
    missing = [i not in known for i in range(len(documents))]
    plan = plan_groups(lengths, missing, head_tokens=head, context_documents=company, max_tokens=most)
    for context, added in plan:
        new, (tokens, ends) = len(added), join_group([cut[i] for i in [*context, *added]], head=start)
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
    assert engine.add_documents(documents, head=HEAD, progress=False) > 0
    assert engine.add_documents(documents, head=HEAD, progress=False) == 0
    late = text(50, 64)
    assert engine.add_documents([*documents, late], head=HEAD, progress=False) > 0
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
    assert engine.add_documents(iter(texts), head="You are kind.", key=key, progress=False) > 0
    assert sorted(seen) == sorted(texts)
    assert engine.add_documents([], progress=False) == 0
    exact = engine_for(engine.model, quality="exact")
    with pytest.raises(ConfigError, match="documents are for non-prefix reuse"):
        exact.add_documents(texts)
    with pytest.raises(ConfigError, match="knows no documents"):
        exact.remove_documents(texts)


def test_a_document_that_is_too_long_is_left_out_and_said(tiny: Callable[..., Any]) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=256))
    documents = [text(30, 90), text(31, 250), text(32, 90)]
    with pytest.warns(UserWarning, match=r"1 of 3 documents do not fit behind the head into the 256"):
        assert engine.add_documents(documents, head=HEAD, progress=False) > 0
    cut = [(tokens, engine.parts.chunker.cut(token_array(tokens), [len(tokens)])) for tokens in documents]
    assert engine.session.prefiller.knows(cut) == [True, False, True]


def test_documents_that_are_much_alike_are_prefilled_once() -> None:
    """Each is cut as on its own, not as another one of the same words."""
    model = tiny_model("llama", vocab_size=260, max_position_embeddings=2048)
    engine = engine_for(model, chunk_size=16, tokenizer=byte_tokenizer())
    words = ("river", "stone", "letter", "garden", "winter", "market", "engine", "island", "copper", "window")
    texts = [
        f"Document {number}: {' '.join(words[(number * 7 + place * (1 + number % 9)) % 10] for place in range(24))}.\n"
        for number in range(60)
    ]
    assert engine.add_documents(texts, head=HEAD, progress=False) > 0
    cut = named_documents(texts, engine.parts.encoder, engine.parts.chunker, ids=None, key=None)
    known = engine.session.prefiller.knows((document.tokens, document.cuts) for document in cut)
    assert known == [True] * len(texts)


def test_what_is_known_is_not_loaded_to_find_out(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama")
    documents = [text(30 + i, 90) for i in range(4)]
    with engine_for(model, disk_cache_dir=tmp_path) as engine:
        engine.add_documents(documents, head=HEAD, progress=False)
    with engine_for(model, disk_cache_dir=tmp_path) as engine:
        assert engine.add_documents(documents, head=HEAD, progress=False) == 0
        assert engine.cache_stats()["hot_chunks"] == 0


def test_parts_are_joined_as_documents_are_read() -> None:
    model = tiny_model("llama", vocab_size=260)
    engine = engine_for(model, chunk_size=16, tokenizer=byte_tokenizer(), force_approx=True)
    head, documents = "You are kind.", [f"document number {i} says {i * i} things, all of them true" for i in range(5)]
    engine.add_documents(documents, head=head, progress=False)
    tokens, ends = engine.join([head, documents[3], documents[1], "Why?"])
    assert len(ends) == 3
    reuse = engine.prefill(tokens, boundaries=ends).reuse
    assert reuse.exact_tokens + reuse.moved_tokens == ends[-1]
    assert reuse.moved_tokens > 0
    with pytest.raises(ConfigError, match="a part at least"):
        engine.join([])


_WORDS = ("the cache", "keeps", "what", "a model", "has read", "and gives", "it", "back when", "the same words", "come")
_RANDOM = random.Random(5)
_PASSAGES = [f"Passage {n} " + " ".join(_RANDOM.choice(_WORDS) for _ in range(40)) + "." for n in range(5)]


def word_engine(**settings: Any) -> KVBoost:
    model = tiny_model("llama", vocab_size=600, max_position_embeddings=2048)
    tokenizer = word_tokenizer(_PASSAGES, vocab_size=400)
    return engine_for(model, tokenizer, **{"chunk_size": 16, "force_approx": True, **settings})


@pytest.fixture(scope="module")
def words() -> KVBoost:
    engine = word_engine()
    engine.add_documents(_PASSAGES[:4], head="Answer from this.", progress=False)
    return engine


def reused(engine: KVBoost, prompt: str) -> int:
    """Prompt tokens that came from elsewhere or from the beginning."""
    engine.session.prefiller.approx._prefixes.clear()  # type: ignore[union-attr]
    reuse = engine.prefill(prompt).reuse
    return reuse.exact_tokens + reuse.moved_tokens


@pytest.mark.parametrize("joint", ["\n\n", " ", "", '" and "', "\n- "])
def test_documents_are_found_in_plain_text_whatever_stands_around_them(words: KVBoost, joint: str) -> None:
    asked = [_PASSAGES[2], _PASSAGES[0], _PASSAGES[3]]
    known = sum(len(words.encode(passage)) for passage in asked)
    found = reused(words, f"Now, with {joint.join(['', *asked, ''])}, tell me: why?")
    assert found >= known - 6 * len(asked)


def test_documents_are_found_in_chats_and_by_a_batch_runner(words: KVBoost) -> None:
    known = sum(len(words.encode(passage)) for passage in _PASSAGES[:2])
    content = f"Given {_PASSAGES[1]} {_PASSAGES[0]} What is said?"
    chat = words.chat([{"role": "user", "content": content}], max_new_tokens=1).reuse
    assert chat.exact_tokens + chat.moved_tokens >= known - 12
    with BatchRunner(words) as runner:
        tokens = words.encode(f"By the way: {_PASSAGES[1]} {_PASSAGES[0]} Is that so?")
        *_, last = runner.submit(Job(token_ids=tuple(tokens), max_new_tokens=1)).events()
    assert isinstance(last, Finished)
    assert last.report is not None
    assert last.report.exact_tokens + last.report.moved_tokens >= known - 12


def test_documents_belong_to_a_tenant_and_go_with_it() -> None:
    engine = word_engine()
    other = engine.for_tenant("other")
    assert other.add_documents(_PASSAGES, ids=list("abcde"), progress=False) > 0
    asked = f"Well, {_PASSAGES[1]} Why?"
    tokens = engine.encode(asked)
    at = len(engine.encode("Well,"))

    def cuts(view: KVBoost) -> Sequence[int]:
        return view.session.prefiller.approx.boundaries(tokens)  # type: ignore[union-attr]

    assert not cuts(engine)
    assert cuts(other)[0] <= at + 3
    assert other.remove_documents(["b", "z"]) == 1
    assert not cuts(other)
    assert other.add_documents([_PASSAGES[1]], progress=False) == 0, "it is stored, and known again"
    assert other.remove_documents([_PASSAGES[1]]) == 1, "without an id its text is its name"
    other.add_documents([engine.encode(_PASSAGES[1])], progress=False)
    assert cuts(other)
    other.clear()
    assert not cuts(other)


def test_mistakes_with_documents_say_so(words: KVBoost) -> None:
    for texts, ids, message in (
        ("one text", None, "come as lists"),
        (["one", "two"], ["a"], "1 ids for 2 documents"),
        (["one", "two"], ["a", "a"], "the same id"),
        (["one", "  "], None, "a document is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            words.add_documents(texts, ids=ids, progress=False)


def test_a_shadow_check_replays_the_chunks_of_its_time() -> None:
    """A document that became known since would cut the prompt elsewhere, and blocks would land in other chunks."""
    engine = word_engine(recompute_ratio=0.5)
    engine.add_documents(_PASSAGES[:2], progress=False)
    tokens = engine.encode(f"Well, {_PASSAGES[1]} {_PASSAGES[4]} Why?")
    prefiller = engine.session.prefiller  # type: ignore[union-attr]
    with prefiller.open(tokens, approx=True) as state:
        assert state.spans is not None
        blocks, chunks, boundaries = dict(state.spans.blocks), state.prompt.chunks, state.prompt.boundaries
    engine.add_documents([_PASSAGES[1][20:], _PASSAGES[4]], progress=False)
    assert prefiller.chunk(tokens, boundaries).chunks != chunks
    with prefiller.replay(tokens, boundaries=boundaries, new_tokens=0, using=blocks) as state:
        assert state.prompt.chunks == chunks


@pytest.mark.real
def test_a_trained_tokenizer_finds_nine_tenths_in_text_and_chat(smollm2_path: str) -> None:
    from transformers import AutoTokenizer

    model = tiny_model("llama", vocab_size=49152, max_position_embeddings=2048)
    engine = engine_for(model, AutoTokenizer.from_pretrained(smollm2_path), force_approx=True, recompute_ratio=0.1)
    lines = (Path(__file__).parents[2] / "LICENSE").read_text().split("\n\n")
    passages = [" ".join(line.split()) for line in lines if len(line) > 200]
    engine.add_documents(passages, progress=False)
    known = sum(len(engine.encode(passage)) for passage in passages)
    for n, (before, behind) in enumerate([('"', '" '), ("", " "), ("- ", "\n"), ("<doc>", "</doc>")]):
        asked = "".join(f"{before}{passage}{behind}" for passage in reversed(passages))
        found = engine.prefill(f"{n}. Read this: {asked} What does it say?").reuse
        assert found.exact_tokens + found.moved_tokens >= 0.95 * known
        chat = engine.chat([{"role": "user", "content": f"{n}. Please read {asked} and say."}], max_new_tokens=1).reuse
        assert chat.exact_tokens + chat.moved_tokens >= 0.95 * known
