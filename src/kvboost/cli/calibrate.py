"""``kvboost calibrate``: measure on a user's own prompts what non-prefix reuse has to recompute.

Called by :mod:`kvboost.cli.main`, which turns errors into one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

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
            help='Your traffic, in order: JSON Lines with {"prompt": text} or {"token_ids": list of ids}, '
            '"boundaries" if there are any; or one text per line.',
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

    texts, boundaries = read_prompts(prompts)
    if tolerated is not None and not 0.0 < tolerated < 1.0:
        raise ConfigError(f"--tolerated {tolerated} is not a share; give 0.05 for five answers in a hundred")
    if not out.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {out} into; create it first")
    if len(texts) <= MIN_COMPARISONS:  # the first one can repeat nothing
        raise ConfigError(
            f"{prompts} has {len(texts)} prompts, and more than {MIN_COMPARISONS} are needed to show anything; "
            "give more of your traffic, in its order and with its repetitions"
        )
    # Exact engines, the default, have nothing to calibrate.
    with KVBoost.from_pretrained(model, dtype=dtype, quality="high") as engine:
        result = engine.calibrate(texts, boundaries=boundaries, save_to=out.expanduser())
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


def read_prompts(file: Path) -> tuple[list[str | list[int]], list[list[int]]]:
    """The prompts in ``file`` and the boundaries of each: JSON Lines, or one text per line. Blank lines are skipped."""
    try:
        # Not splitlines(): it also splits at characters that JSON leaves as they are inside a string.
        texts = file.expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file with --prompts") from error
    lines = [(number, line) for number, line in enumerate(texts, 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{file} is empty; give the prompts of your traffic, one per line")
    if not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines], [[]] * len(lines)
    prompts: list[str | list[int]] = []
    boundaries: list[list[int]] = []
    for number, line in lines:
        try:
            record = json.loads(line)
            prompts.append(str(record["prompt"]) if "prompt" in record else [int(i) for i in record["token_ids"]])
            boundaries.append([int(i) for i in record.get("boundaries", [])])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{file}, line {number}: expected {{"prompt": text}} or {{"token_ids": [...]}}, '
                f'with "boundaries": [...] if there are any ({error!r})'
            ) from error
    return prompts, boundaries
