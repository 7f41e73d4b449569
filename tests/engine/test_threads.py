from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvboost import KVBoost


def test_many_threads_get_the_answers_of_one(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    text = torch.randint(3, 97, (120,), generator=torch.Generator().manual_seed(9)).tolist()
    prompts = [[*text[: 20 + 5 * (i % 16)], 3 + i % 7] for i in range(160)]
    quiet = KVBoost(model, None, chunk_size=8, chunking="fixed")
    expected = {tuple(p): quiet.prefill(p).logits for p in prompts}
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed", max_chunks=9)

    def ask(prompt: list[int]) -> bool:
        if len(prompt) % 3 == 0:
            generated = engine.generate(prompt, max_new_tokens=2, temperature=0)
            return generated.token_ids[0] == int(expected[tuple(prompt)].argmax())
        return torch.equal(engine.prefill(prompt).logits, expected[tuple(prompt)])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, prompts))
    stats = engine._store.stats()
    assert stats.leased == 0
    assert stats.chunks <= 9
    assert stats.hits > 0
