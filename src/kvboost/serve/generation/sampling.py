"""How tokens are drawn and when an answer ends, from the fields of the two older endpoints."""

from __future__ import annotations

from collections.abc import Mapping

from kvboost.scheduler.jobs import Sampling
from kvboost.serve.errors import bad_request
from kvboost.serve.schemas.chat import Choices
from kvboost.serve.security.limits import Limits


def sampling_of(
    body: Choices, *, limits: Limits, vocab_size: int, max_new_tokens: int | None
) -> tuple[Sampling, list[str]]:
    """How to draw tokens, and the stop strings. The defaults are OpenAI's."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if any(not stop or len(stop) > limits.max_stop_characters for stop in stops):
        raise bad_request(f"a stop string has 1 to {limits.max_stop_characters} characters", param="stop")
    bias: Mapping[int, float] = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for param, tokens in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
        if any(token >= vocab_size for token in tokens):
            raise bad_request(f"{param} names tokens beyond this model's {vocab_size}", param=param)
    if (body.n or 1) > limits.max_choices:
        raise bad_request(f"this server makes at most {limits.max_choices} choices", param="n")
    _check_least(body, max_new_tokens)
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=bias,
        min_new_tokens=body.min_tokens or 0,
    )
    return sampling, stops


def _check_least(body: Choices, max_new_tokens: int | None) -> None:
    """Refuse a least length that cannot be reached."""
    if not body.min_tokens:
        return
    if max_new_tokens is not None and body.min_tokens > max_new_tokens:
        raise bad_request("min_tokens is more than the answer may have", param="min_tokens")
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request("min_tokens and a JSON format do not go together", param="min_tokens")
