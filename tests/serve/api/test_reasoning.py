"""Reasoning and variables of the chat template, over HTTP with a recorded answer: a random model does not reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from kvboost import KVBoost
from tests.helpers.runner import Recorded
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import Running

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "<assistant>{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{{ mood }}"
)
_ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Is it so?"}]}


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    engine = make_engine()
    engine.tokenizer = byte_tokenizer()
    engine.tokenizer.chat_template = _TEMPLATE
    return start_server(engine, runner=Recorded(engine.tokenizer, "Let me see.\n</think>\n\nIt is so."))


@pytest.fixture
def client(running: Running) -> Any:
    with running.openai("no key is needed") as made:
        yield made


def _prompt(running: Running) -> str:
    return str(running.engine.tokenizer.decode(list(running.runner.jobs[-1].token_ids)))


def test_reasoning_is_told_from_the_answer_and_taken_back(client: openai.OpenAI, running: Running) -> None:
    message = client.chat.completions.create(**_ASKED).choices[0].message
    assert message.content == "It is so."
    assert message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**_ASKED, stream=True)]
    told = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
    assert "".join(told) == "Let me see."
    assert "".join(delta.content or "" for delta in chunks) == "It is so."
    assert sum(1 for text in told if text) > 1, "as it comes"
    again: Any = [*_ASKED["messages"], message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    client.chat.completions.create(model="tiny", messages=again)
    assert "<assistant><think>Let me see.</think>It is so.\n<user>Sure?" in _prompt(running)


def test_ids_of_reasoning_and_answer_are_remembered(client: openai.OpenAI, running: Running) -> None:
    client.chat.completions.create(**_ASKED)
    replies = running.service.chats.replies
    for text in ("Let me see.", "It is so."):
        found = replies.find(tenant="", cache_key="", before="", reply=text)
        assert running.engine.tokenizer.decode(found) == text


def test_variables_reach_the_template(client: openai.OpenAI, running: Running) -> None:
    kwargs = {"enable_thinking": False, "mood": "Gladly: "}
    answer = client.chat.completions.with_raw_response.create(**_ASKED, extra_body={"chat_template_kwargs": kwargs})
    assert _prompt(running).endswith("<assistant>Gladly: ")
    assert "x-kvboost-ignored" not in answer.headers
    message = answer.parse().choices[0].message
    assert message.content == "Let me see.\n</think>\n\nIt is so.", "the prompt did not open it, nor did the answer"


def test_no_effort_is_no_reasoning(client: openai.OpenAI, running: Running) -> None:
    answer = client.chat.completions.with_raw_response.create(**_ASKED, reasoning_effort="none")
    assert _prompt(running).endswith("<assistant>")
    assert "x-kvboost-ignored" not in answer.headers


def test_what_the_template_does_not_read_is_named(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        **_ASKED, reasoning_effort="high", extra_body={"chat_template_kwargs": {"colour": "red", "mood": ""}}
    )
    assert answer.headers["x-kvboost-ignored"] == "reasoning_effort, chat_template_kwargs.colour"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 1 }}"},
        {"messages": []},
        {"tokenize": True},
        {"add_generation_prompt": False},
        {"a, b": 1},
        {"x\r\ny": 1},
        {"deep": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]},
        {"large": "x" * 70_000},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_variables_that_are_none_are_refused(client: openai.OpenAI, kwargs: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs") as refused:
        client.chat.completions.create(**_ASKED, extra_body={"chat_template_kwargs": kwargs})
    assert refused.value.param == "chat_template_kwargs"
