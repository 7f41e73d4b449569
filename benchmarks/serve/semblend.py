"""SemBlend's vLLM connector as a peer: what it reuses behind other text, and whether answers stay those of vLLM alone.

Two engines of one environment that has vLLM, `semblend-vllm-connector` and `semblend`: one with the connector, one
without. Both read four passages behind a preamble. Then both are asked about the same passages behind other preambles,
every question twice. A preamble that was "read before" is in vLLM's own prefix cache, up to its last page, when the
question comes: the connector serves text only from there on. "loaded" is what its audit file says it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.measure import positive
from benchmarks.common.rag import RagPrompt, load_prompts
from benchmarks.common.report import BenchError, Report
from benchmarks.common.vllm_engine import VLLMEngine
from kvboost.bench.report import say

QUICK = {"new": 4}
_ORDER = (2, 0, 3, 1)
_PAGE = 32
_COLUMNS = (
    "behind",
    "asked",
    "tokens",
    "cached, alone",
    "cached, with",
    "loaded",
    "same tokens",
    "log-probability off",
)


@dataclass(frozen=True)
class Case:
    """Passages behind a preamble of ``length`` tokens."""

    name: str
    length: int
    read_before: bool
    order: Sequence[int] = (0, 1, 2, 3)
    salt: str = ""


_CASES = (
    Case("50 other tokens, other order", 50, read_before=False, order=_ORDER),
    Case("64 other tokens, read before, other order", 2 * _PAGE, read_before=True, order=_ORDER),
    Case("64 other tokens, read before: nothing moves", 2 * _PAGE, read_before=True),
    Case("96 other tokens, read before: moved by a page", 3 * _PAGE, read_before=True),
    Case("64 other tokens, read before, all with one cache_salt", 2 * _PAGE, read_before=True, salt="salt"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="with vLLM, the connector and semblend")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions with passages; the first ones are asked")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--new", type=positive, default=16, help="tokens to decode (default 16)")


def run(args: argparse.Namespace) -> Report:
    """The mode that reuses text, with and without the connector's own safeguard, then the connector as it comes."""
    if args.vllm_venv is None or args.model is None or args.data is None:
        raise BenchError("this needs vLLM with SemBlend: give --vllm-venv FOLDER, --model FOLDER and --data FILE")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model.expanduser())
    # A question for each case: none finds what another has left.
    questions = load_prompts(tokenizer, args.data, count=len(_CASES), passages=4, whole_passages=True)
    os.environ["SEMBLEND_MULTI_DONOR"] = "1"  # it then finds equal text by its tokens, without MiniLM's weights
    report = Report("semblend")
    spans = {"mode": "semantic_span_experimental"}
    settings = {
        "Spans": spans,
        "Spans, left in vLLM's prefix cache": {**spans, "evict_filled_blocks_from_prefix_cache": False},
        "As it comes": {"mode": "discovery_only"},
    }
    with _engine(args, None) as alone:
        for title, chosen in settings.items():
            table = report.table(f"{title}: {chosen}", _COLUMNS, dtype=args.dtype, model=args.model)
            with tempfile.TemporaryDirectory() as folder:
                audit = Path(folder) / "audit.jsonl"
                places = {"audit_path": str(audit), "kv_storage_path": f"{folder}/kv"}
                with _engine(args, {"provider": "semblend", "enable_prompt_text": True, **places, **chosen}) as peer:
                    alone.forget()
                    for case, question in zip(_CASES, questions, strict=True):
                        before, prompt = _prompts(question, case)
                        order = {"salt": case.salt}
                        for text in before:
                            for engine in (alone, peer):
                                engine.generate(text, new=1, **order)
                        for asked in ("first", "again"):
                            loaded = _loaded(audit)
                            (one,), (other,) = (e.generate(prompt, new=args.new, **order) for e in (alone, peer))
                            cached = [one["cached"], other["cached"], _loaded(audit) - loaded]
                            row = [case.name, asked, len(prompt), *cached, *_agreement(one, other)]
                            table.add(*row)
                            say(f"{title}: {row}")
                report.raw[title] = _events(audit)
    return report


def _engine(args: argparse.Namespace, extra: dict[str, Any] | None) -> VLLMEngine:
    connector = None
    if extra is not None:
        connector = {
            "kv_connector": "SemBlendVllmConnector",
            "kv_connector_module_path": "semblend_vllm_connector.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    python = args.vllm_venv.expanduser() / "bin" / "python"
    return VLLMEngine(python, args.model.expanduser(), connector=connector, dtype=args.dtype, block_size=_PAGE)


def _prompt(preamble: Sequence[int], question: RagPrompt, order: Sequence[int]) -> list[int]:
    return [*preamble, *(token for i in order for token in question.passages[i]), *question.tail]


def _prompts(question: RagPrompt, case: Case) -> tuple[list[list[int]], list[int]]:
    """What both engines have read when the question comes, and the question. Preambles are another question's text."""
    before = [_prompt(question.unrelated[0][: 2 * _PAGE], question, (0, 1, 2, 3))]
    preamble = question.unrelated[1][: case.length]
    if case.read_before:
        before.append([*preamble, *question.unrelated[2][:100]])
    return before, _prompt(preamble, question, case.order)


def _events(audit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in audit.read_text().splitlines()] if audit.exists() else []


def _loaded(audit: Path) -> int:
    return sum(event["tokens"] for event in _events(audit) if event["event"] == "runtime_materialized")


def _agreement(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Tokens equal to those of vLLM alone, and how far its likeliest first token's log-probability is off."""
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    token, first, second = str(one["tokens"][0]), one["logprobs"][0], other["logprobs"][0]
    off = f"{abs(first[token] - second[token]):.2g}" if token in second else "not among the first two"
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}", off
