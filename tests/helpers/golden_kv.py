"""Digests of the bits of KV, by machine, family and the code that decides them.

``python -m tests.helpers.golden_kv`` writes those of this machine. Entries of other machines that were made with other
code are dropped: nobody here can renew them, and there the test is skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.hf.cache import SlabCache
from kvboost.hf.code_digest import code_digest
from kvboost.hf.codec import codec_for
from kvboost.hf.environment import NumericEnvironment
from kvboost.hf.measured import measure_model
from kvboost.hf.runner import ModelRunner
from tests.helpers.models import FAMILIES, VOCAB, tiny_model
from tests.helpers.packing import pack_all

FILE = Path(__file__).parents[1] / "hf" / "golden_kv.json"
RENEW = "python -m tests.helpers.golden_kv"
CASES = [*FAMILIES, "llama in bfloat16", "llama in 8 bits", "llama in 4 bits", "llama in packed weights"]
_TOKENS = 200
_WIDE = {"hidden_size": 128, "intermediate_size": 256}


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels split their sums by threads, and machines have different numbers of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment() -> str:
    """What the key says of this machine."""
    return NumericEnvironment([torch.device("cpu")]).settings()


def kv_digest(case: str) -> str:
    """Of a cold prefill of some text, as it would be stored."""
    family, _, way = case.partition(" in ")
    model = tiny_model(family, dtype=torch.bfloat16 if way == "bfloat16" else torch.float32, **_WIDE)
    with pytest.MonkeyPatch.context() as patch:
        if way == "packed weights":
            pack_all(patch)
        facts, numerics, _ = measure_model(model, numerics=None, packed_bytes=2**30 if way == "packed weights" else 0)
    runner = ModelRunner(model, numerics.tiles)
    cache = SlabCache(facts.layout, capacity=_TOKENS)
    ids, start = [(7919 * i + 3) % VOCAB for i in range(_TOKENS)], 0
    while start < _TOKENS:
        end = numerics.rule.step_end(start, _TOKENS)
        runner.append(ids[start:end], cache, logits=False)
        start = end
    bits = int(way.split()[0]) if way.endswith("bits") else 16
    hasher = hashlib.sha256()
    for tensor in codec_for(bits, facts.layout).pack(cache.extract(0, _TOKENS), start=0):
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def read() -> dict[str, Any]:
    """By environment."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def _renew() -> None:
    with one_thread():
        made = {"code": code_digest(), "kv": {case: kv_digest(case) for case in CASES}}
        kept = {name: entry for name, entry in read().items() if entry["code"] == made["code"]}
        FILE.write_text(json.dumps({**kept, environment(): made}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(CASES)} digests of this machine, {len(kept.keys() - {environment()})} other machines kept: {FILE}")


if __name__ == "__main__":
    _renew()
