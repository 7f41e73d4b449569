"""POST /v1/score and /v1/rerank: how well documents answer a query, judged by the model as it would answer yes or no.

In the shapes of vLLM, Jina and Cohere. Invariant: a document's score does not depend on the others of its request.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from starlette.responses import JSONResponse, Response

from kvboost.hf.sampling import Sampling
from kvboost.serve.api.common import AppCaller, AppService, with_ignored
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.requests import Answer, GenerationRequest
from kvboost.serve.generation.scores import Question, relevances
from kvboost.serve.generation.service import Service
from kvboost.serve.schemas.rank import RankBody, RerankRequest, ScoreRequest
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
    queries, documents = (_listed(body.text_1, body.queries), _listed(body.text_2, body.documents))
    if not queries or not documents:
        raise bad_request("give text_1 and text_2, or queries and documents", param="text_1")
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise bad_request("give one query, or as many as there are documents", param="text_1")
    found, answer = await _judged(service, body, queries, documents, caller, endpoint="score")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found)]
    return with_ignored(JSONResponse({**answer.head("list"), "data": data, "usage": answer.usage()}), body.ignored())


async def rerank(service: AppService, body: RerankRequest, caller: AppCaller) -> Response:
    """The documents, those with the highest scores first."""
    found, answer = await _judged(
        service, body, [body.query] * len(body.documents), body.documents, caller, endpoint="rerank"
    )
    results: list[dict[str, Any]] = []
    for index in sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n or None]:
        text = {"document": {"text": body.documents[index]}} if body.return_documents is not False else {}
        results.append({"index": index, **text, "relevance_score": found[index]})
    head = {"id": answer.id, "model": answer.model, "usage": answer.usage()}
    return with_ignored(JSONResponse({**head, "results": results}), body.ignored())


def _listed(*given: str | list[str] | None) -> list[str]:
    texts = next((one for one in given if one is not None), [])
    return [texts] if isinstance(texts, str) else texts


async def _judged(
    service: Service, body: RankBody, queries: Sequence[str], documents: Sequence[str], caller: Caller, *, endpoint: str
) -> tuple[list[float], Answer]:
    """The score of each pair."""
    service.check_model(body.model)
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, query in enumerate(queries):
        places[query].append(place)

    def asked() -> list[Question]:
        return [_question(service, body, query, [documents[place] for place in at]) for query, at in places.items()]

    questions = await service.tokenizing.run(caller.tenant, asked)
    prompts = [([*question.shared, *tail], ()) for question in questions for tail in question.tails]
    generation = GenerationRequest(endpoint, prompts, caller, 0, Sampling(), model=body.model, prompt_param="documents")
    found = dict[int, float]()
    async with service.generating(generation, prefix=f"{endpoint}-") as answer:
        for question, at in zip(questions, places.values(), strict=True):
            found.update(zip(at, await relevances(service, answer, question), strict=True))
        async for _ in answer.events():
            pass
    return [found[place] for place in range(len(documents))], answer


def _question(service: Service, body: RankBody, query: str, documents: Sequence[str]) -> Question:
    """For worker threads."""
    template = body.template or _own_template(service)
    if not {"query", "document"} <= set(_FIELD.findall(template)):
        raise bad_request("the template has to say where {query} and {document} go", param="template")
    instruction = _INSTRUCTION if body.instruction is None else body.instruction

    def written(document: str) -> str:
        fields = {"instruction": instruction, "query": query, "document": document}
        return _FIELD.sub(lambda field: fields[field[1]], template)

    encode: Callable[..., list[int]] = service.encode
    prompts = [encode(written(document), param="documents") for document in documents]
    empty = encode(written(""), param="query")
    # Without a document as well: what is stored does not depend on what the documents have in common.
    columns = takewhile(lambda column: len(set(column)) == 1, zip(empty, *prompts, strict=False))
    shared = [column[0] for column in columns]
    if not shared:
        raise bad_request("begin the template with a text that all documents share", param="template")
    answers: list[int] = []
    for param, word in (("yes", body.yes), ("no", body.no)):
        whole = encode(written("") + word, param=param)
        if len(whole) == len(empty) or whole[: len(empty)] != empty or whole[len(empty)] in answers:
            raise bad_request(
                f"{param} has no first token of its own behind the template; end the template without a blank, and "
                "give two words that begin differently",
                param=param,
            )
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
