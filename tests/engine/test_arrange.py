"""``engine.arrange``: what it returns is what the engine then reuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

HEAD = "Answer from the passages, briefly, and name the passage.\n\n"
DOCUMENTS = [
    f"Passage {name}. " + f"It tells of {name} and nothing else. " * 3 + "\n\n" for name in ("owls", "ants", "elks")
]
QUESTION = "What is said?\n"


@pytest.fixture
def engine() -> KVBoost:
    return KVBoost(tiny_model("llama", vocab_size=260, max_position_embeddings=2048), byte_tokenizer(), chunk_size=32)


def ask(engine: KVBoost, documents: list[str], **options: Any) -> tuple[Any, int]:
    arranged = engine.arrange(head=HEAD, documents=documents, question=QUESTION, **options)
    tokens, boundaries = engine.join(arranged.parts)
    result = engine.generate(tokens, boundaries=boundaries, max_new_tokens=1, temperature=0)
    return arranged, result.reuse.exact_tokens


def test_documents_in_another_order_are_reused_exactly(engine: KVBoost) -> None:
    owls, ants, elks = DOCUMENTS
    first, _ = ask(engine, [owls, ants, elks], volatile="Now: 10:31:07.\n")
    assert first.order == (0, 1, 2)
    assert first.parts == (HEAD, owls, ants, elks, "Now: 10:31:07.\n", QUESTION)
    second, exact = ask(engine, [ants, elks, owls], volatile="Now: 10:32:55.\n")
    assert second.order == (2, 0, 1)
    assert second.served_documents == 3
    assert second.served_tokens == len("".join(DOCUMENTS).encode())
    # The end of the earlier prompt's documents is a boundary, so all of them come from the cache.
    assert exact >= len(HEAD.encode()) + second.served_tokens


def test_a_chat_takes_the_same_parts(engine: KVBoost) -> None:
    def chat(documents: list[str]) -> int:
        arranged = engine.arrange(head=HEAD, documents=documents, question=QUESTION)
        head, *rest = arranged.parts
        messages = [{"role": "system", "content": head}, {"role": "user", "content": "".join(map(str, rest))}]
        return engine.chat(messages, max_new_tokens=1, temperature=0).reuse.exact_tokens

    chat(DOCUMENTS)
    assert chat(DOCUMENTS[::-1]) > 0.9 * len((HEAD + "".join(DOCUMENTS)).encode())


def test_pinned_documents_stay_and_ranks_are_told_behind_the_passages(engine: KVBoost) -> None:
    owls, ants, elks = DOCUMENTS
    ask(engine, [owls, ants, elks])
    arranged, _ = ask(engine, [elks, ants, owls], keep=(1, 0), ranks="Most relevant first: {}.\n")
    assert arranged.parts == (HEAD, elks, ants, owls, "Most relevant first: 1, 2, 3.\n", QUESTION)
    engine.clear()
    ask(engine, [owls, ants, elks])
    arranged, _ = ask(engine, [ants, elks, owls], ranks="Most relevant first: {}.\n")
    assert arranged.order == (2, 0, 1)
    assert arranged.parts == (HEAD, owls, ants, elks, "Most relevant first: 2, 3, 1.\n", QUESTION)
    nothing = engine.arrange(head=HEAD, documents=[], question=QUESTION, ranks="Most relevant first: {}.\n")
    assert nothing.parts == (HEAD, QUESTION)


def test_token_ids_are_documents_too(engine: KVBoost) -> None:
    one, two = ([10 + n for n in range(40)], [90 + n for n in range(40)])
    engine.arrange(documents=[one, two])
    again = engine.arrange(documents=[two, one])
    assert again.parts == (one, two)
    assert again.served_tokens == 80


def test_tenants_learn_nothing_of_each_other_and_clear_forgets(engine: KVBoost) -> None:
    other = engine.for_tenant("other")
    engine.arrange(head=HEAD, documents=DOCUMENTS)
    assert other.arrange(head=HEAD, documents=DOCUMENTS[::-1]).order == (0, 1, 2)
    engine.clear()
    assert engine.arrange(head=HEAD, documents=DOCUMENTS[::-1]).order == (0, 1, 2)
    assert other.arrange(head=HEAD, documents=DOCUMENTS).served_documents == 3


def test_mistakes_say_what_to_do(engine: KVBoost) -> None:
    with pytest.raises(ConfigError, match=r"give \[text\]"):
        engine.arrange(documents="one text")
    with pytest.raises(ConfigError, match="no negative"):
        engine.arrange(documents=DOCUMENTS, keep=(-1, 0))
    with pytest.raises(ConfigError, match="put {} there"):
        engine.arrange(documents=DOCUMENTS, ranks="by relevance")
