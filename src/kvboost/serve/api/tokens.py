"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.api.chat import encode_either
from kvboost.serve.api.dependencies import AppService
from kvboost.serve.errors import bad_request
from kvboost.serve.schemas.tokens import DetokenizeRequest, TokenizeRequest
from kvboost.serve.security.auth import caller_of


async def tokenize(service: AppService, body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or of a chat, as a generation would use them."""
    service.check_model(body.model)
    tokens, _ = await encode_either(service, body, caller_of(request))
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_positions})


async def detokenize(service: AppService, body: DetokenizeRequest) -> Response:
    """The text of token ids, with special tokens written out; of several lists of them, the text of each."""
    service.check_model(body.model)
    several = [run for run in body.tokens if isinstance(run, list)]
    runs = several or [[token for token in body.tokens if isinstance(token, int)]]
    if any(token >= service.vocab_size for run in runs for token in run):
        raise bad_request(f"this model has {service.vocab_size} tokens", param="tokens")
    texts = await asyncio.to_thread(lambda: [service.chats.decode(run, special=True) for run in runs])
    return JSONResponse({"prompt": texts if several else texts[0]})
