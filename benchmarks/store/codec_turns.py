"""Whether errors pile up when every turn of a chat is computed behind stored KV of 8 or 4 bits.

Turn by turn: each turn is computed behind what the turns before left in the store, which was computed behind stored KV
itself. Once: the turns before are prefilled as one prompt and stored, so that all KV was rounded once and none was
computed behind rounded KV; then the turn is computed. Behind both, and behind exact KV, the next tokens of the text are
fed and their predictions compared: if errors pile up, turn by turn is worse than once, and more so with every turn.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common.measure import TextSource, add_model_arguments, engine_beside, load_engine, positive
from benchmarks.common.quality import agreement, mean_cell
from benchmarks.common.report import Progress, Report
from kvboost.engine import KVBoost

QUICK = {"texts": 1, "turns": 2, "turn_tokens": 96}
_BY_TURN, _ONCE = "turn by turn", "once"
_FED = 33  # tokens behind each turn; the first one is the turn's last
_BITS = (8, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_model_arguments(parser)
    parser.add_argument("--texts", type=positive, default=8, help="default: 8")
    parser.add_argument("--turns", type=positive, default=8, help="default: 8")
    parser.add_argument("--turn-tokens", type=positive, default=128, help="default: 128")


def run(args: argparse.Namespace) -> Report:
    """Every text, turn by turn and once."""
    # No workspaces: one that comes back holds KV as it was computed, which would be used instead of the stored KV.
    settings: dict[str, Any] = {"quality": "exact", "chunk_size": 64, "workspace_bytes": 0}
    exact = load_engine(args, dtype=args.dtype, **settings)
    engines = {bits: engine_beside(exact, kv_cache_bits=bits, **settings) for bits in _BITS}
    source = TextSource(exact.tokenizer, args.text)
    samples: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    progress = Progress("texts", args.texts)
    for number in range(args.texts):
        text = source.window(number * len(source.ids) // args.texts, args.turns * args.turn_tokens + _FED)
        for engine in (exact, *engines.values()):
            engine.clear()
        wanted: dict[int, torch.Tensor] = {}
        for turn in range(1, args.turns + 1):
            end = turn * args.turn_tokens
            wanted[turn] = _behind(exact, text, end)
            for bits, engine in engines.items():
                sample = agreement(wanted[turn], _behind(engine, text, end))
                samples.setdefault((bits, _BY_TURN, turn), []).append(sample)
        for bits, engine in engines.items():
            for turn in range(2, args.turns + 1):
                if turn & (turn - 1) and turn != args.turns:
                    continue  # 2, 4, 8: whole prompts take their time
                engine.clear()
                engine.warm(text[: (turn - 1) * args.turn_tokens])
                sample = agreement(wanted[turn], _behind(engine, text, turn * args.turn_tokens))
                samples.setdefault((bits, _ONCE, turn), []).append(sample)
        progress.step()
    report = Report("codec_turns", raw={" ".join(map(str, key)): found for key, found in samples.items()})
    columns = [f"{bits} bits, {way}: {what}" for bits in _BITS for way in (_BY_TURN, _ONCE) for what in ("KL", "top-1")]
    table = report.table(
        f"Turns behind quantized KV, {args.texts} texts",
        ["turn", "tokens", *columns],
        dtype=args.dtype,
        model=args.model,
    )
    for turn in range(1, args.turns + 1):
        cells: list[str] = []
        for bits in _BITS:
            for way in (_BY_TURN, _ONCE):
                found = samples.get((bits, way, turn))
                cells += [mean_cell(found, "kl", digits=5), mean_cell(found, "top1", digits=3)] if found else ["", ""]
        table.add(turn, turn * args.turn_tokens, *cells)
    return report


def _behind(engine: KVBoost, text: list[int], end: int) -> torch.Tensor:
    """What is predicted for the tokens behind a turn, [fed - 1, vocab]; the turn itself is computed and stored."""
    result = engine.prefill(text[:end])
    ids = torch.tensor([text[end : end + _FED - 1]])
    with torch.no_grad():
        fed: torch.Tensor = engine.model(input_ids=ids, past_key_values=result.cache, use_cache=True).logits[0]
    return torch.cat([result.logits[None], fed])[:-1]
