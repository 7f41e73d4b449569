"""Scores and ranks as vLLM, Jina and Cohere have them; the values are those of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from kvboost import KVBoost
from kvboost.serve.api.rank import _INSTRUCTION, _SYSTEM
from kvboost.serve.security.limits import Limits
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import word_tokenizer
from tests.serve.conftest import OTHER_KEY, Running

_QUERY = "What keeps keys and values?"
_DOCUMENTS = [
    "A cache keeps keys and values of {query} tokens.",
    "Bread is baked.",
    "",
    "A cache. " * 30,
    "Bread is cut.",
]
_TEMPLATE = "{instruction}\nQ: {query}\nD: {document}\nA:"


def _prompt(query: str, document: str) -> str:
    """As the tokenizer's template has it (tests/helpers/tokenizer.py)."""
    user = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return f"<system>{_SYSTEM}\n<user>{user}\n<assistant>"


def _expected(engine: KVBoost, prompt: str, yes: str = "yes", no: str = "no") -> float:
    ids, words = engine.encode(prompt), [engine.encode(yes)[0], engine.encode(no)[0]]
    with torch.no_grad():
        logits = engine.model(torch.tensor([ids])).logits[0, -1, words].float()
    return float(logits.softmax(dim=-1)[0])


def _ask(server: Running, path: str, **fields: Any) -> Any:
    with server.http() as http:
        answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_documents_come_back_by_their_relevance(keyed: Running) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        told = _ask(keyed, path, model="tiny", query=_QUERY, documents=_DOCUMENTS)
        expected = [_expected(keyed.engine, _prompt(_QUERY, text)) for text in _DOCUMENTS]
        assert told["id"].startswith("rerank-")
        assert told["model"] == "tiny"
        places = [result["index"] for result in told["results"]]
        assert places == sorted(range(len(_DOCUMENTS)), key=lambda place: -expected[place])
        for result in told["results"]:
            assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-4)
            assert result["document"] == {"text": _DOCUMENTS[result["index"]]}
        tokens = sum(len(keyed.engine.encode(_prompt(_QUERY, text))) for text in _DOCUMENTS)
        assert (told["usage"]["prompt_tokens"], told["usage"]["total_tokens"]) == (tokens, tokens)


@pytest.mark.parametrize(("top_n", "count"), [(2, 2), (0, 5), (9, 5), (None, 5)])
def test_only_the_first_are_returned(keyed: Running, top_n: int | None, count: int) -> None:
    asked = {"query": _QUERY, "documents": _DOCUMENTS}
    whole = _ask(keyed, "/v1/rerank", **asked, return_documents=False)["results"]
    assert [set(result) for result in whole] == [{"index", "relevance_score"}] * 5
    assert _ask(keyed, "/v1/rerank", **asked, top_n=top_n, return_documents=False)["results"] == whole[:count]


def test_pairs_are_scored_in_their_order(keyed: Running) -> None:
    one = _ask(keyed, "/v1/score", model="tiny", text_1=_QUERY, text_2=_DOCUMENTS)
    assert (one["object"], one["model"], one["id"][:6]) == ("list", "tiny", "score-")
    assert [(entry["index"], entry["object"]) for entry in one["data"]] == [(at, "score") for at in range(5)]
    scores = [entry["score"] for entry in one["data"]]
    expected = [_expected(keyed.engine, _prompt(_QUERY, text)) for text in _DOCUMENTS]
    assert scores == pytest.approx(expected, abs=1e-4)
    queries = [_QUERY, "Who bakes?", _QUERY, "Who bakes?", "Who cuts?"]
    each = _ask(keyed, "/score", queries=queries, documents=_DOCUMENTS)["data"]
    expected = [_expected(keyed.engine, _prompt(query, text)) for query, text in zip(queries, _DOCUMENTS, strict=True)]
    assert [entry["score"] for entry in each] == pytest.approx(expected, abs=1e-4)
    single = _ask(keyed, "/score", text_1=_QUERY, text_2=_DOCUMENTS[0])["data"]
    assert [entry["score"] for entry in single] == scores[:1]


def test_a_score_has_the_same_bits_warm_and_cold_alone_and_beside_others(
    keyed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(documents: list[str]) -> list[float]:
        return [entry["score"] for entry in _ask(keyed, "/score", text_1=_QUERY, text_2=documents)["data"]]

    for view in keyed.engine.views():
        view.clear()
    cold = scores(_DOCUMENTS)
    assert scores(_DOCUMENTS) == cold
    assert scores(_DOCUMENTS[::-1]) == cold[::-1]
    assert [scores([text])[0] for text in _DOCUMENTS] == cold
    monkeypatch.setattr("kvboost.serve.generation.scores._PIECE", 20)
    assert scores(_DOCUMENTS) == cold


def test_what_the_prompts_share_is_read_once_and_kept(keyed: Running) -> None:
    for view in keyed.engine.views():
        view.clear()
    shared = len(keyed.engine.encode(_prompt(_QUERY, "").partition("\n<assistant>")[0]))
    first = _ask(keyed, "/rerank", query=_QUERY, documents=_DOCUMENTS)["usage"]
    fresh = first["prompt_tokens"] - first["prompt_tokens_details"]["cached_tokens"]
    # Of two pieces the second reads what is less than a chunk again.
    assert fresh <= first["prompt_tokens"] - 4 * (shared - 1) + 64
    chunks = sum(view.cache_stats()["hot_chunks"] for view in keyed.engine.views())
    again = _ask(keyed, "/rerank", query=_QUERY, documents=["Other words."])["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= shared - 64
    assert again["kvboost"]["bitwise"] is True
    assert sum(view.cache_stats()["hot_chunks"] for view in keyed.engine.views()) == chunks, "no document is kept"
    with keyed.http(OTHER_KEY) as http:  # another tenant finds nothing
        other = http.post("/rerank", json={"query": _QUERY, "documents": ["Other words."]}).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_template_instruction_and_answers_are_the_clients(keyed: Running) -> None:
    asked: dict[str, Any] = {"template": _TEMPLATE, "instruction": "Judge {document}.", "yes": "wahr", "no": "falsch"}
    told = _ask(keyed, "/v1/score", text_1=_QUERY, text_2=_DOCUMENTS, **asked)["data"]
    prompts = [f"Judge {{document}}.\nQ: {_QUERY}\nD: {text}\nA:" for text in _DOCUMENTS]
    expected = [_expected(keyed.engine, prompt, "wahr", "falsch") for prompt in prompts]
    assert [entry["score"] for entry in told] == pytest.approx(expected, abs=1e-4)


def test_an_answer_that_merges_with_the_template_is_refused(start_server: Callable[..., Running]) -> None:
    model = tiny_model("llama", vocab_size=400, max_position_embeddings=2048)
    server = start_server(KVBoost(model, word_tokenizer(["Say: yes or no. " * 9], vocab_size=300), chunk_size=32))
    template = "Say: {query} {document} yes or no:"
    asked = {"text_1": _QUERY, "text_2": "Bread.", "yes": " yes", "no": " no"}
    assert server.engine.tokenizer.tokenize(" yes") == ["Ġyes"]
    assert 0 < _ask(server, "/score", **asked, template=template)["data"][0]["score"] < 1
    with server.http() as http:
        answer = http.post("/score", json={**asked, "template": template + " ", "yes": "yes", "no": "no"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "yes")
    assert "without a blank" in answer.json()["error"]["message"]


def test_a_model_without_a_chat_template_is_asked_in_plain_text(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine()
    engine.tokenizer.chat_template = None
    server = start_server(engine)
    told = _ask(server, "/score", text_1=_QUERY, text_2="Bread.")["data"][0]["score"]
    prompt = _prompt(_QUERY, "Bread.").removeprefix("<system>").replace("\n<user>", "\n\n")
    assert told == pytest.approx(_expected(engine, prompt.replace("\n<assistant>", "\n\nAnswer:\n")), abs=1e-4)


def test_it_is_counted_and_limited(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> None:
    server = start_server(make_engine(), limits=Limits(max_requests_per_minute=2, max_prompt_tokens=800))
    told = _ask(server, "/v1/rerank", query=_QUERY, documents=_DOCUMENTS, user="me")
    (record,) = server.service.metrics.recent()
    assert (record["id"], record["endpoint"], record["finish"]) == (told["id"], "rerank", "length")
    assert record["exact"] + record["fresh"] == record["prompt"] == told["usage"]["prompt_tokens"]
    assert server.service.streams.held == 0
    with server.http() as http:
        long = http.post("/score", json={"text_1": _QUERY, "text_2": "word " * 300})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        answers = [
            http.post(path, json={"query": _QUERY, "documents": ["x"], "user": "me"})
            for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
        ]
    assert [answer.status_code for answer in answers] == [429] * 5, "every path is limited"


def test_a_server_that_shuts_down_takes_none(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    server = start_server(make_engine())
    server.service.draining = True
    with server.http() as http:
        assert http.post("/rerank", json={"query": "x", "documents": ["y"]}).status_code == 503


_PAIR: dict[str, Any] = {"text_1": "x", "text_2": "y"}
_RANKED: dict[str, Any] = {"query": "x", "documents": ["y"]}


@pytest.mark.parametrize(
    ("path", "fields", "param", "told"),
    [
        ("/score", {}, "text_1", "give text_1 and text_2"),
        ("/score", {"text_1": "x", "text_2": []}, "text_1", "give text_1 and text_2"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1", "one query"),
        ("/score", {**_PAIR, "text_2": ["y"] * 1025}, "text_2", "takes 1024"),
        ("/score", {**_PAIR, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "not supported"),
        ("/score", {**_PAIR, "template": "{query}"}, "template", "{document}"),
        ("/score", {**_PAIR, "template": "{document}{query}"}, "template", "begin the template"),
        ("/score", {**_PAIR, "yes": "no"}, "no", "different words"),
        ("/score", {**_PAIR, "yes": ""}, "yes", "1 or more characters"),
        ("/rerank", {"query": "x"}, "documents", "required"),
        ("/rerank", {**_RANKED, "documents": []}, "documents", "1 or more entries"),
        ("/rerank", {**_RANKED, "documents": "y"}, "documents", "give a list"),
        ("/rerank", {**_RANKED, "documents": [{"text": "y"}]}, "documents.0", "give a text"),
        ("/rerank", {**_RANKED, "top_n": -1}, "top_n", "0 or more"),
        ("/rerank", {**_RANKED, "documents": ["y" * 3000]}, "documents", "at most 2048"),
    ],
)
def test_what_cannot_be_done_says_so(keyed: Running, path: str, fields: dict[str, Any], param: str, told: str) -> None:
    with keyed.http() as http:
        answer: httpx.Response = http.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found(keyed: Running) -> None:
    with keyed.http() as http:
        assert http.post("/rerank", json={**_RANKED, "model": "other"}).status_code == 404
