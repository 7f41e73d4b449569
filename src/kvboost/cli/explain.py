"""``kvboost explain``: where the reuse of logged prompts breaks, why, what that costs, and what to change.

Called by :mod:`kvboost.cli.main`, which turns errors into one line. Only the tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.output import note, progress
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.explain.replay import LoggedPrompt, LogRecord

_ANY_ID = 2**31  # the model, which knows how many ids there are, is not loaded


def explain(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help='Your prompts, in order: JSON Lines with {"prompt": text} or {"messages": [...]}.'
        ),
    ],
    *,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Folder or hub name: its tokenizer and template are used.")
    ],
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            min=0.001,
            show_default=False,
            help="How fast prompts are prefilled, to tell costs in seconds.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of it: one HTML file that needs nothing else.")
    ] = None,
) -> None:
    """Show where the reuse of your prompts breaks and why, what that costs, and what to change."""
    from kvboost.explain.replay import read_log
    from kvboost.explain.report import explain as explain_log
    from kvboost.explain.report import html_page, text_report

    records = read_log(log)
    if html is not None and not html.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {html} into; create it first")
    note(f"loading the tokenizer of {model}")  # before Transformers is imported, which may take seconds
    from kvboost.hf.breaks import break_table
    from kvboost.hf.loading import ModelSource, load_tokenizer

    tokenizer = load_tokenizer(ModelSource(model))
    with progress("prompts", total=len(records)) as bar:
        explanation = explain_log(
            encoded(records, tokenizer, log),
            decode=lambda ids: _text(tokenizer, ids),
            breaks=break_table(tokenizer),
            tokens_per_second=tokens_per_second,
            progress=bar.update,
        )
    print(json.dumps(explanation.as_dict()) if as_json else text_report(explanation), end="\n" if as_json else "")
    if html is not None:
        html.expanduser().write_text(html_page(explanation), encoding="utf-8")
        note(f"written to {html}")


def encoded(records: Sequence[LogRecord], tokenizer: Any, log: Path) -> Iterator[LoggedPrompt]:
    """The prompts of a log as the engine would see them; ``bench mine`` and ``calibrate`` read theirs so too."""
    from jinja2 import TemplateError

    from kvboost.core.chunking import NaturalChunker
    from kvboost.core.keys import token_array
    from kvboost.explain.replay import LoggedPrompt
    from kvboost.explain.report import CHUNK_TOKENS
    from kvboost.hf.prompt import PromptEncoder

    encoder = PromptEncoder(tokenizer, max_tokens=None, vocab_size=_ANY_ID)
    gap = NaturalChunker(CHUNK_TOKENS).min_tokens
    for record in records:
        try:
            if record.prompt is not None:
                yield LoggedPrompt(record.line, token_array(encoder.encode(record.prompt)), record.boundaries)
                continue
            given = {"tools": record.tools} if record.tools else {}
            tokens, ends = encoder.encode_chat(record.messages, min_gap=gap, template_kwargs=given)
        except (ConfigError, TemplateError, TypeError) as error:
            raise ConfigError(f"{log}, line {record.line}: {error}; repair that line, or leave it out") from error
        digests = tuple(sha256(json.dumps(message, sort_keys=True).encode()).digest() for message in record.messages)
        yield LoggedPrompt(record.line, token_array(tokens), ends, digests)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids)))
