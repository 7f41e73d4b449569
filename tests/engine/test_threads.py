from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.core.verify import same_bits
from tests.approx.test_find import HEAD, distance, engine_for, joined, read, text

_LOGITS = {"max_new_tokens": 2, "temperature": 0, "return_dict_in_generate": True, "output_logits": True}


def test_many_threads_get_the_bits_of_one(tiny: Callable[..., Any]) -> None:
    """On a model wide enough that a wrong step shape shows, with evictions, batches and broken-off streams."""
    model = tiny("llama", dtype=torch.bfloat16, hidden_size=256, intermediate_size=512)
    text = torch.randint(3, 97, (240,), generator=torch.Generator().manual_seed(9)).tolist()
    prompts = [[*text[: 40 + 10 * (i % 16)], 3 + i % 7] for i in range(120)]
    quiet = KVBoost(model, None, chunk_size=16, chunking="fixed")
    expected = {tuple(p): quiet.prefill(p).logits for p in prompts}
    engine = KVBoost(model, None, chunk_size=16, chunking="fixed", max_chunks=9)

    def ask(index: int) -> bool:
        prompt = prompts[index]
        wanted = expected[tuple(prompt)]
        if index % 4 == 0:
            return same_bits(engine.generate(prompt, **_LOGITS).raw.logits[0][0], wanted.float())
        if index % 4 == 1:
            engine.generate_batch([prompt, prompt[:20]], max_new_tokens=2, temperature=0)
            engine.stream(prompt, max_new_tokens=50, temperature=0).close()
        return same_bits(engine.prefill(prompt).logits, wanted)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(len(prompts))))
    stats = engine._store.stats()
    assert stats.leased == 0
    assert stats.chunks <= 9
    assert stats.hits > 0


def test_many_threads_move_the_same_documents(tiny: Callable[..., Any]) -> None:
    """With every row repaired a moved reading is a full one, whichever variants the others left behind."""
    model = tiny("llama")
    documents = [text(40 + i, 70) for i in range(5)]
    settings = {"quality": "high", "recompute_ratio": 1.0, "force_approx": True, "shadow_share": 0.5}
    engine = engine_for(model, max_chunks=40, **settings)
    engine.add_documents(documents, head=HEAD, progress=False)
    exact = engine_for(model, quality="exact")
    orders = [[documents[(i * k) % 5] for k in range(1, 4)] for i in range(1, 5)]

    def ask(index: int) -> int:
        parts = [HEAD, *orders[index % 4], text(100 + index, 9)]
        found, full = read(engine, *parts), read(exact, *parts)
        assert distance(found, full) <= 3e-5
        tokens, ends = joined(*parts)
        engine.generate(tokens, boundaries=ends, max_new_tokens=2, temperature=0)
        return int(found.reuse.moved_tokens)

    with ThreadPoolExecutor(6) as pool:
        moved = list(pool.map(ask, range(48)))
    assert sum(count > 0 for count in moved) > 24
    engine.close()
    assert engine._store.stats().leased == 0
