"""Texts to make prompts of, and contestants that alternate.

Used by :mod:`kvboost.bench.texts` and by the repository's benchmarks, which have ``--text FILE``. Invariant:
contestants alternate within one run, and who runs behind whom changes, so that none profits from what another left in
the caches.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvboost.bench.report import BenchError, Progress
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, GenerationResult

# English and Python that every installation has, so that nothing needs to be downloaded.
_STANDARD_MODULES = ("argparse", "asyncio.tasks", "json.decoder", "logging", "subprocess", "tarfile", "typing")


class TextSource:
    """Token ids of real text, handed out in windows."""

    def __init__(self, tokenizer: Any, files: Sequence[Path] | None = None) -> None:
        self._tokenizer = tokenizer
        # Of the commands only those that take files have --text.
        self._remedy = "give longer files with --text" if files else "ask for shorter prompts"
        text = _read(files) if files else _standard_library()
        self.ids: list[int] = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    def window(self, start: int, length: int) -> list[int]:
        """``length`` ids from ``start`` on; a start behind the end wraps around."""
        last = len(self.ids) - length
        if last < 0:
            raise BenchError(f"the text has {len(self.ids)} tokens, {length} are needed; {self._remedy}")
        start %= last + 1
        return self.ids[start : start + length]

    def words(self, start: int, length: int) -> str:
        """The text of such a window. Encoding it again may give slightly other ids at its ends."""
        return str(self._tokenizer.decode(self.window(start, length), clean_up_tokenization_spaces=False))


def _read(files: Sequence[Path]) -> str:
    try:
        return "\n".join(file.expanduser().read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the text: {error}; give --text UTF-8 files") from error


def _standard_library() -> str:
    try:
        return "\n".join(inspect.getsource(importlib.import_module(name)) for name in _STANDARD_MODULES)
    except (OSError, ImportError) as error:
        raise BenchError("this Python came without the sources of its library; use one that has them") from error


def alternate(
    contestants: Mapping[str, Callable[[], float]], *, repeat: int, warmups: int, label: str
) -> dict[str, list[float]]:
    """Run all contestants ``repeat`` times in turn; each returns its milliseconds. Warm-ups are not kept.

    The order is drawn, and reversed in the next round: who runs behind oneself finds caches as one left them.
    """
    names, rng = list(contestants), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in names}
    progress = Progress(label, (warmups + repeat) * len(names))
    order: list[str] = []
    for number in range(warmups + repeat):
        order = order[::-1] if number % 2 else rng.sample(names, len(names))
        for name in order:
            took = contestants[name]()
            if number >= warmups:
                samples[name].append(took)
            progress.step()
    return samples


def first_token(engine: KVBoost, prompt: Any, *, baseline: bool = False, **arguments: Any) -> GenerationResult:
    """Ask for one greedy token: the call whose ``ttft_ms`` the measurements compare."""
    mode = GenerationMode.BASELINE if baseline else GenerationMode.CHUNK_KV_REUSE
    return engine.generate(prompt, mode=mode, max_new_tokens=1, temperature=0, **arguments)
