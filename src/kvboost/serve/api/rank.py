"""POST /v1/score and /v1/rerank: how well documents answer a query, judged by the model as it would answer yes or no.

In the shapes of vLLM, Jina and Cohere. Invariant: a document's score does not depend on the others of its request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.hf.sampling import Sampling
from kvboost.serve.api.common import AppCaller, AppService, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.requests import Answer, GenerationRequest
from kvboost.serve.generation.scores import Question, relevances
from kvboost.serve.generation.service import Service
from kvboost.serve.schemas.chat import RankBody, RerankRequest, ScoreRequest
from kvboost.serve.security.auth import Caller

# The words that Qwen3-Reranker was trained on.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_USER = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_FIELD = re.compile(r"\{(instruction|query|document)\}")


async def score(service: AppService, body: ScoreRequest, caller: AppCaller) -> Response:
    """The score of each pair: one query with all documents, or each with its own."""
    queries, documents = _listed(body.text_1, body.queries), _listed(body.text_2, body.documents)
    if not queries or not documents:
        raise bad_request("give text_1 and text_2, or queries and documents", param="text_1")
    if len(queries) not in (1, len(documents)):
        raise bad_request("give one query, or as many as there are documents", param="text_1")
    pairs = [(query, [document]) for query, document in zip(queries, documents, strict=False)]
    asked = pairs if len(queries) > 1 else [(queries[0], documents)]
    found, answer = await _judged(service, body, asked, caller, endpoint="score")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found)]
    return with_ignored(JSONResponse({**answer.head("list"), "data": data, "usage": answer.usage()}), body.ignored())


async def rerank(service: AppService, body: RerankRequest, caller: AppCaller) -> Response:
    """The documents, those with the highest scores first."""
    found, answer = await _judged(service, body, [(body.query, body.documents)], caller, endpoint="rerank")
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n or None]:
        text = {"document": {"text": body.documents[index]}} if body.return_documents is not False else {}
        results.append({"index": index, **text, "relevance_score": found[index]})
    told = {"id": answer.id, "model": answer.model, "results": results, "usage": answer.usage()}
    return with_ignored(JSONResponse(told), body.ignored())


def _listed(*given: str | list[str] | None) -> list[str]:
    texts = next((one for one in given if one is not None), [])
    return [texts] if isinstance(texts, str) else texts


async def _judged(
    service: Service, body: RankBody, asked: Sequence[tuple[str, Sequence[str]]], caller: Caller, *, endpoint: str
) -> tuple[list[float], Answer]:
    """The scores of each query's documents."""
    service.check_model(body.model)

    def encoded() -> list[Question]:
        return [_question(service, body, *one) for one in asked]

    questions = await service.tokenizing.run(caller.tenant, encoded)
    prompts = [([*question.shared, *tail], ()) for question in questions for tail in question.tails]
    generation = GenerationRequest(endpoint, prompts, caller, 0, Sampling(), body.model, prompt_param="documents")
    async with service.generating(generation, prefix=f"{endpoint}-") as answer:
        found = [score for question in questions for score in await relevances(service, answer, question)]
        async for _ in answer.events():
            pass
    return found, answer


def _question(service: Service, body: RankBody, query: str, documents: Sequence[str]) -> Question:
    """For worker threads."""
    template = body.template or _own_template(service)
    if not {"query", "document"} <= set(_FIELD.findall(template)):
        raise bad_request("the template has to say where {query} and {document} go", param="template")

    def written(document: str) -> str:
        fields = {"instruction": body.instruction or _INSTRUCTION, "query": query, "document": document}
        return _FIELD.sub(lambda field: fields[field[1]], template)

    prompts = [service.encode(written(document), param="documents") for document in documents]
    empty = service.encode(written(""), param="query")
    # Without a document as well: what is stored does not depend on what the documents have in common.
    same = takewhile(lambda column: len(set(column)) == 1, zip(empty, *prompts, strict=False))
    shared = [column[0] for column in same]
    if not shared:
        raise bad_request("begin the template with a text that all documents share", param="template")
    answers: list[int] = []
    for param, word in (("yes", body.yes), ("no", body.no)):
        whole = service.encode(written("") + word, param=param)
        if len(whole) == len(empty) or whole[: len(empty)] != empty or whole[len(empty)] in answers:
            why = f"{param} has no first token of its own; end the template without a blank, and give different words"
            raise bad_request(why, param=param)
        answers.append(whole[len(empty)])
    return Question(shared, [prompt[len(shared) :] for prompt in prompts], *answers)


def _own_template(service: Service) -> str:
    """What Qwen3-Reranker is asked, in the chat template of this model."""
    tokenizer = service.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{_SYSTEM}\n\n{_USER}\n\nAnswer:\n"
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    text = service.chats.render(messages, extra={"enable_thinking": False}, param="template")
    # What begins every text is written by the tokenizer.
    begins = tokenizer.bos_token is not None and service.encode("x")[0] == tokenizer.bos_token_id
    return text.removeprefix(tokenizer.bos_token) if begins else text
