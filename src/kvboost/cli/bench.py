"""``kvboost bench``: your model with and without reuse, against rivals, and on your own prompts.

Called by :mod:`kvboost.cli.main`, which turns errors into one line. ``kvboost bench MODEL`` is
``kvboost bench run MODEL``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvboost.cli.flags import Model
from kvboost.cli.output import note
from kvboost.errors import ConfigError

_QUICK = {"tokens": 384, "new": 3, "cold": 2}
_QUICK_WORKLOADS = ("document", "chat", "rag", "random")
_QUICK_RIVALS = ("plain", "kept-cache")
_TOKENS, _NEW, _COLD = 2000, 16, 3
# Of `mine`. 72 answers with moved text, all the same, show 5 % for two settings at once.
_LIMIT, _MINE_NEW, _TOLERATED = 80, 8, 0.05


class _RunByDefault(TyperGroup):
    """``run`` is the command where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure your model with and without reuse, against rivals, and on your own prompts.",
    rich_markup_mode="rich",
)

Dtype = Annotated[str, typer.Option(help="Of the weights, such as float32; auto takes the checkpoint's.")]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON Lines: every sample goes there, and a second run goes on.")
]
Html = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a report with plots: one HTML file.")
]


@app.command(epilog="Example:  kvboost bench run ./model --out results.jsonl --report report.html")
def run(
    model: Model,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Four workloads, two rivals, short prompts.")] = False,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this workload; may be given several times.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this rival; may be given several times.")
    ] = None,
    rival: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PYTHON", help="The Python of a rival with its own environment.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, show_default=str(_TOKENS), help="Length of the longest prompts.")
    ] = None,
    new: Annotated[int | None, typer.Option(min=1, show_default=str(_NEW), help="Tokens of an answer.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Run every workload so often, each time with other texts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 1,
    quality: Annotated[
        str, typer.Option(help="Of the approximate engine, where text moves: high, fast, or a share; exact for none.")
    ] = "fast",
    dtype: Dtype = "auto",
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Questions with passages for rag, such as MuSiQue's.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="The model for llama-cpp.")] = None,
    out: Out = None,
    report: Html = None,
) -> None:
    """Run workloads on your model and on rivals: first tokens, reuse, quality, memory."""
    note("importing torch and Transformers")
    from kvboost.bench.contestants import RIVALS
    from kvboost.bench.journal import Journal
    from kvboost.bench.page import html_report
    from kvboost.bench.report import describe_machine
    from kvboost.bench.run import KIND, Bench, Options
    from kvboost.bench.summary import report_of
    from kvboost.bench.workloads import RECIPES

    workloads = _chosen(workload, RECIPES, "workload") or list(_QUICK_WORKLOADS if quick else RECIPES)
    rivals = _chosen(against, RIVALS, "rival") or list(_QUICK_RIVALS if quick else RIVALS)
    pythons = _pythons(rival or (), RIVALS)
    _check_quality(quality)
    _check_dtype(dtype)
    for file in (out, report):
        _check_folder(file)
    sizes: dict[str, Any] = {"tokens": _TOKENS, "new": _NEW, "cold": _COLD} | (_QUICK if quick else {})
    sizes |= {name: value for name, value in (("tokens", tokens), ("new", new)) if value is not None}
    options = Options(
        model,
        dtype=dtype,
        seed=seed,
        quality=quality,
        data=data,
        gguf=gguf,
        pythons=pythons,
        **{"repeat": repeat, **sizes},
    )
    machine = describe_machine(dtype=dtype, model=model)
    with Journal(out.expanduser() if out is not None else None, KIND, options.settings(), machine) as journal:
        Bench(options, journal).run(workloads, rivals, alone=not quick)
        result = report_of(journal.header, journal.samples)
        print(result.markdown(), end="")
        if report is not None:
            _write(report, html_report([(journal.header, journal.samples)]))
    if result.failed:
        note("a warm prefill had other bits than a cold one")
        raise typer.Exit(1)


@app.command("report", epilog="Example:  kvboost bench report results.jsonl --html report.html")
def report_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="What --out has written, one or several.")],
    *,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The report: one HTML file that needs nothing else.")],
) -> None:
    """Make the report of runs that are done. Loads no model."""
    from kvboost.bench.journal import load
    from kvboost.bench.page import html_report
    from kvboost.bench.run import KIND

    _check_folder(html)
    _write(html, html_report([load(file.expanduser(), KIND) for file in files]))


@app.command(epilog="Example:  kvboost bench mine ./model --prompts my.jsonl")
def mine(
    model: Model,
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help='Your prompts, in order: JSON Lines with {"prompt": text} or {"messages": [...]}.'
        ),
    ],
    limit: Annotated[int, typer.Option(min=1, help="Use the first so many prompts.")] = _LIMIT,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = _MINE_NEW,
    tolerated: Annotated[
        float, typer.Option(metavar="SHARE", help="Answers that may differ, such as 0.05 for five in a hundred.")
    ] = _TOLERATED,
    quality: Annotated[
        str | None, typer.Option(help="Measure only this one, to confirm a recommendation: exact, high, fast, a share.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option("--cache-bytes", metavar="SIZE", help="With --quality: our cache, such as 640MB.")
    ] = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure what your own prompts gain, at what quality, and which two flags to set."""
    note("importing torch and Transformers")
    from kvboost.bench.mine import QUALITIES, cache_bytes, confirm, measure, recommend, report_of
    from kvboost.bench.run import Options
    from kvboost.bench.workloads import Encoder
    from kvboost.cli.explain import encoded
    from kvboost.config import parse_bytes
    from kvboost.explain import read_log
    from kvboost.hf.breaks import break_table
    from kvboost.hf.loading import ModelSource, load_tokenizer

    if not 0.0 < tolerated < 1.0:
        raise ConfigError(f"--tolerated {tolerated} is not a share; give 0.05 for five answers in a hundred")
    if quality is not None:
        _check_quality(quality)
    if cache is not None:
        parse_bytes(cache, name="--cache-bytes")
        if quality is None:
            raise ConfigError("--cache-bytes confirms a recommendation; add the --quality that it names")
    _check_dtype(dtype)
    records = read_log(prompts)
    if len(records) < 2:
        raise ConfigError(f"{prompts} has one prompt, which can share nothing with others; give more of your traffic")
    if len(records) > limit:
        note(f"{prompts} has {len(records)} prompts; the first {limit} are used (--limit)")
    note(f"loading the tokenizer of {model}")
    tokenizer = load_tokenizer(ModelSource(model))
    encoder = Encoder(tokenizer)
    requests = [
        encoder.of_tokens(prompt.tokens.tolist(), prompt.boundaries)
        for prompt in encoded(records[:limit], tokenizer, prompts)
    ]
    options = Options(model, dtype=dtype, new=new, cold=0)
    tried = measure(options, requests, QUALITIES if quality is None else [quality], cache=cache)
    print(report_of(tried, options).markdown())
    if quality is not None:
        print(confirm(tried[0], tolerated=tolerated, cache=cache))
        return
    size = partial(cache_bytes, requests, break_table(tokenizer), per_token=tried[0].bytes_per_token)
    same = ["--dtype", dtype] if dtype != "auto" else []
    again = ["kvboost", "bench", "mine", model, "--prompts", str(prompts), *same]
    for flag, value, default in (
        ("--limit", limit, _LIMIT),
        ("--new", new, _MINE_NEW),
        ("--tolerated", tolerated, _TOLERATED),
    ):
        again += [flag, str(value)] if value != default else []
    print(recommend(tried, tolerated=tolerated, size=size).text(["kvboost", "serve", model, *same], again))


def _chosen(given: Sequence[str] | None, known: Sequence[str] | dict[str, Any], kind: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise ConfigError(f"there is no {kind} {name!r}; give one of {', '.join(known)}")
    return list(dict.fromkeys(given or ()))


def _pythons(given: Sequence[str], known: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in given:
        name, equals, python = entry.partition("=")
        if not equals or not python:
            raise ConfigError(f"--rival {entry!r} does not say which Python has it; write NAME=PATH/TO/python")
        _chosen([name], known, "rival")
        if not Path(python).expanduser().is_file():
            raise ConfigError(f"there is no {python}; give --rival {name}= the Python of its environment")
        found[name] = str(Path(python).expanduser())
    return found


def _check_quality(quality: str) -> None:
    from kvboost.bench.run import quality_value
    from kvboost.config import EngineConfig

    if quality == "auto":
        raise ConfigError("quality auto begins as exact and needs idle time for its checks; give high, fast or a share")
    try:
        EngineConfig(quality=quality_value(quality))
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"--quality {quality!r} is not known; give exact, high, fast or a share such as 0.1"
        ) from error


def _check_dtype(dtype: str) -> None:
    import torch

    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"--dtype {dtype!r} is not known; give auto, float32, bfloat16 or float16")


def _check_folder(file: Path | None) -> None:
    if file is not None and not file.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {file} into; create it first")
    if file is not None and file.expanduser().is_dir():
        raise ConfigError(f"{file} is a folder; give a file in it")


def _write(file: Path, text: str) -> None:
    file.expanduser().write_text(text, encoding="utf-8")
    note(f"written to {file}")
