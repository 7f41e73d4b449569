"""Models, texts to make prompts of, clocks, and contestants that alternate, for the benchmarks that need a model.

Invariant: contestants alternate within one run, and who runs behind whom changes, so that none profits from what
another left in the caches.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.common.report import BenchError, Progress
from kvboost.bench.report import say
from kvboost.engine import KVBoost
from kvboost.steps import Numerics
from kvboost.store import MemoryStore
from kvboost.types import GenerationMode, GenerationResult, KVBlock, PutOutcome

DTYPES = ("float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser, *, dtypes: Sequence[str] | None = None) -> None:
    """A model, texts, and one dtype, or several where ``dtypes`` are the default."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--text", type=Path, nargs="+", help="text files to make prompts of (default: Python's own library)"
    )
    if dtypes is None:
        parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    else:
        parser.add_argument(
            "--dtype", choices=DTYPES, nargs="+", default=list(dtypes), help=f"default: {' '.join(dtypes)}"
        )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--device`` and ``--numerics``."""
    parser.add_argument("--model", type=Path, help="folder of a causal language model (config.json and weights)")
    parser.add_argument("--device", help="where it runs, as cuda or cpu (default: the accelerator, if there is one)")
    parser.add_argument("--numerics", choices=get_args(Numerics), help="default: by the device")


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 0.15 for 15 % of the tokens")
    return value


def positive(text: str) -> int:
    """An argparse type: a whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def model_folder(args: argparse.Namespace) -> Path:
    """The folder that ``--model`` names."""
    folder: Path | None = args.model
    if folder is None:
        raise BenchError("this benchmark needs a model; give its folder with --model FOLDER")
    folder = folder.expanduser()
    if not (folder / "config.json").is_file():
        raise BenchError(f"there is no model in {folder}; give --model a folder that holds config.json and weights")
    return folder.resolve()


def load_engine(args: argparse.Namespace, *, dtype: str, **settings: Any) -> KVBoost:
    """An engine over the model that ``--model`` names."""
    folder = model_folder(args)
    say(f"loading {folder.name} as {dtype}")
    # Most benchmarks are about exact reuse; those of non-prefix reuse say so.
    settings = {"quality": "exact", "numerics": args.numerics, **settings}
    return KVBoost.from_pretrained(str(folder), dtype=dtype, device=args.device, **settings)


def engine_beside(engine: KVBoost, **settings: Any) -> KVBoost:
    """Another engine around the same model, with the same numerics."""
    return KVBoost(engine.model, engine.tokenizer, **{"numerics": engine.config.numerics, **settings})


class FreezableStore(MemoryStore):
    """A memory store that several engines share and that keeps nothing new while it is frozen.

    What one contestant computes would otherwise be an exact hit for the next one.
    """

    frozen = False

    def put(self, block: KVBlock) -> PutOutcome:
        """Keep ``block``, unless frozen."""
        return PutOutcome.REFUSED if self.frozen else super().put(block)


def wall_ms(call: Callable[[], Any]) -> float:
    """Milliseconds that ``call`` takes, seen from outside."""
    start = time.perf_counter()
    call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # its calls return before they are done
    return (time.perf_counter() - start) * 1000.0


def bare_forward(engine: KVBoost, query: Sequence[int], cache: Any) -> Callable[[], float]:
    """The floor: the model's own forward of the query tokens alone, behind a cache already in place.

    Returns a call that gives its milliseconds and leaves the cache as it was.
    """
    device = engine.model.get_input_embeddings().weight.device
    ids = torch.tensor([list(query)], device=device)  # [1, query]

    @torch.no_grad()
    def forward() -> None:
        engine.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> float:
        took = wall_ms(forward)
        cache.crop(-len(query))
        return took

    return run


def joined(parts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """All tokens, and where every part ends."""
    tokens: list[int] = []
    ends: list[int] = []
    for part in parts:
        tokens += part
        ends.append(len(tokens))
    return tokens, ends


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
