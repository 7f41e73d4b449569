"""Every causal language model of the installed Transformers, tiny and random: does it run, is it served, warm as cold?

Each family is built, run and served in a process of its own, with a time limit, so that one that crashes or hangs ends
nothing. The outcome of each is compared with the one that is expected (families.json).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Cache, EncoderDecoderCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.common.family_configs import tiny_config
from benchmarks.common.measure import positive
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.engine import KVBoost
from kvboost.errors import UnsupportedModelError

EXPECTED = Path(__file__).with_name("families.json")
KINDS = (  # one or two of every kind, for the short form
    "llama",
    "qwen2",
    "gpt2",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_5_text",
    "mamba2",
    "recurrent_gemma",
    "openai-gpt",
    "mpt",
    "musicgen",
)
QUICK = {"families": list(KINDS)}

_SECONDS = 300
_TO_END = 5  # seconds that a process may take to end once it has answered, or was given up
_KNOWN, _QUESTION, _NEW = 300, 20, 12  # tokens
_ROUNDING = 1e-5  # relative to the largest logit
_SERVED = ("equal", "rounding")
_NOBODYS = "**nobody's**"
_WRONG = {"differs", "no hit"}  # whatever is expected
_CACHES = {
    "DynamicLayer": "attention",
    "DynamicSlidingWindowLayer": "sliding window",
    "DynamicIndexedLayer": "sparse attention",
    "DummyLayer": "layers without KV",
    "LinearAttentionLayer": "state",
    "LinearAttentionAndFullAttentionLayer": "attention and state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding window and state",
}
_OUTCOMES = {
    "equal": "served, warm equal to cold in every bit",
    "rounding": f"served, warm equal to cold within {_ROUNDING:g} of the largest logit",
    "differs": "served, and **warm differs from cold or from plain Transformers**",
    "no hit": "served, but **what was read before is computed again**",
    "refused": "refused with a reason; it runs without reuse",
    "no cache": "refused, as a forward of it returns no cache of Transformers' kind; it runs without reuse",
    "error": "**the engine fails**",
    "not run": "plain Transformers does not run it as it was built here",
}
_PAGE = """# Families

Every causal language model of the installed Transformers, tiny and random (hidden size 64, four layers), in a process
of its own: run plain, then served with a text read before (warm) and without it (cold). Equal in every bit are the
logits of the last token, at one length; `exactness_families` compares KV rows and states at random ones, for 27
families and shapes. This page is written by

```bash
OMP_NUM_THREADS=1 python -m benchmarks families --page docs/results/families.md
```

`--write-expected` keeps the outcomes as expected ones, in `benchmarks/exact/families.json`. The short form (`--quick`)
runs in the tests with one or two families of every kind, and a test fails if Transformers has a family that the file
does not know.

"""


@dataclass(frozen=True)
class Outcome:
    """What became of one family."""

    family: str
    outcome: str = "not run"
    layers: str = ""
    """What its cache has, and whether it is a mixture of experts."""
    hit: int = 0
    """Tokens of the prompt that a second request did not compute."""
    difference: float = 0.0
    """Largest one between warm and cold logits, relative to the largest logit."""
    greedy: str = "-"
    """Whose greedy tokens the engine's are."""
    reason: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--families", nargs="+", metavar="NAME", default=list(names()), help="default: all")
    parser.add_argument("--seconds", type=positive, default=_SECONDS, help=f"limit for each (default {_SECONDS})")
    parser.add_argument("--write-expected", action="store_true", help=f"write what comes out to {EXPECTED.name}")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write docs/results/families.md")


def names() -> tuple[str, ...]:
    """The families that the installed Transformers has."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_expected() -> dict[str, str]:
    """The outcome that each family should have."""
    known: dict[str, str] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return known


def run(args: argparse.Namespace) -> Report:
    """Each family in turn; the claim fails if one has another outcome than expected."""
    if unknown := set(args.families) - set(names()):
        raise BenchError(f"Transformers {transformers.__version__} has no causal language model {sorted(unknown)}")
    progress, outcomes = Progress("families", len(args.families)), []
    with tempfile.TemporaryDirectory(prefix="kvboost-families-") as measured:
        for family in args.families:
            outcomes.append(_in_a_process(family, measured, args.seconds))
            progress.step()
    found = {outcome.family: outcome.outcome for outcome in outcomes}
    if args.write_expected:
        kept = {family: known for family, known in read_expected().items() if family in names()}
        EXPECTED.write_text(json.dumps(dict(sorted({**kept, **found}.items())), indent=1) + "\n", encoding="utf-8")
    expected = read_expected()
    others = {family: outcome for family, outcome in found.items() if expected.get(family) != outcome}
    wrong = others or _WRONG.intersection(found.values())
    report = Report("families", failed=bool(wrong), raw={"outcomes": [asdict(outcome) for outcome in outcomes]})
    _count(report, outcomes)
    _list(report, outcomes)
    report.tables[0].notes += [f"**{name}: {what}, expected: {expected.get(name)}.**" for name, what in others.items()]
    if args.page is not None:
        args.page.expanduser().write_text(_PAGE + report.markdown(), encoding="utf-8")
    return report


def _in_a_process(family: str, measured: str, seconds: int) -> Outcome:
    """The outcome that a process of its own sends, or what became of the process."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # imported once: a fork of it starts at once
    receiving, sending = processes.Pipe(duplex=False)
    process = processes.Process(target=_send, args=(sending, family, measured), daemon=True)
    process.start()
    sending.close()  # so that the end of the process is the end of the pipe
    try:
        if receiving.poll(seconds):
            outcome: Outcome = receiving.recv()
            return outcome
        return Outcome(family, reason=f"not done after {seconds} s")
    except EOFError:
        process.join()
        return Outcome(family, reason=f"its process ended with {process.exitcode}")
    finally:
        process.join(_TO_END)
        process.kill()
        process.join()


def _send(sending: Connection, family: str, measured: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["KVBOOST_CACHE_HOME"] = measured  # of the same names in every run
    torch.set_num_threads(1)
    sending.send(look_at(family))


def look_at(family: str) -> Outcome:
    """Build it, run it plain, serve it."""
    torch.manual_seed(0)
    stage = "built"
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
        stage = "run"
        prompt = torch.randint(3, 500, (1, _KNOWN + _QUESTION), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            output = model(input_ids=prompt, use_cache=True)
        if not torch.isfinite(output.logits).all():
            raise ArithmeticError("its logits are not finite")
        plain = model.generate(prompt, do_sample=False, max_new_tokens=_NEW)[0, prompt.shape[1] :].tolist()
    except Exception as error:  # noqa: BLE001
        return Outcome(family, reason=f"not {stage}: {_one_line(error)}")
    return _serve(Outcome(family, layers=", ".join(_layers(model, output))), model, prompt, plain)


def _serve(outcome: Outcome, model: Any, prompt: torch.Tensor, plain: list[int]) -> Outcome:
    """The same prompt cold, and behind its first tokens warm."""
    tokens = prompt[0].tolist()
    try:
        with KVBoost(model) as engine:
            cold = engine.prefill(tokens).logits
            engine.clear()
            engine.warm(tokens[:_KNOWN])
            warm = engine.prefill(tokens)
            answer = engine.generate(tokens, max_new_tokens=_NEW, temperature=0)
    except UnsupportedModelError as error:
        reason = str(error).removeprefix(f"{model.config.get_text_config(decoder=True).model_type} ")
        return _without_reuse(replace(outcome, reason=reason.partition(" Pass strict=False")[0]), model, prompt, plain)
    except Exception as error:  # noqa: BLE001
        return replace(outcome, outcome="error", reason=_one_line(error))
    difference = float((warm.logits - cold).abs().max() / cold.abs().max())
    greedy, hit = _whose(answer.token_ids, model, prompt, plain), warm.reuse.exact_tokens
    if not hit:
        verdict = "no hit"
    elif greedy == _NOBODYS or not difference <= _ROUNDING:  # written so that NaN differs
        verdict = "differs"
    else:
        verdict = "equal" if torch.equal(warm.logits, cold) else "rounding"
    return replace(outcome, outcome=verdict, hit=hit, difference=difference, greedy=greedy)


def _without_reuse(outcome: Outcome, model: Any, prompt: torch.Tensor, plain: list[int]) -> Outcome:
    """A refused model answers as plain Transformers does."""
    try:
        with KVBoost(model, strict=False) as engine:
            answer = engine.generate(prompt[0].tolist(), max_new_tokens=_NEW, temperature=0)
    except Exception as error:  # noqa: BLE001
        return replace(outcome, outcome="error", reason=f"{outcome.reason} Without reuse: {_one_line(error)}")
    greedy = _whose(answer.token_ids, model, prompt, plain)
    verdict = "differs" if greedy == _NOBODYS else "refused" if outcome.layers else "no cache"
    return replace(outcome, outcome=verdict, greedy=greedy)


def _whose(tokens: Sequence[int], model: Any, prompt: torch.Tensor, plain: list[int]) -> str:
    """Whose greedy tokens these are. Transformers' own cache changes those of one family beyond its window."""
    if list(tokens) == plain:
        return "plain's"
    whole = model.generate(prompt, do_sample=False, max_new_tokens=_NEW, use_cache=False)
    return "plain's without a cache" if list(tokens) == whole[0, prompt.shape[1] :].tolist() else _NOBODYS


def _layers(model: Any, output: Any) -> list[str]:
    """The kinds of layers that a forward filled a Transformers cache with; none if there is no such cache."""
    cache = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache) or not cache.layers:
        return []
    classes = sorted({type(layer).__name__ for layer in cache.layers})
    experts = any("expert" in name for name, _ in model.named_parameters())
    return [*(_CACHES.get(name, name) for name in classes), *(["experts"] if experts else [])]


def _one_line(error: Exception) -> str:
    """Its kind and the beginning of what it says."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words if len(words) < 240 else words[:240] + ' ...'}"


def _count(report: Report, outcomes: Sequence[Outcome]) -> None:
    table = report.table("Causal language models of Transformers, by outcome", ["outcome", "families"], dtype="float32")
    counts = Counter(outcome.outcome for outcome in outcomes)
    for name, meaning in _OUTCOMES.items():
        if counts[name]:
            table.add(meaning, counts[name])
    plain = [outcome for outcome in outcomes if outcome.outcome != "not run"]
    cached = [outcome for outcome in plain if outcome.layers]
    served = [outcome for outcome in cached if outcome.outcome in _SERVED]
    table.add("all", len(outcomes))
    table.notes.append(
        f"{len(plain)} of {len(outcomes)} run plain; {len(cached)} of those fill a Transformers cache, "
        f"and {len(served)} of those are served."
    )


def _list(report: Report, outcomes: Sequence[Outcome]) -> None:
    table = report.table("Each family", ["family", "cache", "outcome", "hit", "difference", "greedy"], dtype="float32")
    for outcome in outcomes:
        hit = outcome.outcome in (*_SERVED, "no hit") or outcome.hit > 0
        table.add(
            outcome.family,
            outcome.layers or "-",
            outcome.outcome,
            outcome.hit if hit else "-",
            f"{outcome.difference:.0e}" if outcome.difference else "0" if hit else "-",
            outcome.greedy,
        )
    table.notes += [
        "cache: what its layers keep between tokens. hit: tokens that the second request did not compute, of the "
        f"{_KNOWN} that were read before. difference: warm against cold logits behind {_QUESTION} more tokens, "
        f"relative to the largest. greedy: whose {_NEW} greedy tokens the engine gives, with reuse or, where refused, "
        "without it.",
        "",
        *(f"- {outcome.family}, {outcome.outcome}: {outcome.reason}" for outcome in outcomes if outcome.reason),
    ]
