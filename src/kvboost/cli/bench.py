"""``kvboost bench``: your model with and without reuse.

Called by :mod:`kvboost.cli.main`, which turns errors into one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.flags import Model
from kvboost.errors import ConfigError


def bench(
    model: Model,
    *,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text to make prompts of; default: Python's own library.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the document.")] = 2000,
    repeat: Annotated[int, typer.Option(min=1, help="Questions asked in every way.")] = 5,
    dtype: Annotated[str, typer.Option(help="Of the weights, such as float32; auto takes the checkpoint's.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Every sample goes there.")] = None,
) -> None:
    """Compare your model with and without reuse: time to the first token, bits and tokens."""
    from kvboost.bench.compare import compare

    if json_file is not None and not json_file.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {json_file} into; create it first")
    report = compare(model, texts=text or (), tokens=tokens, repeat=repeat, dtype=dtype)
    print(report.markdown(), end="")
    if json_file is not None:
        arguments = {"model": Path(model), "tokens": tokens, "repeat": repeat, "dtype": dtype}
        json_file.expanduser().write_text(report.json(arguments), encoding="utf-8")
    if report.failed:
        raise typer.Exit(1)
