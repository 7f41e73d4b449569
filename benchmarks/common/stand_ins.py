"""What stands in for a trained model, for questions and for traces in the short form of a benchmark.

Used by the runner and by the tests. Invariant: made from fixed seeds, so that a short form can be repeated.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_BLOCK_TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl", "agentic_sessions.jsonl.gz")
_PART_FILES = {"sys_prompt": 1, "passage": 2, "history": 3, "user_input": 4, "web_search": 5}


def make_model(folder: Path) -> Path:
    """A tiny Llama with a tokenizer of bytes and a chat template."""
    place = folder / "tiny-llama"
    tiny_model("llama", vocab_size=300, max_position_embeddings=8192).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def make_mixture(folder: Path, *, width: int) -> Path:
    """A mixture of experts with random weights: few layers, but each as wide as in a model that is used."""
    place = folder / f"random-qwen3-moe-{width}"
    sizes = {"hidden_size": width, "moe_intermediate_size": width, "num_experts": 8, "num_hidden_layers": 4}
    heads = {"head_dim": 64, "num_attention_heads": 8}
    tiny_model("qwen3_moe", vocab_size=300, max_position_embeddings=8192, **sizes, **heads).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def make_questions(folder: Path, *, count: int = 6, passages: int = 6) -> Path:
    """Questions in the shape of the MuSiQue file, with passages that share no text."""
    rng = random.Random(3)

    def sentence() -> str:
        return " ".join("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(12)) + "."

    records = [
        {
            "question": f"what is number {number}?",
            "answers": [f"right {number}", f"also {number}"],
            "ctxs": [{"title": "", "text": " ".join(sentence() for _ in range(32))} for _ in range(passages)],
        }
        for number in range(count)
    ]
    file = folder / "questions.json"
    file.write_text(json.dumps(records))
    return file


def make_text(folder: Path) -> list[Path]:
    """Words in random order: no two places of it are alike, as they are in program code."""
    rng = random.Random(7)
    words = ("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(20_000))
    file = folder / "text.txt"
    file.write_text(" ".join(words))
    return [file]


def make_traces(folder: Path) -> Path:
    """Three traces of blocks, and one of RAG prompts in ``ragpulse``."""
    rng = random.Random(5)
    place = folder / "traces"
    place.mkdir()
    for name in _BLOCK_TRACES:
        sessions: list[list[int]] = []
        lines = []
        for number in range(400):
            if not sessions or rng.random() < 0.4:
                sessions.append([])
            session = rng.choice(sessions[-20:])
            session += range(10 * number, 10 * number + rng.randint(1, 6))
            lines.append(json.dumps({"input_length": 512 * len(session), "hash_ids": session}))
        data = "\n".join(lines).encode()
        (place / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    _make_rag_trace(place / "ragpulse", rng)
    return place


def _make_rag_trace(place: Path, rng: random.Random) -> None:
    place.mkdir()
    lengths = {"sys_prompt": 300, "passage": 500, "history": 200, "user_input": 30, "web_search": 400}
    for name, number in _PART_FILES.items():
        stem = "passages" if name == "passage" else name
        lines = [json.dumps({f"{name}_id": i, "token_length": lengths[name] + i}) for i in range(60)]
        (place / f"{number}_{stem}.jsonl").write_text("\n".join(lines))
    lines = []
    for number in range(60):
        ids = {
            "sys_prompt": [rng.randrange(2)],
            "passages_ids": rng.sample(range(20), 3),
            "history": [],
            "web_search": rng.sample(range(60), rng.randrange(2)),
            "user_input": [number],
        }
        lines.append(json.dumps({"hash_ids": ids}))
    (place / "0_trace.jsonl").write_text("\n".join(lines))


STAND_INS: dict[str, Callable[[Path], Path | list[Path]]] = {
    "model": make_model,
    "text": make_text,
    "data": make_questions,
    "traces": make_traces,
    "results": lambda folder: folder,
}
"""By the name of the option that the command left out."""
