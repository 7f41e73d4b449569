"""``kvboost bench``: what exact reuse does with one's own model, in bits, tokens and time to the first token.

Called by :mod:`kvboost.cli.main`. A document of real text is asked several questions. Invariant: plain Transformers, a
cold and a warm request get the same tokens and alternate in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvboost.bench.measure import TextSource, alternate, first_token
from kvboost.bench.report import BenchError, Report, Spread, ratios, say
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode

_PLAIN, _COLD, _WARM = "plain Transformers", "cold: nothing stored", "warm: document stored"
_QUESTION_TOKENS = 32
_ANSWER_TOKENS = 16
_WARMUPS = 1


def compare(
    model: str, *, texts: Sequence[Path] = (), tokens: int = 2000, repeat: int = 5, dtype: str = "auto"
) -> Report:
    """Exactness and speed with ``repeat`` questions behind a document of ``tokens`` tokens.

    The report is ``failed`` if a warm request that is promised to be bitwise differs from a cold one.
    """
    if tokens < 2 * _QUESTION_TOKENS:
        raise BenchError(f"--tokens {tokens} is too short to show anything; give {2 * _QUESTION_TOKENS} or more")
    say(f"loading {model}")
    with KVBoost.from_pretrained(model, dtype=dtype, quality="exact") as engine:
        source = TextSource(engine.tokenizer, texts)
        document = source.window(0, tokens)
        questions = [
            source.window(tokens + number * _QUESTION_TOKENS, _QUESTION_TOKENS) for number in range(_WARMUPS + repeat)
        ]
        report = Report("bench")
        about = {"dtype": str(engine.model.dtype).removeprefix("torch."), "model": model}
        speed = report.table(
            f"Time to the first token: {tokens} tokens and a question of {_QUESTION_TOKENS}",
            ["request", "reused", "TTFT ms", "plain / this"],
            **about,
        )
        times, reused = _times(engine, document, questions)
        for name, samples in times.items():
            against = Spread.of(ratios(times[_PLAIN], samples)).text()
            speed.add(name, reused[name], Spread.of(samples).text(0), against)
        speed.notes.append(f"Median [lowest highest] of {repeat} questions, each asked in every way, in turn.")
        exact = report.table("Exactness", ["warm request", "compared", "equal"], **about)
        report.raw = {"ttft_ms": times, "exactness": _exactness(engine, document, questions[_WARMUPS:])}
        for name, (compared, equal) in report.raw["exactness"].items():
            exact.add(name, compared, equal)
        bitwise, equal = report.raw["exactness"]["logits to the bit, where that is promised, as cold"]
        report.failed = equal < bitwise
        exact.notes.append(
            "Greedy tokens may differ from plain Transformers where two logits are all but equal: other shapes round "
            "differently. Bits are promised where `reuse.bitwise` says so."
        )
    return report


def _times(
    engine: KVBoost, document: list[int], questions: Sequence[list[int]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds to the first token of each way, and the tokens it reused."""
    asked = dict.fromkeys((_PLAIN, _COLD, _WARM), 0)
    reused = dict.fromkeys(asked, 0)

    def ask(name: str) -> float:
        engine.clear()  # the same question was asked in another way before, and is stored too
        if name == _WARM:
            engine.warm(document, boundaries=[len(document)])
        prompt = [*document, *questions[asked[name]]]
        asked[name] += 1
        result = first_token(engine, prompt, baseline=name == _PLAIN, boundaries=[len(document)])
        reused[name] = result.cached_tokens
        return result.ttft_ms

    contestants = {name: lambda name=name: ask(name) for name in asked}
    times = alternate(contestants, repeat=len(questions) - _WARMUPS, warmups=_WARMUPS, label="requests")
    return times, reused


def _exactness(engine: KVBoost, document: list[int], questions: Sequence[list[int]]) -> dict[str, tuple[int, int]]:
    """How many were compared and how many were equal, of each kind."""
    bitwise = bits = tokens = 0
    for question in questions:
        prompt, boundaries = [*document, *question], [len(document)]
        engine.clear()
        cold = engine.prefill(prompt, boundaries=boundaries).logits
        engine.clear()
        engine.prefill(document, boundaries=boundaries)  # not warm(): its workspace would spare the copy from the store
        warm = engine.prefill(prompt, boundaries=boundaries)
        bitwise += warm.reuse.bitwise
        bits += warm.reuse.bitwise and torch.equal(cold, warm.logits)
        answers = [
            engine.generate(prompt, mode=mode, boundaries=boundaries, max_new_tokens=_ANSWER_TOKENS, temperature=0)
            for mode in (GenerationMode.CHUNK_KV_REUSE, GenerationMode.BASELINE)
        ]
        tokens += answers[0].token_ids == answers[1].token_ids
    return {
        "logits to the bit, where that is promised, as cold": (bitwise, bits),
        f"greedy answers of {_ANSWER_TOKENS} tokens, as plain Transformers": (len(questions), tokens),
    }
