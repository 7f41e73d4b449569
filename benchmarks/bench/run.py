"""Runs workloads: a rival and our engine get the same prompts in turn, request by request.

Called by :mod:`benchmarks.approx.bench`. A unit is one workload against one rival; it is written when it is done, so
that a run can be continued. Invariants: who goes first changes with every request; nobody else runs meanwhile; the same
prompts are asked again with empty caches (the cold control); what keeps logits is not timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench.contestants import OURS, RIVALS, Contestant, Missing, how_to_add
from benchmarks.bench.summary import left_out, pairings
from benchmarks.bench.workloads import RECIPES, TextRequest, build, with_text
from benchmarks.common.journal import Journal, Kind, check_same
from benchmarks.common.report import BenchError, Progress
from benchmarks.internals import ModelSource, break_table, load_tokenizer
from kvboost import __version__
from kvboost.bench.compare import EXACT, Sample, quality_settings, spread_out, take_turns
from kvboost.bench.mine import hit_rates
from kvboost.bench.report import Spread, say
from kvboost.bench.workloads import Writer, encode

KIND = Kind("kvboost bench", 3, ("workload", "rival", "repeat"))
CAPACITY, RECOMPUTE = "(capacity)", "(recompute)"
"""In place of a rival: units that measure our engine alone."""
SKIPPED = "(skipped)"
"""In place of a workload: why a rival was left out."""
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_RATIOS = (0.0, 0.15, 0.5, 1.0)  # of moved tokens, for the units of RECOMPUTE


@dataclass(frozen=True)
class Options:
    """How a run is made; ``settings`` are what a file of samples is begun with."""

    model: str
    dtype: str = "auto"
    tokens: int = 2000
    new: int = 16
    repeat: int = 1
    seed: int = 1
    cold: int = 3
    """Prompts of each workload that are asked with empty caches."""
    quality: str = "fast"
    """Of the second engine of ours, where text moves; ``exact`` leaves it out."""
    data: Path | None = None
    gguf: Path | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    """The Python of each rival that has its own environment."""

    def settings(self) -> dict[str, Any]:
        """What all samples of a file have in common."""
        same = {name: getattr(self, name) for name in ("dtype", "tokens", "new", "seed", "cold", "quality")}
        data = f"{self.data.name} {_digest(self.data)}" if self.data is not None else None
        path = ModelSource(self.model).path
        about = {"model": Path(path).resolve().name, "files": _files_digest(path), "data": data}
        return {**about, "kvboost": __version__, **same}

    def engine(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What our process is given."""
        return {"model": ModelSource(self.model).path, "dtype": self.dtype, "engine": dict(settings)}

    def rival(self, longest: int) -> dict[str, Any]:
        """What a rival's process is given."""
        path = ModelSource(self.model).path
        gguf = str(self.gguf.expanduser()) if self.gguf is not None else None
        return {"model": path, "dtype": self.dtype, "gguf": gguf, "max_tokens": longest + self.new}


def _files_digest(model: str) -> str:
    """Tells models of one name apart: by their settings and the sizes of their weights, or by their hub name."""
    folder = Path(model)
    if not folder.is_dir():
        return hashlib.sha256(model.encode()).hexdigest()[:16]
    config = folder / "config.json"
    weights = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS)
    told = [
        config.read_text(encoding="utf-8") if config.is_file() else "",
        *((f.name, f.stat().st_size) for f in weights),
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _digest(file: Path | None) -> str | None:
    """Tells files of one name apart; None if it cannot be read, of which its reader complains."""
    if file is None:
        return None
    try:
        with file.expanduser().open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError:
        return None


def _without_folders(text: str) -> str:
    """Paths cut down to their last part: results name no folder."""
    return re.sub(r"(?<![\w:/.~])~?(?:/[^\s/'\"]+)+/(?=[^\s/'\"])", "", text)


def ours(quality: str) -> str:
    """What our engine is called in samples and tables."""
    return f"{OURS} {quality}"


class Bench:
    """One run over a file of samples."""

    def __init__(self, options: Options, journal: Journal) -> None:
        self._options, self._journal = options, journal
        say(f"loading the tokenizer of {options.model}")
        self._tokenizer = load_tokenizer(ModelSource(options.model))
        self._built: dict[tuple[str, int], list[TextRequest]] = {}

    def run(self, workloads: Sequence[str], rivals: Sequence[str], *, alone: bool) -> list[str]:
        """Measure what is not in the file yet; ``alone`` adds the units without rivals. Returns who was left out."""
        reasons: list[str] = []
        missing = {
            rival: [unit for unit in self._units(workloads) if (unit[0], rival, unit[1]) not in self._journal]
            for rival in rivals
        }
        progress = Progress("whole run", sum(map(len, missing.values())))
        with ExitStack() as stack:
            started: dict[str, Contestant] = {}
            for rival, units in missing.items():
                if not units:
                    continue
                try:
                    self._check_given(rival)
                    # Ours goes first: rivals are given its dtype, as their "auto" may be another.
                    dtype = self._ours(units[0][0], started, stack)[ours(EXACT)].dtype
                    with self._rival(rival, workloads, dtype) as contestant:
                        setup = self._setup(contestant)
                        for workload, repeat in units:
                            others = self._ours(workload, started, stack)
                            compared = not self._compared(workload, repeat)
                            unit = Unit({rival: contestant, **others}, self._options, compared=compared)
                            label = f"{workload} against {rival}"
                            sample = unit.run(self._requests(workload, repeat), RECIPES[workload].moves, label)
                            key = {"workload": workload, "rival": rival, "repeat": repeat}
                            self._journal.add({**key, "setup": setup, **sample})
                            _say_ratios(self._journal.samples[-1])
                            progress.step()
                except Missing as error:
                    progress.leave(sum((unit[0], rival, unit[1]) not in self._journal for unit in units))
                    reasons.append(str(error))
                    self._skip(rival, str(error))
        if alone:
            self._alone(workloads)
        return reasons

    def _skip(self, rival: str, reason: str) -> None:
        """Say and keep why a rival is left out, once if it is as before."""
        say(f"skipped {reason}")
        reason = _without_folders(reason)
        if left_out(self._journal.samples).get(rival) != reason:
            self._journal.add({"workload": SKIPPED, "rival": rival, "repeat": 0, "skipped": reason})

    def _setup(self, rival: Contestant) -> dict[str, Any]:
        """What a rival ran on. Raises BenchError if its samples in the file ran on something else."""
        python = self._options.pythons.get(rival.name)
        setup = {
            "python": hashlib.sha256(os.path.abspath(python).encode()).hexdigest()[:16] if python is not None else None,
            "gguf": _digest(self._options.gguf) if rival.name == "llama-cpp" else None,
            "threads": rival.threads,
            **rival.versions,
        }
        for sample in self._journal.samples:
            if sample["rival"] == rival.name and "setup" in sample:
                check_same(f"{rival.name} was measured with", sample["setup"], setup)
        return setup

    def _compared(self, workload: str, repeat: int) -> bool:
        """Whether ours was compared with itself here, beside any rival: one of them is enough."""
        return any(
            (sample["workload"], sample["repeat"]) == (workload, repeat) and sample.get("bitwise") is not None
            for sample in self._journal.samples
        )

    def _units(self, workloads: Sequence[str]) -> list[tuple[str, int]]:
        return [(workload, repeat) for repeat in range(self._options.repeat) for workload in workloads]

    def _requests(self, workload: str, repeat: int) -> list[TextRequest]:
        if (workload, repeat) not in self._built:
            options = self._options
            self._built[workload, repeat] = build(
                workload, self._tokenizer, tokens=options.tokens, seed=options.seed + repeat, data=options.data
            )
        return self._built[workload, repeat]

    def _check_given(self, name: str) -> None:
        if RIVALS[name].own_python and name not in self._options.pythons:
            raise Missing(f"{name}: {how_to_add(name)}")

    @contextmanager
    def _rival(self, name: str, workloads: Sequence[str], dtype: str | None) -> Iterator[Contestant]:
        python = self._options.pythons.get(name)
        longest = max(len(request.tokens) for unit in self._units(workloads) for request in self._requests(*unit))
        settings = {**self._options.rival(longest), "dtype": dtype}
        with self._warm(Contestant(name, settings, python=python)) as contestant:
            yield contestant

    def _ours(self, workload: str, started: dict[str, Contestant], stack: ExitStack) -> dict[str, Contestant]:
        """Our engines for this workload; they stay for the next."""
        qualities = [EXACT]
        if RECIPES[workload].moves and self._options.quality != EXACT:
            qualities.append(self._options.quality)
        for quality in qualities:
            if quality not in started:
                started[quality] = stack.enter_context(self._engine(quality_settings(quality)))
        return {ours(quality): started[quality] for quality in qualities}

    def _engine(self, settings: Mapping[str, Any]) -> Contestant:
        return self._warm(Contestant(OURS, self._options.engine(settings)))

    def _warm(self, contestant: Contestant) -> Contestant:
        """The contestant after a request that nobody counts: first calls of kernels and of memory."""
        # Not cut: of a cut text a rival's tokenizer may make other tokens.
        text = Writer(self._tokenizer, seed=-1).words(self._options.tokens // 2)
        order = _order(with_text(encode(self._tokenizer, text), self._tokenizer), new=2)
        try:
            contestant.ask("generate", **order)
            contestant.ask("forget")
        except (BenchError, Missing):
            contestant.close()
            raise
        return contestant

    def _alone(self, workloads: Sequence[str]) -> None:
        """Hit rate against capacity, and quality against positions recomputed."""
        breaks = break_table(self._tokenizer)
        for workload in workloads:
            if (workload, CAPACITY, 0) not in self._journal:
                rates = hit_rates([(r.tokens, r.boundaries) for r in self._requests(workload, 0)], breaks)
                self._journal.add({"workload": workload, "rival": CAPACITY, "repeat": 0, "rates": rates})
            wanted = workload == "rag" and self._options.quality != EXACT
            if wanted and (workload, RECOMPUTE, 0) not in self._journal:
                points = [self._recomputed(self._requests(workload, 0), ratio) for ratio in _RATIOS]
                self._journal.add({"workload": workload, "rival": RECOMPUTE, "repeat": 0, "points": points})

    def _recomputed(self, requests: Sequence[TextRequest], ratio: float) -> dict[str, Any]:
        """The quality of answers with this share of the moved tokens recomputed."""
        how: dict[str, Any] = {"recompute_ratio": ratio} if ratio else {"recompute_strategy": "none"}
        progress = Progress(f"quality with {ratio:.0%} recomputed", len(requests))
        found = []
        with self._engine({"quality": "fast", "force_approx": True, **how}) as contestant:
            for request in requests:
                answer = contestant.ask("generate", **_order(request, new=self._options.new), compare=True)
                if "quality" in answer:
                    found.append({**answer["quality"], "recomputed": answer["recomputed"] / answer["moved"]})
                progress.step()
        return {"ratio": ratio, "requests": found}


def _say_ratios(sample: Mapping[str, Any]) -> None:
    """What a unit has shown, while others are still to come."""
    for found in pairings([sample]):
        faster = Spread.of(found.ratio()).text()
        say(f"{found.workload} against {found.rival}: first tokens {faster} times as fast with quality {found.engine}")


def _order(request: TextRequest, *, new: int) -> dict[str, Any]:
    return {"tokens": request.tokens, "text": request.text, "boundaries": request.boundaries, "new": new}


class Unit:
    """One workload on some contestants in turn."""

    def __init__(self, contestants: Mapping[str, Contestant], options: Options, *, compared: bool) -> None:
        """``compared`` asks approximate engines once more, untimed, to compare their answers with full ones.

        That takes as long as plain Transformers.
        """
        self._contestants, self._options, self._compared = contestants, options, compared
        own = next(one.dtype for one in contestants.values() if one.name == OURS)
        for one in contestants.values():
            if one.dtype not in (own, None):
                raise Missing(
                    f"{one.name}: it runs in {one.dtype} and ours in {own}, which is no comparison; set --dtype"
                )

    def run(self, requests: Sequence[TextRequest], moves: bool, label: str) -> dict[str, Any]:
        """Warm in the order of the workload, then the cold control, then what is not timed."""
        chosen = spread_out(requests, self._options.cold)
        approximate = [name for name, one in self._contestants.items() if one.name == OURS and name != ours(EXACT)]
        again = approximate if self._compared else []
        steps = (len(requests) + len(chosen)) * len(self._contestants) + len(requests) * len(again)
        progress = Progress(label, steps)
        reset = {name: one.ask("forget", reset_peak=True) for name, one in self._contestants.items()}
        warm = self._asked(requests, progress, moves=moves)
        cold = self._asked(chosen, progress, moves=moves, cold=True)
        peaks = {name: one.ask("status")["rss_peak"] for name, one in self._contestants.items()}
        for name in again:
            self._compare(self._contestants[name], requests, warm[name], progress)
        return {
            "prompts": [len(request.tokens) for request in requests],
            "counts": [request.counts for request in requests],
            "warm": warm,
            "cold": cold,
            "rss_peak": peaks,
            "rss_reset": {name: bool(answer.get("peak_reset")) for name, answer in reset.items()},
            "bitwise": self._bitwise(requests[len(requests) // 2]),
            "versions": {name: one.versions for name, one in self._contestants.items()},
            "dtypes": {name: one.dtype for name, one in self._contestants.items()},
            "threads": {name: one.threads for name, one in self._contestants.items()},
        }

    def _asked(
        self, requests: Sequence[TextRequest], progress: Progress, *, moves: bool, cold: bool = False
    ) -> dict[str, list[Sample]]:
        """Everyone's answers. Cold ones have one token: their time is the prompt's and what it takes to keep its KV."""
        asked = {name: partial(self._ask, one, moves=moves, cold=cold) for name, one in self._contestants.items()}
        return take_turns(asked, requests, progress.step)

    def _ask(self, contestant: Contestant, request: TextRequest, *, moves: bool, cold: bool) -> dict[str, Any]:
        if cold:
            contestant.ask("forget")
        order = _order(request, new=1 if cold else self._options.new)
        return contestant.ask("generate", **order, moves=moves)

    def _compare(
        self, engine: Contestant, requests: Sequence[TextRequest], answers: Sequence[Any], progress: Progress
    ) -> None:
        """The same requests from the beginning, so that the same is reused; adds ``quality`` to the timed answers."""
        engine.ask("forget")
        for request, answer in zip(requests, answers, strict=True):
            found = engine.ask("generate", **_order(request, new=self._options.new), compare=True)
            if "quality" in found:
                answer["quality"] = found["quality"]
            progress.step()

    def _bitwise(self, request: TextRequest) -> bool | None:
        """Whether a warm run of ours has a cold one's bits; None where it is not asked."""
        engine = self._contestants.get(ours(EXACT))
        if not self._compared or engine is None:
            return None
        return bool(engine.ask("verify", tokens=request.tokens)["bitwise"])
