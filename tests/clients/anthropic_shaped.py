"""Clients that speak Anthropic's language, and one that speaks both."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from common import FORCED_TOKENS, MAX_TOKENS, MODEL, SCHEMA, Answer, Paint, Said, as_dicts

_TOOL: dict[str, Any] = {"name": "paint", "description": "Paints", "input_schema": SCHEMA}
_GREEDY = {"extra_body": {"temperature": 0}}  # newer versions have no argument for it


def _split(said: list[Said]) -> dict[str, Any]:
    """The system prompt, marked as agents do, and the messages."""
    mark = {"type": "ephemeral"}
    system = [{"type": "text", "text": one.text, "cache_control": mark} for one in said if one.role == "system"]
    return {"system": system, "messages": as_dicts([one for one in said if one.role != "system"])}


class Anthropic:
    """The official client."""

    def __init__(self, url: str, key: str) -> None:
        import anthropic

        self._messages = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0).messages

    def chat(self, said: list[Said]) -> Answer:
        made = self._messages.create(model=MODEL, max_tokens=MAX_TOKENS, **_GREEDY, **_split(said))
        counted = self._messages.count_tokens(model=MODEL, **_split(said)).input_tokens
        usage = made.usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        return Answer(made.content[0].text, usage.cache_read_input_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        with self._messages.stream(model=MODEL, max_tokens=MAX_TOKENS, **_GREEDY, **_split(said)) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert final.usage.cache_read_input_tokens > 0
        assert final.content[0].text == "".join(pieces)
        return pieces

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        asked = {"model": MODEL, "max_tokens": FORCED_TOKENS, "tools": [_TOOL], "tool_choice": {"type": "any"}}
        (whole,) = self._messages.create(**asked, **_split(said)).content
        with self._messages.stream(**asked, **_split(said)) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.type, streamed.name) == (whole.type, whole.name)
        Paint.model_validate(streamed.input)
        return whole.name, whole.input

    def parse(self, said: list[Said]) -> Paint:
        made = self._messages.parse(model=MODEL, max_tokens=FORCED_TOKENS, output_format=Paint, **_split(said))
        return made.parsed_output


class LangChain:
    """langchain-anthropic."""

    def __init__(self, url: str, key: str) -> None:
        from langchain_anthropic import ChatAnthropic

        self._made = lambda tokens: ChatAnthropic(
            model=MODEL, base_url=url, api_key=key, temperature=0, max_tokens=tokens, max_retries=0
        )

    def chat(self, said: list[Said]) -> Answer:
        made = self._made(MAX_TOKENS).invoke(as_dicts(said))
        return Answer(made.text, made.usage_metadata["input_token_details"]["cache_read"])

    def stream(self, said: list[Said]) -> list[str]:
        return [chunk.text for chunk in self._made(MAX_TOKENS).stream(as_dicts(said)) if chunk.text]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        bound = self._made(FORCED_TOKENS).bind_tools([_TOOL], tool_choice="any")
        call = bound.invoke(as_dicts(said)).tool_calls[0]
        return call["name"], call["args"]

    def parse(self, said: list[Said]) -> Paint:
        return self._made(FORCED_TOKENS).with_structured_output(Paint, method="json_schema").invoke(as_dicts(said))


class PydanticAI:
    """pydantic-ai, in either language."""

    def __init__(self, url: str, key: str, *, provider: str) -> None:
        if provider == "openai":
            from pydantic_ai.models.openai import OpenAIChatModel
            from pydantic_ai.providers.openai import OpenAIProvider

            self._model: Any = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url + "/v1", api_key=key))
        else:
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            self._model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=key))

    @staticmethod
    def _messages(said: list[Said]) -> list[Any]:
        from pydantic_ai import messages

        parts = {"system": messages.SystemPromptPart, "user": messages.UserPromptPart}
        return [
            messages.ModelResponse(parts=[messages.TextPart(one.text)])
            if one.role == "assistant"
            else messages.ModelRequest(parts=[parts[one.role](one.text)])
            for one in said
        ]

    def chat(self, said: list[Said]) -> Answer:
        from pydantic_ai.direct import model_request_sync

        made = model_request_sync(
            self._model, self._messages(said), model_settings={"temperature": 0, "max_tokens": MAX_TOKENS}
        )
        return Answer(made.parts[0].content, made.usage.cache_read_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        from pydantic_ai import Agent
        from pydantic_ai.messages import ModelRequest

        *before, last = said
        agent = Agent(self._model, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS})
        history = self._messages(before)
        assert isinstance(history[0], ModelRequest)
        with agent.run_stream_sync(last.text, message_history=history) as run:
            return list(run.stream_text(delta=True, debounce_by=None))

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        from pydantic_ai import ToolDefinition
        from pydantic_ai.direct import model_request_sync
        from pydantic_ai.models import ModelRequestParameters

        tool = ToolDefinition(name="paint", parameters_json_schema=SCHEMA)
        made = model_request_sync(
            self._model,
            self._messages(said),
            model_request_parameters=ModelRequestParameters(function_tools=[tool], allow_text_output=False),
            model_settings={"max_tokens": FORCED_TOKENS},
        )
        return made.parts[0].tool_name, made.parts[0].args_as_dict()

    def parse(self, said: list[Said]) -> Paint:
        from pydantic_ai import Agent

        *before, last = said
        agent = Agent(self._model, output_type=Paint, retries=0, model_settings={"max_tokens": FORCED_TOKENS})
        return agent.run_sync(last.text, message_history=self._messages(before)).output


class Curl:
    """What anybody has."""

    def __init__(self, url: str, key: str) -> None:
        self._command = ["curl", "-sS", "--fail-with-body", "-N", url + "/v1/messages", "-H", f"x-api-key: {key}"]
        self._command += ["-H", "anthropic-version: 2023-06-01", "-H", "Content-Type: application/json", "-d", "@-"]

    def _ask(self, said: list[Said], **fields: Any) -> str:
        body = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, **_split(said), **fields}
        done = subprocess.run(self._command, input=json.dumps(body).encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout.decode()

    def chat(self, said: list[Said]) -> Answer:
        made = json.loads(self._ask(said))
        return Answer(made["content"][0]["text"], made["usage"]["cache_read_input_tokens"])

    def stream(self, said: list[Said]) -> list[str]:
        events = [json.loads(event.partition("data: ")[2]) for event in self._ask(said, stream=True).split("\n\n")[:-1]]
        assert events[-1] == {"type": "message_stop"}
        return [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        made = json.loads(
            self._ask(said, tools=[_TOOL], tool_choice={"type": "tool", "name": "paint"}, max_tokens=FORCED_TOKENS)
        )
        return made["content"][0]["name"], made["content"][0]["input"]

    def parse(self, said: list[Said]) -> Paint:
        format_ = {"type": "json_schema", "schema": SCHEMA}
        made = json.loads(self._ask(said, output_config={"format": format_}, max_tokens=FORCED_TOKENS))
        return Paint.model_validate_json(made["content"][0]["text"])
