"""Loads what a measurement needs (model, text) and runs contestants side by side.

Used by the measurements that need a model. Invariant: contestants alternate within one run, and which of
them goes first changes every round, so that neither profits from what the other left in the caches.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvboost.bench.report import BenchError, Progress, say
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore
from kvboost.types import GenerationMode, GenerationResult, KVBlock, PutOutcome

DTYPES = ("float32", "bfloat16", "float16")
# English and Python that every installation has, so that nothing needs to be downloaded.
_STANDARD_MODULES = ("argparse", "asyncio.tasks", "json.decoder", "logging", "subprocess", "tarfile", "typing")


def add_model_arguments(parser: argparse.ArgumentParser, *, dtypes: Sequence[str] | None = None) -> None:
    """``--model``, ``--text`` and ``--dtype``: one dtype, or several where ``dtypes`` are the default."""
    parser.add_argument("--model", type=Path, help="folder of a causal language model (config.json and weights)")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="text files to make prompts of (default: Python's own library)"
    )
    if dtypes is None:
        parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    else:
        parser.add_argument(
            "--dtype", choices=DTYPES, nargs="+", default=list(dtypes), help=f"default: {' '.join(dtypes)}"
        )


def positive(text: str) -> int:
    """An argparse type: a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def load_engine(args: argparse.Namespace, *, dtype: str, **settings: Any) -> KVBoost:
    """An engine over the model that ``--model`` names."""
    folder: Path | None = args.model
    if folder is None:
        raise BenchError("this measurement needs a model; give its folder with --model FOLDER")
    folder = folder.expanduser()
    if not (folder / "config.json").is_file():
        raise BenchError(f"there is no model in {folder}; give --model a folder that holds config.json and weights")
    say(f"loading {folder.resolve().name} as {dtype}")
    # These measurements are about exact reuse; those that move chunks say so.
    return KVBoost.from_pretrained(str(folder.resolve()), dtype=dtype, **{"quality": "exact", **settings})


class FreezableStore(MemoryStore):
    """A memory store that several engines share and that keeps nothing new while it is frozen.

    What one contestant reads would otherwise be an exact hit for the next one.
    """

    frozen = False

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``, unless frozen."""
        return PutOutcome.REFUSED if self.frozen else super().put(block)


class TextSource:
    """Token ids of real text, handed out in windows."""

    def __init__(self, tokenizer: Any, files: Sequence[Path]) -> None:
        self._tokenizer = tokenizer
        text = _read(files) if files else _standard_library()
        self.ids: list[int] = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    def window(self, start: int, length: int) -> list[int]:
        """``length`` ids from ``start`` on; a start behind the end wraps around."""
        room = len(self.ids) - length
        if room < 0:
            raise BenchError(f"the text has {len(self.ids)} tokens, {length} are needed; give longer files with --text")
        start %= room + 1
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
        raise BenchError("this Python came without the sources of its library; give text with --text FILE") from error


def wall_ms(call: Callable[[], Any]) -> float:
    """Milliseconds that ``call`` takes, seen from outside."""
    start = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - start) * 1000.0


def synchronize() -> None:
    """Wait for the accelerator, where there is one: its calls return before they are done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def alternate(
    contestants: Mapping[str, Callable[[], float]], *, repeat: int, warmups: int, label: str
) -> dict[str, list[float]]:
    """Run all contestants ``repeat`` times in turn; each returns its milliseconds. Warm-ups are not kept."""
    names = list(contestants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    progress = Progress(label, (warmups + repeat) * len(names))
    for round_number in range(-warmups, repeat):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            took = contestants[name]()
            if round_number >= 0:
                samples[name].append(took)
            progress.step()
    return samples


def first_token(engine: KVBoost, prompt: Any, *, baseline: bool = False, **arguments: Any) -> GenerationResult:
    """Ask for one greedy token: the call whose ``ttft_ms`` the measurements compare."""
    mode = GenerationMode.BASELINE if baseline else GenerationMode.CHUNK_KV_REUSE
    return engine.generate(prompt, mode=mode, max_new_tokens=1, temperature=0, **arguments)


def bare_forward(engine: KVBoost, live: Sequence[int], cache: Any) -> Callable[[], float]:
    """The physical limit: the model's own forward of only the live tokens, behind a cache already in place.

    Returns a call that gives its milliseconds and leaves the cache as it was.
    """
    device = engine.model.get_input_embeddings().weight.device
    ids = torch.tensor([list(live)], device=device)  # [1, live]

    @torch.no_grad()
    def forward() -> None:
        engine.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> float:
        took = wall_ms(forward)
        cache.crop(-len(live))
        return took

    return run
