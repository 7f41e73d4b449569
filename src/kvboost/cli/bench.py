"""``kvboost bench``: your model with and without reuse, on made-up workloads and on your own prompts.

Called by :mod:`kvboost.cli.main`, which turns errors into one line. ``kvboost bench MODEL`` is
``kvboost bench run MODEL``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvboost.cli.flags import Model
from kvboost.cli.output import note
from kvboost.errors import ConfigError


class _RunByDefault(TyperGroup):
    """``run`` is the command where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure your model with and without reuse, and what your own prompts gain.",
    rich_markup_mode="rich",
)

Dtype = Annotated[str, typer.Option(help="Of the weights, such as float32; auto takes the checkpoint's.")]


@app.command(epilog="Example:  kvboost bench run ./model --tokens 1000")
def run(
    model: Model,
    *,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this workload; may be given several times.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the longest prompts.")] = 2000,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 1,
    quality: Annotated[
        str, typer.Option(help="Of the approximate engine, where text moves: high, fast, or a share; exact for none.")
    ] = "fast",
    dtype: Dtype = "auto",
) -> None:
    """Run workloads on your model with plain Transformers and with our engine: first tokens, reuse, answers."""
    note("importing torch and Transformers")
    from kvboost.bench.compare import bench, quality_settings
    from kvboost.bench.workloads import RECIPES
    from kvboost.hf.loading import ModelSource

    for name in workload or ():
        if name not in RECIPES:
            raise ConfigError(f"there is no workload {name!r}; give one of {', '.join(RECIPES)}")
    quality_settings(quality)  # says what is wrong before anything is loaded
    _check_dtype(dtype)
    chosen = list(dict.fromkeys(workload or RECIPES))
    source = ModelSource(model, dtype=dtype)
    table, same_bits = bench(source, chosen, tokens=tokens, new=new, seed=seed, quality=quality)
    print(table.markdown(), end="")
    if not same_bits:
        note("a warm prefill had other bits than a cold one")
        raise typer.Exit(1)


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
    # 72 answers with moved text, all the same, show 5 % for two settings at once.
    limit: Annotated[int, typer.Option(min=1, help="Use the first so many prompts.")] = 80,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 8,
    tolerated: Annotated[
        float, typer.Option(metavar="SHARE", help="Answers that may differ, such as 0.05 for five in a hundred.")
    ] = 0.05,
    dtype: Dtype = "auto",
) -> None:
    """Measure what your own prompts gain, at what quality, and which two flags to set."""
    note("importing torch and Transformers")
    from kvboost.bench.mine import cache_bytes, measure, recommend, table_of
    from kvboost.bench.report import describe_machine
    from kvboost.bench.workloads import Request
    from kvboost.cli.explain import encoded
    from kvboost.explain.replay import read_log
    from kvboost.hf.breaks import break_table
    from kvboost.hf.loading import ModelSource, load_resident, load_tokenizer

    if not 0.0 < tolerated < 1.0:
        raise ConfigError(f"--tolerated {tolerated} is not a share; give 0.05 for five answers in a hundred")
    _check_dtype(dtype)
    records = read_log(prompts)
    if len(records) < 2:
        raise ConfigError(f"{prompts} has one prompt, which can share nothing with others; give more of your traffic")
    if len(records) > limit:
        note(f"{prompts} has {len(records)} prompts; the first {limit} are used (--limit)")
    source = ModelSource(model, dtype=dtype)
    tokenizer = load_tokenizer(source)
    read = encoded(records[:limit], tokenizer, prompts)
    requests = [Request(prompt.tokens.tolist(), list(prompt.boundaries)) for prompt in read]
    note(f"loading {model}")
    loaded = load_resident(source)
    tried = measure(loaded, tokenizer, requests, new=new)
    machine = describe_machine(dtype=str(loaded.dtype).removeprefix("torch."), model=model)
    print(table_of(tried, machine).markdown())
    size = partial(cache_bytes, requests, break_table(tokenizer), per_token=tried[0].bytes_per_token)
    same = ["--dtype", dtype] if dtype != "auto" else []
    print(recommend(tried, tolerated=tolerated, size=size).text(["kvboost", "serve", model, *same]))


def _check_dtype(dtype: str) -> None:
    import torch

    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"--dtype {dtype!r} is not known; give auto, float32, bfloat16 or float16")
