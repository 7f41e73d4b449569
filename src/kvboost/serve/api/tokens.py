"""POST /tokenize, /detokenize and /v1/arrange: prompts, before anything is computed.

Invariant: token ids are those that a generation of the same prompt would use.
"""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import JSONResponse, Response

from kvboost.engine.tenants import ArrangedPrompt
from kvboost.errors import CapacityError, ConfigError
from kvboost.serve.api.chat import encode_messages
from kvboost.serve.api.common import AppCaller, AppService
from kvboost.serve.errors import bad_request
from kvboost.serve.generation.service import Service
from kvboost.serve.schemas.chat import ArrangeRequest, DetokenizeRequest, TokenizeRequest, WarmRequest
from kvboost.serve.security.auth import Caller


async def tokenize(service: AppService, body: TokenizeRequest, caller: AppCaller) -> Response:
    """The token ids of a text or of a chat, as a generation would use them."""
    service.check_model(body.model)
    tokens, _ = await encode_either(service, body, caller)
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_positions})


async def detokenize(service: AppService, body: DetokenizeRequest, caller: AppCaller) -> Response:
    """The text of token ids, with special tokens written out; of several lists of them, the text of each."""
    service.check_model(body.model)
    several = [run for run in body.tokens if isinstance(run, list)]
    runs = several or [[token for token in body.tokens if isinstance(token, int)]]
    if any(token >= service.vocab_size for run in runs for token in run):
        raise bad_request(f"this model has {service.vocab_size} tokens", param="tokens")

    def decoded() -> list[str]:
        return [service.chats.decode(run, special=True) for run in runs]

    texts = await service.tokenizing.run(caller.tenant, decoded)
    return JSONResponse({"prompt": texts if several else texts[0]})


async def arrange(service: AppService, body: ArrangeRequest, caller: AppCaller) -> Response:
    """The texts of a prompt in an order that begins as one arranged before for this key."""
    service.check_model(body.model)
    fields = body.model_dump(exclude={"model"})
    if body.ranks is not None and body.ranks.count("{}") != 1:
        raise bad_request("put {} where the ranks go, once", param="ranks")

    def ordered() -> ArrangedPrompt:
        for text in body.documents:
            service.lengths.check_text(text, param="documents", in_use=service.chats.in_use())
        with service.chats.in_use():
            return service.engine.for_tenant(caller.tenant).arrange(**fields)

    try:
        found = await service.tokenizing.run(caller.tenant, ordered)
    except CapacityError as error:
        raise bad_request(str(error), param="documents", code="context_length_exceeded") from error
    except ConfigError as error:
        raise bad_request(str(error), param="documents") from error
    return JSONResponse({"object": "kvboost.arranged", **asdict(found)})


async def encode_either(
    service: Service, body: TokenizeRequest | WarmRequest, caller: Caller
) -> tuple[list[int], list[int]]:
    """Token ids and boundaries of a body that has a prompt or messages."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        chat = await service.tokenizing.run(caller.tenant, encode_messages, service, body.messages, caller, None)
        return chat.token_ids, chat.boundaries
    return await service.tokenizing.run(caller.tenant, service.encode, body.prompt or ""), []
