"""What a user's own prompts say: ``kvboost explain`` and ``kvboost calibrate``.

``explain`` shows where the reuse of logged prompts breaks, why, what that costs, and what to change; it loads the
tokenizer only. ``calibrate`` measures what non-prefix reuse has to recompute. Called by :mod:`kvboost.cli.main`, which
turns errors into one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.flags import Model
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
) -> None:
    """Show where the reuse of your prompts breaks and why, what that costs, and what to change."""
    from kvboost.explain.replay import read_log
    from kvboost.explain.report import explain as explain_log
    from kvboost.explain.report import text_report

    records = read_log(log)
    note(f"loading the tokenizer of {model}")  # before Transformers is imported, which may take seconds
    from kvboost.hf.breaks import break_table
    from kvboost.hf.loading import ModelSource, load_tokenizer

    tokenizer = load_tokenizer(ModelSource(model))
    with progress("prompts", total=len(records)) as bar:
        explanation = explain_log(
            encoded(records, tokenizer, log),
            decode=lambda ids: str(tokenizer.decode(list(ids))),
            breaks=break_table(tokenizer),
            tokens_per_second=tokens_per_second,
            progress=bar.update,
        )
    print(json.dumps(explanation.as_dict()) if as_json else text_report(explanation), end="\n" if as_json else "")


def calibrate(
    model: Model,
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='Your traffic, in order: JSON Lines with {"prompt": text}, {"messages": [...]} or {"token_ids": list '
            'of ids}, "boundaries" if there are any; or one text per line.',
        ),
    ],
    tolerated: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Say what this quality takes: answers that may differ, such as 0.05."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the result goes.")] = Path(
        "kvboost-calibration.json"
    ),
    dtype: Annotated[str, typer.Option(help="The model's dtype; auto takes the checkpoint's own.")] = "auto",
) -> None:
    """Measure on your prompts which tokens non-prefix reuse must recompute."""
    note(f"loading {model}")  # before torch is imported, which may take seconds
    from kvboost.approx.calibration import MIN_COMPARISONS
    from kvboost.approx.setup import tolerated_share
    from kvboost.config import EngineConfig
    from kvboost.engine import KVBoost
    from kvboost.explain.replay import read_log

    records = read_log(prompts, or_texts=True)
    if tolerated is not None and not 0.0 < tolerated < 1.0:
        raise ConfigError(f"--tolerated {tolerated} is not a share; give 0.05 for five answers in a hundred")
    if not out.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {out} into; create it first")
    if len(records) <= MIN_COMPARISONS:  # the first one can repeat nothing
        raise ConfigError(
            f"{prompts} has {len(records)} prompts, and more than {MIN_COMPARISONS} are needed to show anything; "
            "give more of your traffic, in its order and with its repetitions"
        )
    # Exact engines, the default, have nothing to calibrate.
    with KVBoost.from_pretrained(model, dtype=dtype, quality="high") as engine:
        read = list(encoded(records, engine.tokenizer, prompts))
        tokens, cuts = [prompt.tokens.tolist() for prompt in read], [list(prompt.boundaries) for prompt in read]
        result = engine.calibrate(tokens, boundaries=cuts, save_to=out.expanduser())
        quality = tolerated if tolerated is not None else engine.config.quality
    share = tolerated_share(EngineConfig(quality=quality))
    sure = f"at most ({result.confidence:.1%} sure)"
    print(f"strategy     recomputed   answers that differ   {sure}   tokens that agree")
    for row in result.rows:
        differing, bound = f"{row.differing} of {row.compared}", row.largest_share(result.confidence)
        print(f"{row.strategy:<13}{row.ratio:>9.0%}{differing:>20}{bound:>{3 + len(sure)}.1%}{row.agreement:>20.1%}")
    chosen = result.choose(share)
    if chosen is None:
        print(
            f"No repair is shown to change at most {share:.3g} of the answers, which takes at least "
            f"{result.prompts_needed(share)} prompts without a difference: quality={quality!r} is exact reuse only."
        )
    else:
        print(f"quality={quality!r} recomputes {chosen.ratio:.0%} of the tokens (strategy {chosen.strategy!r}).")
    print(f'Written to {out}; use it with KVBoost(..., quality={quality!r}, calibration="{out}").')


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
