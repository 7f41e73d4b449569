"""``kvboost``: what can be done with a model and a cache without writing Python.

Exit codes: 0 done; 1 damage was found; 2 the call cannot work and the message says what to do. Invariants: a user's
mistake is one line, never a stack trace; nothing that is slow to import is imported before a command runs, as help
texts and shell completion must not wait for it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvboost.cli import cache, models, serving, talking
from kvboost.cli.doctor import doctor
from kvboost.errors import KVBoostError

_INTERRUPTED = 130

app = typer.Typer(
    name="kvboost",
    help="KV-cache reuse for Hugging Face models: read a text once, use it again.",
    epilog="Start with:  kvboost doctor MODEL  and then  kvboost chat MODEL",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command(epilog="Example:  kvboost serve ./model --port 8000 --cache-dir ~/.cache/kvboost")(serving.serve)
app.command(epilog='Example:  kvboost run ./model "Why is the sky blue?" --cache-dir ~/.cache/kvboost')(talking.run)
app.command(epilog="Example:  kvboost chat ./model --cache-dir ~/.cache/kvboost")(talking.chat)
app.command(epilog="Example:  kvboost warm ./model docs/ handbook.md --cache-dir ~/.cache/kvboost")(models.warm)
app.command(epilog="Example:  kvboost doctor ./model --context 32768 --batch 4")(doctor)
app.command(epilog="Example:  kvboost calibrate ./model --prompts traffic.jsonl --tolerated 0.05")(models.calibrate)
app.command(epilog="Example:  kvboost bench ./model --tokens 4000")(models.bench)
app.add_typer(cache.app, name="cache", epilog="Example:  kvboost cache stat ~/.cache/kvboost")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    group: Any = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Transformers' own; ours are in what is printed
            code = group.main(args=words, prog_name="kvboost", standalone_mode=False)
    except typer.TyperException as error:
        name = _named(group, words)
        return _said(name, f"{error.format_message().rstrip('.')}. Try '{name} --help'.")
    except (KVBoostError, OSError) as error:
        return _said(_named(group, words), str(error))
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _named(group: Any, words: Sequence[str]) -> str:
    """The command that was called, with its groups."""
    name = ["kvboost"]
    for word in words:
        if not isinstance(group, TyperGroup) or word not in group.commands:
            break
        name.append(word)
        group = group.commands[word]
    return " ".join(name)


def _said(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2
