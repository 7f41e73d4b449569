"""Generates after any number of prompts: a window of them at a time, sorted so that equal beginnings meet.

Used by :class:`kvboost.KVBoost` for ``map``. Invariants: results come in the order of the prompts; no more than one
window of prompts and results is held; a prompt that cannot be used is named before anything of its window is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.engine.parts import EngineParts
from kvboost.engine.single import Request
from kvboost.errors import ConfigError, KVBoostError
from kvboost.hf.adapters import AdapterName
from kvboost.hf.prompt import Messages, Prompt
from kvboost.types import GenerationResult

Item = Prompt | Messages | tuple[Prompt | Messages, Mapping[str, Any]]
"""A prompt or a chat; or one of them with arguments of its own."""
Run = Callable[[list[Request], Callable[[], Any]], list[GenerationResult]]
"""Generates after a window of requests; calls back after each."""


def requests_of(
    parts: EngineParts, items: Iterable[Item], *, options: dict[str, Any], adapter: AdapterName
) -> Iterator[Request]:
    """The request of each item. Its own arguments come before ``options``."""
    for number, item in enumerate(items):
        prompt: Any = item
        own: Mapping[str, Any] = {}
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Mapping):
            prompt, own = item
        try:
            ends: list[int] = []
            if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
                _check_messages(prompt)
                min_gap = parts.chunker.min_tokens
                tokens, ends = parts.encoder.encode_chat(prompt, min_gap=min_gap, template_kwargs={})
            else:
                tokens = parts.encoder.encode(prompt)
            given = {**options, **own}
            schema = given.pop("schema", None)
            if (allowed := given.get("prefix_allowed_tokens_fn")) is not None:
                given["prefix_allowed_tokens_fn"] = partial(_of_prompt, allowed, number)
            if schema is not None:
                if allowed is not None:
                    raise ConfigError("schema and prefix_allowed_tokens_fn both say what may come next; give one")
                given["prefix_allowed_tokens_fn"] = parts.matchers.allowed_after(len(tokens), schema)
                own_ends = given.get("eos_token_id") or ()
                ends_with = {*parts.matchers.end_token_ids, *([own_ends] if isinstance(own_ends, int) else own_ends)}
                given["eos_token_id"] = sorted(ends_with) or None
            yield parts.generator.request(tokens, given, boundaries=ends, adapter=adapter)
        except KVBoostError as error:
            raise type(error)(f"prompt {number}: {error}") from error


def _check_messages(messages: Messages) -> None:
    """Refuse what a template fails on in its own words, or writes as nothing."""
    for number, message in enumerate(messages):
        if "role" not in message or (message.get("content") is None and not message.get("tool_calls")):
            raise ConfigError(f'message {number} lacks a role or content; give {{"role": "user", "content": "Hi"}}')


def map_requests(
    requests: Iterable[Request], run: Run, *, window: int, total: int | None, progress: bool
) -> Iterator[GenerationResult]:
    """A result for each of ``requests``, of which ``total`` are expected."""
    waiting = iter(requests)
    with tqdm(total=total, unit="prompt", desc="generating", disable=not progress, delay=2) as bar:
        while chosen := list(islice(waiting, window)):
            # What two prompts share is read once if they run together or one after the other.
            order = sorted(range(len(chosen)), key=lambda place: chosen[place].tokens)
            found = dict(zip(order, run([chosen[place] for place in order], bar.update), strict=True))
            chosen.clear()
            for place in range(len(found)):
                yield found.pop(place)


def _of_prompt(allowed: Callable[[int, Any], Any], number: int, _: int, ids: Any) -> Any:
    """Transformers gives such a function the number of a prompt in its batch."""
    return allowed(number, ids)
