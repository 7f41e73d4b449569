"""``kvboost warm``: prefill documents before anybody asks.

Called by :mod:`kvboost.cli.main`, which turns errors into one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvboost.cli.cache_records import open_location
from kvboost.cli.flags import Model, with_settings
from kvboost.cli.output import note
from kvboost.cli.settings import Settings
from kvboost.errors import CapacityError, ConfigError, PlaceError

_TIERS = ("disk_cache_dir", "remote_url")
_TEXTS = ("*.txt", "*.md", "*.rst")


@with_settings()
def warm(
    model: Model,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Documents, or directories: their .txt, .md and .rst files.")
    ],
    *,
    head: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What your prompts begin with, such as the system prompt.")
    ] = None,
    context_documents: Annotated[int, typer.Option(help="Prefill each document after this many others.")] = 2,
    settings: Settings,
) -> None:
    """Prefill documents now, so that later prompts find their KV.

    Needs --disk-cache-dir or --remote-url, where the KV stays, and --quality auto, high or fast, for whoever uses it.
    Documents that are there already are skipped: a run that was interrupted goes on where it stopped.
    """
    given = settings.engine()
    if not set(_TIERS) & given.keys():
        raise ConfigError("the KV would be gone with this process; give --disk-cache-dir or --remote-url to keep it")
    beginning = _text_of(head) if head is not None else None
    documents = [(path, _text_of(path)) for path in _documents(files)]
    if given.get("quality", "exact") == "exact":
        raise ConfigError("documents are prefilled for reuse anywhere in a prompt; add --quality auto, here and later")
    _check_tiers(given)
    note(f"loading {model}")  # before torch is imported, which may take seconds
    from kvboost.engine import KVBoost
    from kvboost.store.tiers.mooncake import giving_nothing

    if "remote_url" in given:
        given["remote_url"] = giving_nothing(given["remote_url"])  # its memory would go with this process
    with KVBoost.from_pretrained(model, **given) as engine:
        first = engine.encode(beginning) if beginning is not None else []
        texts: list[str] = []
        tokens = 0
        for path, text in documents:
            ids = [int(i) for i in engine.tokenizer(text, add_special_tokens=False)["input_ids"]]
            try:
                if text.strip():
                    engine.encode([*first, *ids])
                    texts.append(text)
                    tokens += len(ids)
            except CapacityError as error:
                note(f"left out {path}: {error}")
        new = engine.add_documents(texts, head=beginning, context_documents=context_documents)
        engine.flush()
        unsaved = engine.cache_stats()["unsaved_chunks"]
    if unsaved:
        raise PlaceError(f"{unsaved} of {new} new chunks were not stored; see the warnings above and warm again")
    print(f"{len(texts)} documents with {tokens} tokens are stored; {new} chunks were new.")


def _check_tiers(engine: Mapping[str, Any]) -> None:
    """Raise PlaceError for a tier that would keep nothing, before the model is loaded."""
    for location in (engine.get(name) for name in _TIERS):
        if location is not None:
            with open_location(str(location), create=True) as catalogue:
                catalogue.check_writable()


def _documents(files: Sequence[Path]) -> Iterator[Path]:
    """The files among ``files``, and those in its directories."""
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
