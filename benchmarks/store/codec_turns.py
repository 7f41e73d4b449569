"""Do errors pile up when every turn of a chat is read behind stored KV of 8 or 4 bits, and stored so itself?

usage: python proofs/quantised_turns.py --model FOLDER [--texts 8] [--turns 8] [--turn-tokens 128]

Turn by turn: each turn is read behind what the turns before left in the store, which was computed behind stored KV
itself. Once: the turns before are read as one prompt and stored, so that every row was rounded once and none was
computed behind rounded ones; then the turn is read. Behind both, and behind exact KV, the next tokens of the text are
fed and their predictions compared: if errors pile up, turn by turn is worse than once, and more so with every turn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.approx.recompute import interval
from benchmarks.common.measure import TextSource
from kvboost import KVBoost
from kvboost.bench.report import describe_machine, say

_FED = 33  # tokens behind each turn; the first one is the turn's last
_BITS = (8, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=128)
    args = parser.parse_args()
    # No workspaces: one that comes back holds rows as they were computed, and would be used instead of stored ones.
    settings: dict[str, Any] = {"quality": "exact", "chunk_size": 64, "workspace_bytes": 0}
    exact = KVBoost.from_pretrained(str(args.model), dtype="float32", **settings)
    engines = {bits: KVBoost(exact.model, exact.tokenizer, kv_cache_bits=bits, **settings) for bits in _BITS}
    source = TextSource(exact.tokenizer, [])
    samples: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    length = args.turns * args.turn_tokens + _FED
    for number in range(args.texts):
        text = source.window(number * len(source.ids) // args.texts, length)
        for engine in (exact, *engines.values()):
            engine.clear()
        wanted: dict[int, torch.Tensor] = {}
        for turn in range(1, args.turns + 1):
            end = turn * args.turn_tokens
            wanted[turn] = _behind(exact, text, end)
            for bits, engine in engines.items():
                got = _behind(engine, text, end)
                samples.setdefault((bits, "turn by turn", turn), []).append(_differ(wanted[turn], got))
        for bits, engine in engines.items():
            for turn in range(2, args.turns + 1):
                if turn & (turn - 1) and turn != args.turns:
                    continue  # 2, 4, 8: reading whole prompts takes its time
                engine.clear()
                engine.warm(text[: (turn - 1) * args.turn_tokens])
                got = _behind(engine, text, turn * args.turn_tokens)
                samples.setdefault((bits, "once", turn), []).append(_differ(wanted[turn], got))
        say(f"{number + 1} of {args.texts} texts")
    print(f"{describe_machine(dtype='float32', model=str(args.model)).line}\n")
    print(
        "| turn | tokens |" + "".join(f" {b} bits, turn by turn: KL | top-1, % | once: KL | top-1, % |" for b in _BITS)
    )
    print("|---:|---:|" + "---:|" * (4 * len(_BITS)))
    for turn in range(1, args.turns + 1):
        cells = [str(turn), str(turn * args.turn_tokens)]
        for bits in _BITS:
            for way in ("turn by turn", "once"):
                found = samples.get((bits, way, turn))
                cells += _cells(found) if found else ["", ""]
        print("| " + " | ".join(cells) + " |")
    return 0


def _behind(engine: KVBoost, text: list[int], end: int) -> torch.Tensor:
    """What is predicted for the tokens behind a turn, [fed - 1, vocab]; the turn itself is read, and stored."""
    result = engine.prefill(text[:end])
    ids = torch.tensor([text[end : end + _FED - 1]])
    with torch.no_grad():
        fed: torch.Tensor = engine.model(input_ids=ids, past_key_values=result.cache, use_cache=True).logits[0]
    return torch.cat([result.logits[None], fed])[:-1].double().log_softmax(-1)


def _differ(wanted: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """The mean KL, and the share of positions where the same token comes first."""
    divergence = (wanted.exp() * (wanted - got)).sum(-1)
    return float(divergence.mean()), float((wanted.argmax(-1) == got.argmax(-1)).double().mean())


def _cells(found: list[tuple[float, float]]) -> list[str]:
    mean, low, high = interval([kl for kl, _ in found], seed=1)
    top = sum(same for _, same in found) / len(found)
    return [f"{mean:.5f} [{low:.5f} {high:.5f}]", f"{100 * top:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
