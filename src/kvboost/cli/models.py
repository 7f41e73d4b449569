"""``kvboost calibrate``, ``warm`` and ``bench``: what is done once for a model.

Called by :mod:`kvboost.cli.main`, which turns errors into one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.settings import Settings, with_settings
from kvboost.cli.show import note
from kvboost.errors import CapacityError, ConfigError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name, as Transformers takes it.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="As Transformers takes it; auto: the checkpoint's own.")]
_TEXTS = ("*.txt", "*.md", "*.rst")


def calibrate(
    model: Model,
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='Your traffic, in order: JSON Lines with {"prompt": text} or {"token_ids": [[...]]}, '
            "or one text per line.",
        ),
    ],
    tolerated: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Say what this quality takes: answers that may differ, such as 0.05."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the result goes.")] = Path(
        "kvboost-calibration.json"
    ),
    dtype: _Dtype = "auto",
) -> None:
    """Measure on your prompts how many rows moved text needs."""
    from kvboost.approx.levels import tolerated_share
    from kvboost.config import EngineConfig
    from kvboost.engine import KVBoost

    texts, boundaries = read_prompts(prompts)
    if tolerated is not None and not 0.0 < tolerated < 1.0:
        raise ConfigError(f"--tolerated {tolerated} is not a share; give 0.05 for five answers in a hundred")
    if not out.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"there is no folder to write {out} into; create it first")
    note(f"loading {model}")
    with KVBoost.from_pretrained(model, dtype=dtype) as engine:
        result = engine.calibrate(texts, boundaries=boundaries, save_to=out.expanduser())
        quality = tolerated if tolerated is not None else engine.config.quality
    share = tolerated_share(EngineConfig(quality=quality))
    print("rows again   answers that differ   at most (90 % sure)   tokens that agree")
    for row in result.rows:
        differing = f"{row.differing} of {row.compared}"
        print(f"{row.ratio:>9.0%}{differing:>20}{row.largest_share:>22.1%}{row.agreement:>20.1%}")
    chosen = result.choose(share)
    if chosen is None:
        print(f"No ratio is shown to change at most {share:.3g} of the answers: quality={quality!r} moves nothing.")
    else:
        print(f"quality={quality!r} computes {chosen.ratio:.0%} of the rows again.")
    print(f'Written to {out}; use it with KVBoost(..., quality={quality!r}, calibration="{out}").')


@with_settings()
def warm(
    model: Model,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Documents, or directories: their .txt, .md and .rst files.")
    ],
    *,
    head: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The beginning your prompts share, such as the system prompt.")
    ] = None,
    company: Annotated[int, typer.Option(help="Read each document behind so many others.")] = 2,
    settings: Settings,
) -> None:
    """Read documents now, so that later prompts find them read.

    Needs --cache-dir or --remote-url, where the result stays. Documents that are there already are skipped: a run that
    was broken off goes on where it stopped.
    """
    if not any(settings[name] for name in ("cache_dir", "remote_url", "object_url")):
        raise ConfigError("what is read would be gone with this process; give --cache-dir or --remote-url to keep it")
    documents = [(path, _text_of(path)) for path in _documents(files)]
    beginning = _text_of(head) if head is not None else None
    from kvboost.engine import KVBoost

    note(f"loading {model}")
    with KVBoost.from_pretrained(model, **settings.engine()) as engine:
        first = engine.encode(beginning) if beginning is not None else []
        encoded: list[list[int]] = []
        for path, text in documents:
            ids = [int(i) for i in engine.tokenizer(text, add_special_tokens=False)["input_ids"]]
            try:
                if ids:
                    engine.encode([*first, *ids])
                    encoded.append(ids)
            except CapacityError as error:
                note(f"left out {path}: {error}")
        new = engine.warm_documents(encoded, head=beginning, company=company)
        engine.flush()
    tokens = sum(map(len, encoded))
    print(f"{len(encoded)} documents with {tokens} tokens are read; {new} chunks were new.")


def _documents(files: Sequence[Path]) -> Iterator[Path]:
    """The files that were named, and those in directories that were."""
    for file in files:
        path = file.expanduser()
        if not path.exists():
            raise ConfigError(f"there is no {file}; give files or directories of documents")
        if not path.is_dir():
            yield path
            continue
        found = sorted({text for pattern in _TEXTS for text in path.rglob(pattern) if text.is_file()})
        if not found:
            raise ConfigError(f"{file} holds no {', '.join(_TEXTS)}; name the files themselves")
        yield from found


def _text_of(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give text files in UTF-8") from error


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


def bench(
    model: Model,
    *,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text to make prompts of; default: Python's own library.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the document.")] = 2000,
    repeat: Annotated[int, typer.Option(min=1, help="Questions asked in every way.")] = 5,
    dtype: _Dtype = "auto",
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
