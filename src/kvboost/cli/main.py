"""``kvboost``: the commands, and how their errors are shown.

Exit codes: 0 done; 1 damage was found, a server's runner failed, or lines of a file did; 2 the call cannot work and the
message says what to do. Invariants: a user's mistake is one line, never a stack trace; slow modules are imported once a
command runs, as help texts and shell completion must not wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvboost import __version__
from kvboost.cli import bench, cache
from kvboost.cli.doctor import doctor
from kvboost.cli.explain import calibrate, explain
from kvboost.cli.map import map_file
from kvboost.cli.output import LogLevel, logging_to_stderr, set_level
from kvboost.cli.serve import serve
from kvboost.cli.warm import warm
from kvboost.errors import ClosedError, KVBoostError

_INTERRUPTED = 130
_ASK = (
    "To ask a model, open the page of 'kvboost serve MODEL', or call "
    'python -c \'import kvboost; print(kvboost.KVBoost.from_pretrained("MODEL").generate("PROMPT"))\''
)
_ASKING = ("No such command 'run'", "No such command 'chat'")  # they were commands

app = typer.Typer(
    name="kvboost",
    help="KV-cache reuse for Hugging Face models: compute the KV of a text once and reuse it.",
    epilog="Start with:  kvboost doctor MODEL  and then  kvboost serve MODEL",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def _before_commands(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and do nothing else.")] = False,
    log_level: LogLevel = None,
) -> None:
    if version:
        typer.echo(f"kvboost {__version__}")
        raise typer.Exit(0)
    set_level(log_level)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command(epilog="Example:  kvboost serve ./model --port 8000 --disk-cache-dir ~/.cache/kvboost/kv")(serve)
app.command("map", epilog="Example:  kvboost map ./model prompts.jsonl answers.jsonl --disk-cache-dir kv-cache")(
    map_file
)
app.command(epilog="Example:  kvboost warm ./model docs/ --quality auto --disk-cache-dir ~/.cache/kvboost/kv")(warm)
app.command(epilog="Example:  kvboost doctor ./model --context 32768 --batch 4")(doctor)
app.command(epilog="Example:  kvboost calibrate ./model --prompts traffic.jsonl --tolerated 0.05")(calibrate)
app.command(epilog="Example:  kvboost explain prompts.jsonl --model ./model")(explain)
app.add_typer(bench.app, name="bench", epilog="Example:  kvboost bench ./model --tokens 1000")
app.add_typer(cache.app, name="cache", epilog="Example:  kvboost cache stat ~/.cache/kvboost/kv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    group: Any = typer.main.get_command(app)
    try:
        with logging_to_stderr():
            code = group.main(args=given, prog_name="kvboost", standalone_mode=False)
    except typer.TyperException as error:
        name = _command_name(group, given)
        said = error.format_message().rstrip(".")
        hint = _ASK if said in _ASKING else f"Try '{name} --help'."
        return _fail(name, f"{said}{'' if said.endswith('?') else '.'} {hint}")
    except (KVBoostError, OSError) as error:
        _fail(_command_name(group, given), str(error))
        return 1 if isinstance(error, ClosedError) else 2  # 1: starting it again may help
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _command_name(group: Any, arguments: Sequence[str]) -> str:
    """The command that was called, with its groups."""
    name = ["kvboost"]
    for word in arguments:
        if not isinstance(group, TyperGroup) or word not in group.commands:
            break
        name.append(word)
        group = group.commands[word]
    return " ".join(name)


def _fail(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2
