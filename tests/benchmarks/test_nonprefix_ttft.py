"""TTFT with non-prefix reuse on a tiny model: new orders, no exact hits, every column filled."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.approx.nonprefix_ttft import documents, new_orders, parse_setting
from benchmarks.common.measure import FreezableStore, TextSource
from benchmarks.common.report import BenchError
from benchmarks.common.strategies import STRATEGIES
from benchmarks.runner import main
from kvboost.types import KVBlock, PutOutcome
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("moved") / "tiny-llama"
    tiny_model("llama", vocab_size=300, max_position_embeddings=4096).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    rng = random.Random(7)
    words = ("".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000))
    (place.parent / "text.txt").write_text(" ".join(words))
    return place


def test_nonprefix_ttft_alternates_every_setting_with_plain_and_exact_reading(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    files = ["--model", str(folder), "--text", str(folder.parent / "text.txt"), "--json", str(file)]
    small = ["--lengths", "800", "--repeat", "2", "--pairs", "3", "--stored", "1500"]
    assert main(["nonprefix_ttft", *files, *small, "--force", "--settings", "high", "none=0", "query=0.15"]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["arguments"]["settings"] == ["high", "none=0", "query=0.15"]
    contest = document["raw"]["reordered"][0]
    assert list(contest["ttft_ms"]) == ["plain Transformers", 'quality="exact"', "high", "none=0", "query=0.15"]
    for name, reuse in contest["reuse"].items():
        reuses = "=" in name and "exact" not in name
        for entry in reuse:
            assert entry["prompt_tokens"] == 830
            assert entry["exact_tokens"] == 0
            assert entry["moved_tokens"] == 800 or not reuses
    assert all(entry["recomputed_tokens"] == 0 for entry in contest["reuse"]["none=0"])
    assert all(entry["recomputed_tokens"] == 120 for entry in contest["reuse"]["query=0.15"])
    assert all(len(workload["ttft_ms"]) == 6 for workload in document["raw"]["never_slower"])  # with plain again
    unrelated, tiny, known = document["raw"]["never_slower"]
    for workload in (unrelated, tiny, known):
        assert all(len(times) == 3 for times in workload["ttft_ms"].values())
        assert all(entry["exact_tokens"] == 0 for reuse in workload["reuse"].values() for entry in reuse)
    for workload in (unrelated, tiny):
        assert all(entry["moved_tokens"] == 0 for reuse in workload["reuse"].values() for entry in reuse)
    assert {entry["moved_tokens"] for entry in known["reuse"]["none=0"]} <= {0, 64}
    assert [table["title"].split(":")[0] for table in document["tables"]][::2] == [
        "TTFT with non-prefix reuse",
        "Never slower",
    ]


def test_settings_are_names_with_a_ratio_or_without() -> None:
    assert parse_setting("fast").engine_settings == {"quality": "fast"}
    high = {"quality": "high"}
    assert parse_setting("first").engine_settings == {**high, "recompute_strategy": STRATEGIES["first"]}
    assert parse_setting("query=0.15").engine_settings == {
        **high,
        "recompute_strategy": STRATEGIES["query"],
        "recompute_ratio": 0.15,
    }
    for wrong in ("nonsense", "query=x", "query=1.5", "fast=0.1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_setting(wrong)


@pytest.mark.parametrize("count", [5, 10])
def test_orders_are_new_and_never_begin_as_the_documents_were_prefilled(count: int) -> None:
    orders = new_orders(count, wanted=20, rng=random.Random(1))
    assert len({tuple(order) for order in orders}) == 20
    assert all(sorted(order) == list(range(count)) and order[0] != 0 for order in orders)


def test_more_orders_than_there_are_is_refused() -> None:
    with pytest.raises(BenchError, match="--repeat less"):
        new_orders(3, wanted=5, rng=random.Random(1))


def test_documents_tile_the_text_in_unlike_lengths(folder: Path) -> None:
    source = TextSource(byte_tokenizer(), [folder.parent / "text.txt"])
    parts = documents(source, 6000)
    assert [token for part in parts for token in part] == source.window(0, 6000)
    assert len(parts) == 10
    assert len({len(part) for part in parts}) > 3


def test_a_frozen_store_keeps_nothing_new() -> None:
    store = FreezableStore(1000)
    block = KVBlock(b"k", None, b"c", b"t", (), 10, True)
    store.frozen = True
    assert store.put(block) is PutOutcome.REFUSED
    assert store.stats().chunks == 0
    store.frozen = False
    assert store.put(block) is PutOutcome.STORED


def test_lengths_below_a_few_chunks_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonprefix_ttft", "--model", str(folder), "--lengths", "50"]) == 2
    assert "give 200 or more" in capsys.readouterr().err


def test_stripped_thinking_reuses_what_stood_behind_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    files = ["--model", str(folder), "--text", str(folder.parent / "text.txt"), "--json", str(file)]
    assert main(["stripped_thinking", *files, "--turns", "3", "--chats", "2"]) == 0
    samples = json.loads(file.read_text())["raw"]["samples"]
    assert len(samples) == 2 * 3 * 2
    for sample in samples:
        stripped = 150 + (sample["turn"] - 1) * (40 + 30 + 400 + 80)
        if sample["turn"] == 1:
            assert sample["moved"] == 0
        if sample["engine"] == 'quality="exact"':
            assert sample["moved"] == 0
            # Up to the user message of the turn before: behind it stood thinking that is gone.
            assert sample["exact"] == (0 if sample["turn"] == 1 else stripped - (30 + 400 + 80))
        elif sample["turn"] > 1 and sample["moved"]:
            # The tool result stands elsewhere now; its last chunk was never stored, as the prompt ended with it.
            assert sample["moved"] >= 200
