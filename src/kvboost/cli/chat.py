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

from kvboost.cli.flags import Model, with_settings
from kvboost.cli.output import note
from kvboost.cli.settings import ReplyConfig, Settings
from kvboost.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.types import GenerationResult

_GOODBYES = ("/exit", "/quit", "/bye")


class Conversation:
    """The messages of one chat, and the token ids it has seen, so that every turn finds the ones before it.

    Text that was generated does not always tokenise to the ids it was generated as; a chat that is rendered and
    tokenised anew each turn would miss from the first difference on. Invariant: the prompt is the template's text,
    with the ids of earlier turns where the template leaves those turns as they were.
    """

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        """Raises ConfigError if the tokenizer has no chat template."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("this model's tokenizer has no chat template; use kvboost run with the text you want")
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._text = ""  # what the ids below stand for
        self._ids: list[int] = []
        self.boundaries: list[int] = []
        """Where to cut the ids that :meth:`ask` gave last: before the last token of each turn's prompt.

        So the next turn finds the prompt of this one, however short it is, up to its last token, which is always
        computed.
        """

    def ask(self, question: str) -> list[int]:
        """The ids of the chat with one more question, ready for the reply."""
        self._messages.append({"role": "user", "content": question})
        text = str(self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))
        if self._ids and text.startswith(self._text):
            self._ids = [*self._ids, *self._encoded(text[len(self._text) :])]
        else:  # the first turn, or a template that rewrites earlier ones
            self._ids, self.boundaries = self._encoded(text), []
        self._text = text
        self.boundaries = [*self.boundaries, len(self._ids) - 1]
        return list(self._ids)

    def answered(self, ids: Sequence[int]) -> str:
        """Take the ids of the reply; its text."""
        reply = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        self._messages.append({"role": "assistant", "content": reply})
        self._ids = [*self._ids, *ids]
        self._text += str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return reply

    def withdraw(self) -> None:
        """Forget the question that was asked last and got no answer."""
        self._messages.pop()
        self._ids, self._text, self.boundaries = [], "", []  # tokenised anew next time

    def _encoded(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]] if text else []


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


def reuse_line(result: GenerationResult) -> str:
    """What was reused for an answer, and how fast it came."""
    report = result.reuse
    parts = [
        f"{report.exact_tokens} exact",
        f"{report.moved_tokens} non-prefix",
        f"{report.recomputed_tokens} recomputed",
        f"{report.fresh_tokens} fresh",
    ]
    bits = "bit for bit as without the cache" if report.bitwise else "approximate"
    line = (
        f"{result.prompt_tokens} prompt tokens: {', '.join(parts)} ({bits}); "
        f"first token after {result.ttft_ms:.0f} ms, {len(result.token_ids)} new ones at {result.tokens_per_sec:.1f}/s"
    )
    if (draft := result.speculation) is not None:
        line += f" ({draft.accepted} of {draft.proposed} proposed tokens accepted in {draft.passes} passes)"
    return f"[{line}; {report.reason}]" if report.reason else f"[{line}]"
