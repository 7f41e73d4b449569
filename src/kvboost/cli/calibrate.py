"""``kvboost calibrate``: measure on a user's own prompts what non-prefix reuse has to recompute.

Called by :mod:`kvboost.cli.main`, which turns errors into one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.explain import encoded
from kvboost.cli.flags import Model
from kvboost.cli.output import note
from kvboost.errors import ConfigError


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
