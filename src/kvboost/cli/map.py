"""``kvboost map``: answer a file of prompts, or OpenAI's batch file.

Called by :mod:`kvboost.cli.main`. Invariants: a run that was interrupted goes on where it stopped; what cannot be read
is said before the model is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.flags import Model, with_settings
from kvboost.cli.output import note, progress
from kvboost.cli.serve import model_name
from kvboost.cli.settings import Settings
from kvboost.errors import ConfigError, with_extra


@with_settings()
def map_file(
    model: Model,
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS", help="A file of JSON lines.")],
    answers: Annotated[Path, typer.Argument(metavar="ANSWERS", help="Answers are appended here, as JSON lines.")],
    *,
    together: Annotated[int, typer.Option("--together", metavar="N", help="Prompts generated side by side.")] = 64,
    settings: Settings,
) -> None:
    """Answer every line of a file; what prompts share is read once.

    A line is a request of OpenAI's batch format, or an object with "prompt" or "messages" and any other field of the
    API, such as max_tokens, stop or response_format. Answers have the form of OpenAI's batches, in the order in which
    they end; "custom_id" names a line, by default its number. The same command again goes on where it stopped.
    """
    try:
        from kvboost.serve.batch import answer_lines, answered, read_lines
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; {with_extra('serve')}") from error
    if together < 1:
        raise ConfigError(f"--together {together} generates nothing; give 1 or more")
    if prompts.resolve() == answers.resolve():
        raise ConfigError(f"the answers would go into {prompts} itself, behind the prompts; name another file for them")
    name, (done, whole) = model_name(model), answered(answers)
    count = sum(line.id not in done for line in read_lines(prompts, model_name=name))
    if not count:
        note(f"all lines of {prompts} are answered in {answers}")
        return
    if answers.exists():  # by now both files are what they should be
        os.truncate(answers, whole)
    note(f"loading {model}")  # before torch is imported, which may take seconds
    from kvboost.engine import KVBoost

    lines = (line for line in read_lines(prompts, model_name=name) if line.id not in done)
    with KVBoost.from_pretrained(model, **settings.engine()) as engine, progress("answering", total=count) as bar:
        try:
            totals = answer_lines(engine, lines, answers, model_name=name, together=together, done=bar.update)
        except KeyboardInterrupt:
            note(f"interrupted; the same command goes on after the lines that {answers} answers")
            raise
        engine.flush()
    known = f"{totals.cached_tokens:,} of {totals.prompt_tokens:,} prompt tokens were not read again"
    refused = f"; {totals.refused} lines were refused, and say why" if totals.refused else ""
    note(f"{totals.answered} answers are in {answers}; {known}{refused}")
    if failed := count - totals.answered:
        note(f"{failed} lines failed or were not asked; run the same command again")
        raise typer.Exit(1)
