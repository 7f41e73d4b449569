"""The clients that people use, each doing what people do with it. Run by ``tests/clients/run.py``, with a Python that
has the clients and not KVBoost."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial

import anthropic_shaped
import openai_shaped
import pytest
from common import Client, Paint, Said

CLIENTS: dict[str, Callable[..., Client]] = {
    "openai": openai_shaped.OpenAI,
    "openai-responses": openai_shaped.OpenAIResponses,
    "langchain-openai": openai_shaped.LangChain,
    "langchain-openai-responses": partial(openai_shaped.LangChain, use_responses_api=True),
    "llama-index": openai_shaped.LlamaIndex,
    "litellm-openai": openai_shaped.LiteLLM,
    "litellm-anthropic": partial(openai_shaped.LiteLLM, provider="anthropic"),
    "instructor": openai_shaped.Instructor,
    "pydantic-ai-openai": partial(anthropic_shaped.PydanticAI, provider="openai"),
    "pydantic-ai-anthropic": partial(anthropic_shaped.PydanticAI, provider="anthropic"),
    "anthropic": anthropic_shaped.Anthropic,
    "langchain-anthropic": anthropic_shaped.LangChain,
    "curl": openai_shaped.Curl,
    "curl-anthropic": anthropic_shaped.Curl,
}


@cache
def _client(name: str) -> Client:
    return CLIENTS[name](os.environ["KVBOOST_URL"], os.environ["KVBOOST_KEY"])


def _said(name: str) -> list[Said]:
    """A conversation of its own for each client, so that what is cached is what this client sent."""
    system = f"You serve {name}. " + "You are terse, and you never repeat yourself. " * 4
    return [Said("system", system), Said("user", "Tell me about caches in one sentence.")]


@pytest.mark.parametrize("name", CLIENTS)
def test_chat_and_stream_say_the_same(name: str) -> None:
    said = _said(name + " (stream)")
    whole = _client(name).chat(said).text
    pieces = _client(name).stream(said)
    assert whole
    assert "".join(pieces) == whole
    assert len(pieces) > 1 or name == "instructor", "it came in pieces"


@pytest.mark.parametrize("name", CLIENTS)
def test_tools(name: str) -> None:
    called, arguments = _client(name).call(_said(name))
    assert called == "paint"
    Paint.model_validate(arguments)


@pytest.mark.parametrize("name", CLIENTS)
def test_structured_output(name: str) -> None:
    assert isinstance(_client(name).parse(_said(name)), Paint)


@pytest.mark.parametrize("name", CLIENTS)
def test_of_two_turns_the_second_is_read_from_the_cache(name: str) -> None:
    said = _said(name + " (turns)")
    first = _client(name).chat(said)
    second = _client(name).chat([*said, Said("assistant", first.text), Said("user", "Go on.")])
    assert first.cached is not None
    assert second.cached is not None
    assert second.cached > first.cached
    assert second.cached > len(said[0].text)
