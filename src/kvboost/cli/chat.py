"""``kvboost run`` and ``kvboost chat``: ask a model, and see what its cache did.

Called by :mod:`kvboost.cli.main`. Invariant: the answer is all that goes to the output of ``run``; what was reused goes
to the error output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.conversation import Conversation
from kvboost.cli.flags import Model, with_settings
from kvboost.cli.output import note, reuse_line
from kvboost.cli.settings import ReplyConfig, Settings
from kvboost.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.types import GenerationResult

_GOODBYES = ("/exit", "/quit", "/bye")


@with_settings("chat")
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question; - reads it from the input.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    settings: Settings,
) -> None:
    """Answer one prompt: the answer streams to the output, what was reused goes to the error output.

    With --disk-cache-dir a second run finds the KV of the first one.
    """
    text, reply = sys.stdin.read() if prompt == "-" else prompt, settings.of(ReplyConfig)
    if raw and reply.system is not None:
        raise ConfigError("--raw has no system message; put it before the prompt, or leave --raw out")
    with _loaded(model, settings) as engine:
        templated = not raw and getattr(engine.tokenizer, "chat_template", None) is not None
        if reply.system is not None and not templated:
            raise ConfigError("this model has no chat template, so no system message; put it before the prompt")
        if templated:
            chat = Conversation(engine.tokenizer, system=reply.system)
            ids, boundaries = chat.ask(text), chat.boundaries
        else:
            ids, boundaries = engine.encode(text), []
        result = _answer(engine, ids, boundaries, reply)
        print()
        note(reuse_line(result))
        engine.flush()


@with_settings("chat")
def chat(model: Model, *, settings: Settings) -> None:
    """Talk with a model; after each answer see how much of the chat needed no prefill.

    An interruption (Ctrl-C) stops an answer; /exit or the end of the input ends the chat.
    """
    reply = settings.of(ReplyConfig)
    with _loaded(model, settings) as engine:
        conversation = Conversation(engine.tokenizer, system=reply.system)
        while (question := _question()) is not None:
            if not question:
                continue
            ids = conversation.ask(question)
            try:
                result = _answer(engine, ids, conversation.boundaries, reply)
            except CapacityError as error:
                conversation.withdraw()
                note(f"[{error}; start a new chat, or ask something shorter]")
                continue
            except KeyboardInterrupt:
                conversation.withdraw()
                note("[stopped; the question is withdrawn]")
                continue
            conversation.answered(result.token_ids)
            print()
            note(reuse_line(result))
        engine.flush()


def _question() -> str | None:
    """The next line of input; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in _GOODBYES else line


def _loaded(model: str, settings: Settings) -> KVBoost:
    note(f"loading {model}")  # before torch is imported, which may take seconds
    from kvboost.engine import KVBoost

    return KVBoost.from_pretrained(model, **settings.engine())


def _answer(engine: KVBoost, ids: Sequence[int], boundaries: Sequence[int], reply: ReplyConfig) -> GenerationResult:
    """Stream the answer to the output. An interruption ends it early."""
    result: GenerationResult | None = None
    options: dict[str, Any] = {"max_new_tokens": reply.max_new_tokens, "temperature": reply.temperature}
    with closing(engine.stream(ids, boundaries=boundaries, **options)) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
            result = piece.result
    assert result is not None  # the last piece has it
    return result
