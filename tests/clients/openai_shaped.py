"""Clients that speak OpenAI's language."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from common import FORCED_TOKENS, MAX_TOKENS, MODEL, SCHEMA, Answer, Paint, Said, as_dicts

_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}


class OpenAI:
    """The official client, chats."""

    def __init__(self, url: str, key: str) -> None:
        import openai

        self._chats = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0).chat.completions

    def chat(self, said: list[Said]) -> Answer:
        made = self._chats.create(model=MODEL, messages=as_dicts(said), temperature=0, max_tokens=MAX_TOKENS)
        return Answer(made.choices[0].message.content or "", made.usage.prompt_tokens_details.cached_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        chunks = self._chats.create(
            model=MODEL, messages=as_dicts(said), temperature=0, max_tokens=MAX_TOKENS, stream=True
        )
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        made = self._chats.create(
            model=MODEL, messages=as_dicts(said), tools=[_TOOL], tool_choice="required", max_tokens=FORCED_TOKENS
        )
        function = made.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def parse(self, said: list[Said]) -> Paint:
        made = self._chats.parse(model=MODEL, messages=as_dicts(said), response_format=Paint, max_tokens=FORCED_TOKENS)
        return made.choices[0].message.parsed


class OpenAIResponses:
    """The official client, responses."""

    def __init__(self, url: str, key: str) -> None:
        import openai

        self._responses = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0).responses

    def chat(self, said: list[Said]) -> Answer:
        made = self._responses.create(model=MODEL, input=as_dicts(said), temperature=0, max_output_tokens=MAX_TOKENS)
        return Answer(made.output_text, made.usage.input_tokens_details.cached_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        with self._responses.stream(
            model=MODEL, input=as_dicts(said), temperature=0, max_output_tokens=MAX_TOKENS
        ) as events:
            return [event.delta for event in events if event.type == "response.output_text.delta"]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        tool = {"type": "function", "strict": True, **_TOOL["function"]}
        made = self._responses.create(model=MODEL, input=as_dicts(said), tools=[tool], tool_choice="required")
        (item,) = made.output
        return item.name, json.loads(item.arguments)

    def parse(self, said: list[Said]) -> Paint:
        return self._responses.parse(model=MODEL, input=as_dicts(said), text_format=Paint).output_parsed


class LangChain:
    """langchain-openai."""

    def __init__(self, url: str, key: str, **settings: Any) -> None:
        from langchain_openai import ChatOpenAI

        self._made = lambda tokens: ChatOpenAI(
            model=MODEL, base_url=url + "/v1", api_key=key, temperature=0, max_tokens=tokens, max_retries=0, **settings
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


class LlamaIndex:
    """llama-index-llms-openai-like."""

    def __init__(self, url: str, key: str) -> None:
        from llama_index.llms.openai_like import OpenAILike

        self._made = lambda tokens: OpenAILike(
            model=MODEL,
            api_base=url + "/v1",
            api_key=key,
            temperature=0,
            max_tokens=tokens,
            max_retries=0,
            context_window=8192,
            is_chat_model=True,
            is_function_calling_model=True,
        )

    @staticmethod
    def _messages(said: list[Said]) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role=one.role, content=one.text) for one in said]

    def chat(self, said: list[Said]) -> Answer:
        made = self._made(MAX_TOKENS).chat(self._messages(said))
        return Answer(made.message.content or "", made.raw.usage.prompt_tokens_details.cached_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        return [chunk.delta for chunk in self._made(MAX_TOKENS).stream_chat(self._messages(said)) if chunk.delta]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        from llama_index.core.program.function_program import get_function_tool

        llm, tool = self._made(FORCED_TOKENS), get_function_tool(Paint)
        made = llm.chat_with_tools([tool], chat_history=self._messages(said), tool_required=True)
        (call,) = llm.get_tool_calls_from_response(made)
        return call.tool_name.lower(), call.tool_kwargs

    def parse(self, said: list[Said]) -> Paint:
        return self._made(FORCED_TOKENS).as_structured_llm(Paint).chat(self._messages(said)).raw


class LiteLLM:
    """litellm, to either language."""

    def __init__(self, url: str, key: str, *, provider: str = "openai") -> None:
        base = url + "/v1" if provider == "openai" else url
        self._settings = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": key, "max_retries": 0}

    def _ask(self, said: list[Said], *, tokens: int, **arguments: Any) -> Any:
        import litellm

        return litellm.completion(**self._settings, messages=as_dicts(said), max_tokens=tokens, **arguments)

    def chat(self, said: list[Said]) -> Answer:
        made = self._ask(said, tokens=MAX_TOKENS, temperature=0)
        return Answer(made.choices[0].message.content or "", made.usage.prompt_tokens_details.cached_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        chunks = self._ask(said, tokens=MAX_TOKENS, temperature=0, stream=True)
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        made = self._ask(said, tokens=FORCED_TOKENS, tools=[_TOOL], tool_choice="required")
        function = made.choices[0].message.tool_calls[0].function
        return function.name, json.loads(function.arguments)

    def parse(self, said: list[Said]) -> Paint:
        made = self._ask(said, tokens=FORCED_TOKENS, response_format=Paint)
        return Paint.model_validate_json(made.choices[0].message.content)


class Instructor:
    """instructor, over the official client."""

    def __init__(self, url: str, key: str) -> None:
        import instructor
        import openai

        self._settings = {"model": MODEL, "max_retries": 0, "max_tokens": FORCED_TOKENS, "temperature": 0}
        self._made = lambda mode: instructor.from_openai(
            openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0), mode=mode
        )

    def _ask(self, said: list[Said], mode: Any) -> tuple[Paint, Any]:
        return self._made(mode).create_with_completion(messages=as_dicts(said), response_model=Paint, **self._settings)

    def chat(self, said: list[Said]) -> Answer:
        from instructor import Mode

        made, completion = self._ask(said, Mode.TOOLS)
        return Answer(made.model_dump_json(), completion.usage.prompt_tokens_details.cached_tokens)

    def stream(self, said: list[Said]) -> list[str]:
        from instructor import Mode

        pieces = self._made(Mode.TOOLS).create_partial(messages=as_dicts(said), response_model=Paint, **self._settings)
        return [piece.model_dump_json() for piece in pieces][-1:]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        from instructor import Mode

        made, completion = self._ask(said, Mode.TOOLS)
        return completion.choices[0].message.tool_calls[0].function.name.lower(), made.model_dump()

    def parse(self, said: list[Said]) -> Paint:
        from instructor import Mode

        return self._ask(said, Mode.JSON_SCHEMA)[0]


class Curl:
    """What anybody has."""

    def __init__(self, url: str, key: str) -> None:
        self._command = ["curl", "-sS", "--fail-with-body", "-N", url + "/v1/chat/completions"]
        self._command += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json", "-d", "@-"]

    def _ask(self, said: list[Said], **fields: Any) -> str:
        body = {"model": MODEL, "messages": as_dicts(said), "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
        done = subprocess.run(self._command, input=json.dumps(body).encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout.decode()

    def chat(self, said: list[Said]) -> Answer:
        made = json.loads(self._ask(said))
        return Answer(made["choices"][0]["message"]["content"], made["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stream(self, said: list[Said]) -> list[str]:
        lines = [line.removeprefix("data: ") for line in self._ask(said, stream=True).split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        return [delta["content"] for delta in deltas if delta.get("content")]

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        made = json.loads(self._ask(said, tools=[_TOOL], tool_choice="required", max_tokens=FORCED_TOKENS))
        function = made["choices"][0]["message"]["tool_calls"][0]["function"]
        return function["name"], json.loads(function["arguments"])

    def parse(self, said: list[Said]) -> Paint:
        wanted = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
        made = json.loads(self._ask(said, response_format=wanted, max_tokens=FORCED_TOKENS))
        return Paint.model_validate_json(made["choices"][0]["message"]["content"])
