"""``kvboost``: what can be done with a model without writing Python.

Exit codes: 0 done, 2 the call cannot work and the message says what to do. A user's mistake is one line,
never a stack trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from kvboost.config import EngineConfig
from kvboost.engine import KVBoost
from kvboost.errors import ConfigError, KVBoostError
from kvboost.repair import tolerated_share


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    args = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Transformers' own; ours are in what is printed
            args.run(args)
    except (KVBoostError, OSError) as error:
        print(f"kvboost {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvboost", description="KV-cache reuse for Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what reuse this model allows, and why not more")
    calibrate = commands.add_parser("calibrate", help="measure on your prompts how many rows moved text needs")
    for command in (doctor, calibrate):
        command.add_argument("model", help="folder or hub name, as Transformers takes it")
        command.add_argument("--dtype", default="auto", help="as Transformers takes it (default: the checkpoint's own)")
    doctor.set_defaults(run=_doctor)
    calibrate.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help='your traffic, in order: JSON Lines with {"prompt": text} or {"token_ids": [...]}, or one text per line',
    )
    calibrate.add_argument(
        "--tolerated",
        type=float,
        metavar="SHARE",
        help="say what this quality would take: answers that may differ, such as 0.05 (default: as high)",
    )
    calibrate.add_argument(
        "--out", type=Path, default=Path("kvboost-calibration.json"), metavar="FILE", help="default: %(default)s"
    )
    calibrate.set_defaults(run=_calibrate)
    return parser


def _doctor(args: argparse.Namespace) -> None:
    with KVBoost.from_pretrained(args.model, dtype=args.dtype, strict=False) as engine:
        for name, value in engine.describe().items():
            print(f"{name:<20}{value}")


def _calibrate(args: argparse.Namespace) -> None:
    prompts, boundaries = read_prompts(args.prompts)
    if args.tolerated is not None and not 0.0 < args.tolerated < 1.0:
        raise ConfigError(f"--tolerated {args.tolerated} is not a share; give 0.05 for five answers in a hundred")
    if not args.out.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {args.out} into; create it first")
    print(f"loading {args.model}", file=sys.stderr)
    with KVBoost.from_pretrained(args.model, dtype=args.dtype) as engine:
        result = engine.calibrate(prompts, boundaries=boundaries, save_to=args.out.expanduser())
        quality = args.tolerated if args.tolerated is not None else engine.config.quality
    tolerated = tolerated_share(EngineConfig(quality=quality))
    print("rows again   answers that differ   at most (90 % sure)   tokens that agree")
    for row in result.rows:
        differing = f"{row.differing} of {row.compared}"
        print(f"{row.ratio:>9.0%}{differing:>20}{row.largest_share:>22.1%}{row.agreement:>20.1%}")
    chosen = result.choose(tolerated)
    if chosen is None:
        print(f"No ratio is shown to change at most {tolerated:.3g} of the answers: quality={quality!r} moves nothing.")
    else:
        print(f"quality={quality!r} computes {chosen.ratio:.0%} of the rows again.")
    print(f'Written to {args.out}; use it with KVBoost(..., quality={quality!r}, calibration="{args.out}").')


def read_prompts(file: Path) -> tuple[list[str | list[int]], list[list[int]]]:
    """The prompts in ``file`` and the boundaries of each: JSON Lines, or one text per line. Blank lines are skipped."""
    try:
        lines = [line for line in file.expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file with --prompts") from error
    if not lines:
        raise ConfigError(f"{file} is empty; give the prompts of your traffic, one per line")
    if not lines[0].lstrip().startswith("{"):
        return list(lines), [[]] * len(lines)
    prompts: list[str | list[int]] = []
    boundaries: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            prompts.append(str(record["prompt"]) if "prompt" in record else [int(i) for i in record["token_ids"]])
            boundaries.append([int(i) for i in record.get("boundaries", [])])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{file}, line {number}: expected {{"prompt": text}} or {{"token_ids": [...]}}, '
                f'with "boundaries": [...] if you like ({error!r})'
            ) from error
    return prompts, boundaries
