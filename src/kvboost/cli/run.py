"""``kvboost run``: ask a model, and see what its cache did.

Called by :mod:`kvboost.cli.main`. Invariant: the answer is all that goes to the output; what was reused goes to the
error output.
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
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.types import GenerationResult


@with_settings("run")
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
    note(f"loading {model}")  # before torch is imported, which may take seconds
    from kvboost.engine import KVBoost

    with KVBoost.from_pretrained(model, **settings.engine()) as engine:
        templated = not raw and getattr(engine.tokenizer, "chat_template", None) is not None
        if reply.system is not None and not templated:
            raise ConfigError("this model has no chat template, so no system message; put it before the prompt")
        if templated:
            ids = _templated(engine.tokenizer, text, system=reply.system)
            boundaries = [len(ids) - 1]  # the last token is always computed; the next run finds all before it
        else:
            ids, boundaries = engine.encode(text), []
        result = _answer(engine, ids, boundaries, reply)
        print()
        note(reuse_line(result))
        engine.flush()


def _templated(tokenizer: Any, question: str, *, system: str | None) -> list[int]:
    """The ids of a chat of one question."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


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
    return f"[{line}; {report.reason}]" if report.reason else f"[{line}]"
