"""Fidelity: greedy answers of a warm engine against plain Transformers, token by token."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, load_engine, positive
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode

QUICK = {"prompts": 3, "new_tokens": 8, "chunk_size": 32}

_SHORTEST, _LONGEST = 60, 600
_BASELINE = GenerationMode.BASELINE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=positive, default=100, help="prompts (default 100)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="greedy tokens per answer (default 64)")
    parser.add_argument("--chunking", choices=("content", "fixed"), default="content", help="default: content")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default: 128")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Report:
    """Answer every prompt both ways and compare."""
    engine = load_engine(args, dtype=args.dtype, chunking=args.chunking, chunk_size=args.chunk_size)
    source = TextSource(engine.tokenizer, args.text)
    rng = random.Random(args.seed)
    progress = Progress("prompts", args.prompts)
    found: list[dict[str, Any]] = []
    for _ in range(args.prompts):
        ids = source.window(rng.randrange(len(source.ids)), rng.randint(_SHORTEST, _LONGEST))
        found.append(_compare(engine, ids, args.new_tokens))
        progress.step()
    report = Report("fidelity", raw={"seed": args.seed, "prompts": found})
    machine = describe_machine(dtype=args.dtype, model=str(args.model))
    summary = Table(
        f"Fidelity: {args.prompts} warm greedy answers of up to {args.new_tokens} tokens against plain Transformers",
        machine,
        ["", "value"],
    )
    differing = [item for item in found if item["position"] is not None]
    divergence = [item["kl"] for item in found]
    summary.add("equal answers", f"{len(found) - len(differing)} of {len(found)}")
    summary.add("answers with part of the prompt reused", sum(item["reused"] > 0 for item in found))
    summary.add("tokens compared", sum(item["compared"] for item in found))
    summary.add("first-token KL(plain, engine), mean", f"{sum(divergence) / len(divergence):.2e}")
    summary.add("first-token KL(plain, engine), max", f"{max(divergence):.2e}")
    if differing:
        margins = Spread.of([item["margin"] for item in differing])
        summary.add("largest margin at a difference", f"{margins.high:.2e}")
    summary.notes.append(
        "Margin: plain Transformers' best logit minus its second best where the two answers differ. "
        "KL in float64 over the whole vocabulary. "
        f"{args.chunking} chunks of {args.chunk_size}; seed {args.seed}."
    )
    report.tables.append(summary)
    if differing:
        details = Table(
            "First differences", machine, ["prompt tokens", "reused", "position", "margin", "plain", "engine"]
        )
        for item in differing:
            tokens = (item["plain_token"], item["engine_token"])
            details.add(item["prompt_tokens"], item["reused"], item["position"], f"{item['margin']:.2e}", *tokens)
        report.tables.append(details)
    return report


def _compare(engine: KVBoost, ids: list[int], new_tokens: int) -> dict[str, Any]:
    engine.clear()
    engine.prefill(ids)  # the first call; the ones below are warm
    warm = engine.generate(ids, max_new_tokens=new_tokens, temperature=0)
    plain = engine.generate(ids, mode=_BASELINE, max_new_tokens=new_tokens, temperature=0)
    warm_logits = engine.prefill(ids).logits
    plain_logits = engine.prefill(ids, mode=_BASELINE).logits
    result: dict[str, Any] = {
        "prompt_tokens": len(ids),
        "reused": warm.cached_tokens,
        "compared": max(len(warm.token_ids), len(plain.token_ids)),
        "kl": kl_divergence(plain_logits, warm_logits),
        "position": first_difference(plain.token_ids, warm.token_ids),
    }
    position = result["position"]
    if position is not None:
        if position >= min(len(plain.token_ids), len(warm.token_ids)):
            raise BenchError(
                "two answers of different length agree as far as they go: one stopped without an end token"
            )
        best = engine.prefill([*ids, *plain.token_ids[:position]], mode=_BASELINE).logits.double().topk(2).values
        result["margin"] = float(best[0] - best[1])
        result["plain_token"], result["engine_token"] = plain.token_ids[position], warm.token_ids[position]
    return result


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Where two sequences differ first; None if they are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def kl_divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """KL(p || q) in nats of two distributions given by logits [vocab], in float64."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (p_logits, q_logits))
    return float((p.exp() * (p - q)).sum())
