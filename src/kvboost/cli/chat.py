"""``kvboost run`` and ``kvboost chat``: ask a model, and see what its cache did.

Called by :mod:`kvboost.cli.main`. Invariant: the answer is all that goes to the output of ``run``; what was reused goes
to the error output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost.cli.conversation import Conversation
from kvboost.cli.warm import Model
from kvboost.cli.settings import Settings, with_settings
from kvboost.cli.output import note, reuse_line
from kvboost.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.types import GenerationResult

_MaxNewTokens = Annotated[int, typer.Option(min=1, help="Stop after so many new tokens.")]
_Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")]
_System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before everything else.")]
_GOODBYES = ("/exit", "/quit", "/bye")


@with_settings()
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question; - reads it from the input.")],
    *,
    max_new_tokens: _MaxNewTokens = 256,
    temperature: _Temperature = 0.0,
    system: _System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands: no chat template.")] = False,
    settings: Settings,
) -> None:
    """Answer one prompt: the answer streams to the output, what was reused is said on the error output.

    With --cache-dir a second run finds what the first one read.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw and system is not None:
        raise ConfigError("--raw has no system message; put it before the prompt, or leave --raw out")
    engine = _loaded(model, settings)
    with engine:
        templated = not raw and getattr(engine.tokenizer, "chat_template", None) is not None
        if system is not None and not templated:
            raise ConfigError("this model has no chat template, so no system message; put it before the prompt")
        if templated:
            chat = Conversation(engine.tokenizer, system=system)
            ids, boundaries = chat.ask(text), chat.boundaries
        else:
            ids, boundaries = engine.encode(text), []
        result = _answer(engine, ids, boundaries, max_new_tokens=max_new_tokens, temperature=temperature)
        print()
        note(reuse_line(result))
        engine.flush()


@with_settings()
def chat(
    model: Model,
    *,
    max_new_tokens: _MaxNewTokens = 512,
    temperature: _Temperature = 0.0,
    system: _System = None,
    settings: Settings,
) -> None:
    """Talk with a model; after each answer see how much of the chat did not have to be read again.

    An interruption (Ctrl-C) stops an answer; /exit or the end of the input ends the chat.
    """
    engine = _loaded(model, settings)
    with engine:
        conversation = Conversation(engine.tokenizer, system=system)
        while (question := _question()) is not None:
            if not question:
                continue
            ids = conversation.ask(question)
            try:
                result = _answer(
                    engine, ids, conversation.boundaries, max_new_tokens=max_new_tokens, temperature=temperature
                )
            except CapacityError as error:
                conversation.withdraw()
                note(f"[{error}; start a new chat, or ask something shorter]")
                continue
            except KeyboardInterrupt:
                conversation.withdraw()
                note("[stopped; the question is taken back]")
                continue
            conversation.answered(result.token_ids)
            print()
            note(reuse_line(result))
        engine.flush()


def _question() -> str | None:
    """The next line of the person's; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in _GOODBYES else line


def _loaded(model: str, settings: Settings) -> KVBoost:
    from kvboost.engine import KVBoost

    note(f"loading {model}")
    return KVBoost.from_pretrained(model, **settings.engine())


def _answer(
    engine: KVBoost, ids: Sequence[int], boundaries: Sequence[int], *, max_new_tokens: int, temperature: float
) -> GenerationResult:
    """Stream the answer to the output. An interruption ends it early."""
    result: GenerationResult | None = None
    stream = engine.stream(ids, boundaries=boundaries, max_new_tokens=max_new_tokens, temperature=temperature)
    try:
        for piece in stream:
            print(piece.text, end="", flush=True)
            result = piece.result
    finally:
        stream.close()
    assert result is not None  # the last piece has it
    return result
