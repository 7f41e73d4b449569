"""A model with recurrent layers, in the shapes of a real one with random weights: reuse against plain Transformers.

Known text with a question behind it, a growing chat, prompts that part behind a shared beginning, first readings, the
share that states have of what is stored, and a restart from a directory and from Redis. Every answer is an exact one:
its first tokens are held against plain Transformers'. A bar that is missed is said, not hidden.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.measure import alternate, positive, wall_ms
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.servers import redis_server
from kvboost.bench.report import Machine, Spread, Table, describe_machine, ratios
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore

_SHAPES: dict[str, dict[str, Any]] = {
    # As in its published config; 24 layers, three of four recurrent.
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248_320,
        "tie_word_embeddings": True,
    },
    "small": {  # for the short form
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 512,
    },
}
QUICK = {"shape": "small", "known": 600, "repeat": 1, "dtype": ["float32"], "turns": 3}

_QUESTION = 20  # tokens
_TURN = (150, 60)  # tokens of a message and of an answer
_SYSTEM, _BRANCH = 700, 300  # tokens
_BARS = "Bars: known text 12x and more, first readings at most 1.10, states at most a third of what is stored."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--shape", choices=list(_SHAPES), default="qwen3.5-0.8b")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--known", type=positive, default=2000, help="tokens read before the question (default 2000)")
    parser.add_argument("--turns", type=positive, default=8, help="turns of the chat (default 8)")
    parser.add_argument("--repeat", type=positive, default=5, help="rounds measured (default 5)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    report = Report("hybrids")
    for dtype in args.dtype:
        model = _model(args.shape, dtype)
        engine = KVBoost(model, quality="exact", cache_bytes="4GiB")
        machine = describe_machine(dtype=dtype, model=f"{args.shape} with random weights")
        found = {
            "known": _known(engine, args.known, args.repeat),
            "cold": _cold(engine, args.known, args.repeat),
            "chat": _chat(engine, args.turns),
            "branches": _branches(engine),
            "restart": _restarts(model, args.known),
            "state_bytes": engine.parts.layout.state_bytes if engine.parts.layout else 0,
            "token_bytes": engine.parts.layout.bytes_per_token if engine.parts.layout else 1,
        }
        report.tables += [_times_table(found, machine), _hits_table(found, machine)]
        report.raw[dtype] = found
        engine.close()
    return report


def _model(shape: str, dtype: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **_SHAPES[shape])
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def _text(engine_or_model: Any, seed: int, tokens: int) -> list[int]:
    size = engine_or_model.get_input_embeddings().weight.shape[0]
    rng = random.Random(seed)
    return [rng.randrange(3, size) for _ in range(tokens)]


def _plain(model: Any, tokens: list[int]) -> Callable[[], float]:
    ids = torch.tensor([tokens])
    wanted = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    return lambda: wall_ms(lambda: model.generate(ids, **wanted))


def _first(engine: KVBoost, tokens: list[int], **given: Any) -> Any:
    return engine.generate(tokens, max_new_tokens=1, temperature=0, **given)


def _known(engine: KVBoost, known: int, repeat: int) -> dict[str, Any]:
    """The second and later requests over one text, each with a question of its own."""
    engine.clear()
    text = _text(engine.model, 1, known)
    _first(engine, text + _text(engine.model, 2, _QUESTION))
    results: list[Any] = []
    asked = iter(range(100, 100 + 10 * repeat))

    def ours() -> float:
        prompt = text + _text(engine.model, next(asked), _QUESTION)
        return wall_ms(lambda: results.append(_first(engine, prompt)))

    plain = _plain(engine.model, text + _text(engine.model, 3, _QUESTION))
    times = alternate({"ours": ours, "plain": plain}, repeat=repeat, warmups=1, label=f"{known} known tokens")
    return {"tokens": known, "reused": sorted({r.reuse.exact_tokens for r in results}), **times}


def _cold(engine: KVBoost, tokens: int, repeat: int) -> dict[str, Any]:
    prompt = _text(engine.model, 4, tokens)

    def ours() -> float:
        engine.clear()
        return wall_ms(lambda: _first(engine, prompt))

    return alternate(
        {"ours": ours, "plain": _plain(engine.model, prompt)}, repeat=repeat, warmups=1, label=f"{tokens} new tokens"
    )


def _chat(engine: KVBoost, turns: int) -> dict[str, Any]:
    """Every turn has the whole chat before it: what was reused, of what the turns before had as their prompt."""
    engine.clear()
    chat: list[int] = []
    hits = []
    progress = Progress("chat", turns)
    for turn in range(turns):
        before = len(chat)
        message, answer = (_text(engine.model, 10 * turn + part, size) for part, size in enumerate(_TURN))
        prompt = [*chat, *([] if not turn else answer), *message]
        hits.append((before, _first(engine, prompt).reuse.exact_tokens))
        chat = prompt
        progress.step()
    return {"hits": hits, "share": _state_share(engine)}


def _branches(engine: KVBoost) -> dict[str, Any]:
    """Prompts that begin alike, and part: without and with the boundary that a chat template would give."""
    found = {}
    for name, given in (("unmarked", {}), ("marked", {"boundaries": [_SYSTEM]})):
        engine.clear()
        system = _text(engine.model, 30, _SYSTEM)
        prompts = [system + _text(engine.model, 31 + branch, _BRANCH) for branch in range(4)]
        found[name] = [_first(engine, prompt, **given).reuse.exact_tokens for prompt in prompts]
    return found


def _restarts(model: Any, tokens: int) -> dict[str, int]:
    """What the next process would reuse, from a directory and from a server; its first token is plain's."""
    prompt = _text(model, 50, tokens)
    found = {}
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        places = {"disk": {"disk_cache_dir": folder}, "redis": {"remote_url": server.url}}
        for name, place in places.items():
            with KVBoost(model, quality="exact", remote_timeout_seconds=60.0, **place) as one:
                cold = one.prefill(prompt)
                one.flush()
            with KVBoost(model, quality="exact", remote_timeout_seconds=60.0, **place) as other:
                warm = other.prefill(prompt)
            if not torch.equal(warm.logits, cold.logits):
                raise BenchError(f"the logits after a restart from {name} have other bits")
            found[name] = warm.reuse.exact_tokens
    return found


def _state_share(engine: KVBoost) -> float:
    """The share of the memory's bytes that are states."""
    session = engine.session
    assert session is not None
    store = session.store
    assert isinstance(store, MemoryStore)
    return store.state_bytes / store.stats().bytes


def _times_table(found: dict[str, Any], machine: Machine) -> Table:
    table = Table("Times against plain Transformers", machine, ["", "plain ms", "kvboost ms", "ratio"])
    known, cold = found["known"], found["cold"]
    reused = ", ".join(map(str, known["reused"]))
    table.add(
        f"{known['tokens']} known tokens ({reused} reused) and {_QUESTION} new ones",
        Spread.of(known["plain"]).text(0),
        Spread.of(known["ours"]).text(0),
        f"plain / kvboost {Spread.of(ratios(known['plain'], known['ours'])).text(1)}",
    )
    table.add(
        f"{known['tokens']} new tokens",
        Spread.of(cold["plain"]).text(0),
        Spread.of(cold["ours"]).text(0),
        f"kvboost / plain {Spread.of(ratios(cold['ours'], cold['plain'])).text(3)}",
    )
    table.notes.append(f"Whole calls, one new token, storing included; cells are median [min max]. {_BARS}")
    return table


def _hits_table(found: dict[str, Any], machine: Machine) -> Table:
    table = Table("What is reused", machine, ["", "tokens"])
    hits = found["chat"]["hits"]
    table.add("chat: prompt of the turn before", ", ".join(str(before) for before, _ in hits))
    table.add("chat: reused", ", ".join(str(reused) for _, reused in hits))
    for name, reused in found["branches"].items():
        table.add(f"branches behind {_SYSTEM} shared tokens, {name}: reused", ", ".join(map(str, reused)))
    for name, reused in found["restart"].items():
        table.add(f"after a restart, from {name}", str(reused))
    state, token = found["state_bytes"], found["token_bytes"]
    table.notes.append(
        f"States took {found['chat']['share']:.2f} of the bytes that the chat stored. One takes {state:,} bytes, as "
        f"the KV of {state // token:,} tokens does."
    )
    return table
