"""The yardstick through vLLM: how far answers over moved passages are from a full reading, with our connector.

The prompts, the history (`reordered`) and the figures of `yardstick`; the full reading is that of vLLM alone. There is
one engine for each share of recomputed tokens. It is fed the full reading's answer, and where a best token differs it
also gives its own. `--out` is a file of the same kind: `yardstick --report` puts it beside those of the Transformers
engine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.approx.yard.tables import KIND, report_of
from benchmarks.approx.yardstick import data_digest
from benchmarks.common import rag
from benchmarks.common.journal import Journal
from benchmarks.common.measure import positive, share
from benchmarks.common.quality import agreement, best_f1, harm
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.vllm_engine import VLLMEngine, vllm_python
from kvboost.bench.report import describe_machine

QUICK = {"prompts": 1, "tokens": 4, "ratios": [0.0]}
_HISTORY = "reordered"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="an environment with vLLM and kvboost")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    rag.add_arguments(parser)
    parser.set_defaults(prompts=12)
    parser.add_argument("--ratios", type=share, nargs="+", default=[0.15, 0.0], help="recomputed (default 0.15 0)")
    parser.add_argument("--tokens", type=positive, default=24, help="tokens of an answer at most (default 24)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append every sample to FILE, and skip those in it")


def run(args: argparse.Namespace) -> Report:
    """Measure what is not in the file yet, then print the tables."""
    if args.model is None:
        raise BenchError("give --model FOLDER")
    vllm_python(args.vllm_venv)
    from transformers import AutoTokenizer, GenerationConfig

    folder = args.model.expanduser()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    sizes = {"passages": args.passages, "whole_passages": args.whole_passages}
    prompts = rag.load_prompts(tokenizer, args.data, count=args.prompts, **sizes)
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    settings = {
        "model": f"{machine.model} in vLLM",
        "dtype": args.dtype,
        "data": data_digest(args.data),
        **sizes,
        "tokens": args.tokens,
        "timed": False,
    }
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = stack.enter_context(_engine(args, None))
        machine = replace(machine, **{name: alone.versions[name] for name in ("torch", "transformers")})
        journal = stack.enter_context(Journal(args.out.expanduser() if args.out else None, KIND, settings, machine))
        through = _Through(alone, tokenizer, {ends} if isinstance(ends, int) else set(ends or ()), place, args.tokens)
        for ratio in args.ratios:
            label = f"cacheblend={ratio:g}" if ratio else "none"
            left = [number for number in range(len(prompts)) if (number, _HISTORY, label) not in journal]
            progress = Progress(f"vLLM, {label}", len(left))
            with _engine(args, {"mode": "approximate", "recompute_ratio": ratio}) as ours:
                for number in left:
                    sample = through.measure(ours, prompts[number])
                    journal.add({"prompt": number, "history": _HISTORY, "strategy": label, **sample})
                    progress.step()
        return report_of([(journal.header, journal.samples)])


def _engine(args: argparse.Namespace, connector: dict[str, Any] | None) -> VLLMEngine:
    return VLLMEngine(
        vllm_python(args.vllm_venv), args.model.expanduser(), connector=connector, dtype=args.dtype, watched=True
    )


class _Through:
    """The full readings, and what is compared with them."""

    def __init__(self, alone: VLLMEngine, tokenizer: Any, ends: set[int], place: Path, tokens: int) -> None:
        self._alone, self._tokenizer, self._ends, self._tokens = alone, tokenizer, ends, tokens
        self._file = place / "logits.npy"
        self._full: dict[str, tuple[list[int], torch.Tensor]] = {}

    def measure(self, ours: VLLMEngine, prompt: rag.RagPrompt) -> dict[str, Any]:
        """What is found of a prompt whose passages were read in another order, and how near its answer is."""
        answer, full = self._full_reading(prompt)
        ours.generate(rag.in_another_order(prompt)[0], new=1, params={"kvboost": "exact"})
        before = ours.counts()
        logits = self._logits(ours, prompt, new=len(answer), forced=answer)
        counts = ours.counts() - before
        moved, recomputed = counts["moved_tokens"], counts["recomputed_tokens"]
        own = answer
        if logits.argmax(dim=-1).tolist() != answer:
            own = self._cut(ours.generate(prompt.tokens, new=self._tokens)[0]["tokens"])
        said, reference = self._text(own), self._text(answer)
        return {
            "reused": moved > 0,
            "found": (moved + recomputed) / prompt.passage_tokens,
            "exact_tokens": counts["loaded_tokens"],
            "moved_tokens": moved + recomputed,
            "recomputed": recomputed / max(1, moved + recomputed),
            "tokens": len(answer),
            **agreement(full, logits),
            **harm(full, logits),
            "same_answer": own == answer,
            "answer": said,
            "f1": best_f1(said, prompt.answers),
            "full_answer": reference,
            "full_f1": best_f1(reference, prompt.answers),
        }

    def _full_reading(self, prompt: rag.RagPrompt) -> tuple[list[int], torch.Tensor]:
        if prompt.question not in self._full:
            tokens = self._alone.generate(prompt.tokens, new=self._tokens, logits=str(self._file))[0]["tokens"]
            answer = self._cut(tokens)
            self._full[prompt.question] = answer, torch.from_numpy(np.load(self._file))[: len(answer)]
        return self._full[prompt.question]

    def _logits(self, engine: VLLMEngine, prompt: rag.RagPrompt, **order: Any) -> torch.Tensor:
        engine.generate(prompt.tokens, logits=str(self._file), **order)
        return torch.from_numpy(np.load(self._file))

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """Up to the first end token."""
        end = next((place for place, token in enumerate(tokens, 1) if token in self._ends), len(tokens))
        return list(tokens[:end])

    def _text(self, answer: Sequence[int]) -> str:
        return str(self._tokenizer.decode([token for token in answer if token not in self._ends])).strip()
