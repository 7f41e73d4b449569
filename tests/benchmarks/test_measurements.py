"""Benchmarks that need a model, run whole on a tiny one: what the tables and files must say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner import main
from kvboost.hf.cache import SlabCache
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as users have it, and a text beside it."""
    return saved("llama", tmp_path_factory.mktemp("bench"))


def saved(family: str, parent: Path) -> Path:
    place = parent / f"tiny-{family}"
    tiny_model(family, vocab_size=300, max_position_embeddings=4096).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    words = " ".join(f"word{i * i % 977} and {i}" for i in range(1500))
    (parent / "text.txt").write_text(words)
    return place


def measure(folder: Path, tmp_path: Path, command: str, *options: str, code: int = 0) -> dict[str, Any]:
    file = tmp_path / "out.json"
    text = str(folder.parent / "text.txt")
    assert main([command, "--model", str(folder), "--text", text, "--json", str(file), *options]) == code
    written = file.read_text()
    assert str(folder.parent) not in written
    document: dict[str, Any] = json.loads(written)
    for table in document["tables"]:
        assert table["machine"]["model"] == folder.name
    return document


def test_ttft_floor_compares_warm_requests_with_the_bare_forward(folder: Path, tmp_path: Path) -> None:
    options = ("--lengths", "300", "600", "--query", "20", "--repeat", "3", "--warmups", "1", "--dtype", "float32")
    found = measure(folder, tmp_path, "ttft_floor", *options)["raw"]["float32"]
    assert [sample["variant"] for sample in found] == ["in place", "copied", "new memory", "text"] * 2
    assert [sample["prompt_tokens"] for sample in found[::4]] == [2 * 128 + 20, 5 * 128 + 20]
    for sample in found:
        assert sample["query_tokens"] == 20
        assert len(sample["ttft_ms"]) == len(sample["bare_ms"]) == len(sample["call_ms"]) == 3
        assert all(ttft <= call for ttft, call in zip(sample["ttft_ms"], sample["call_ms"], strict=True))
        assert {"plan", "lease", "place", "first_token"} <= set(sample["stages_ms"][0])


def test_ttft_floor_refuses_more_query_tokens_than_one_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ttft_floor", "--model", str(folder), "--query", "200"]) == 2
    assert "more than one step" in capsys.readouterr().err


def test_ttft_compares_cold_and_warm_requests_against_plain_transformers(folder: Path, tmp_path: Path) -> None:
    options = ("--tokens", "400", "--turns", "3", "--repeat", "2", "--dtype", "float32", "--chunk-size", "32")
    rows = measure(folder, tmp_path, "ttft", *options)["raw"]["float32"]
    assert len(rows) == 3 + 2 * 6 + 2 + 2
    for name, row in rows.items():
        assert len(row["engine_ms"]) == len(row["baseline_ms"]) == (10 if name.endswith("short question") else 2)
        assert all((cached == 0) == name.endswith("(cold)") for cached in row["cached_tokens"])
    given = rows["code file, boundary given, question 1"]
    assert given["prompt_tokens"][0] - given["cached_tokens"][0] < 100  # nothing but the question
    assert rows["75% reuse, 100 query tokens"]["cached_tokens"] == [300, 300]


def test_chat_turns_times_every_turn_on_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    options = ("--turns", "3", "--system", "60", "--message", "30", "--answer", "4", "--repeat", "2")
    found = measure(folder, tmp_path, "chat_turns", *options, "--dtype", "float32")["raw"]["float32"]
    assert found["prompt"] == [90, 124, 158]
    assert all(len(samples) == 2 for name in ("ours", "by hand", "plain") for samples in found[name])


def test_exactness_finds_no_difference_and_predicts_every_hit(folder: Path, tmp_path: Path) -> None:
    document = measure(folder, tmp_path, "exactness", "--requests", "150")
    engines = document["raw"]["engines"].values()
    assert document["raw"]["failures"] == []
    assert sum(counts["requests"] for counts in engines) == 150
    assert sum(counts["hits"] for counts in engines) > 30
    assert sum(counts["evictions"] for counts in engines) > 30


def test_exactness_predicts_every_hit_on_a_grid(tmp_path: Path) -> None:
    """This attention is stepped on a grid: whole steps only, and no end of a prompt, are stored."""
    document = measure(saved("gemma2", tmp_path / "bench"), tmp_path, "exactness", "--requests", "100")
    assert document["raw"]["failures"] == []
    reused = [counts["reused_tokens"] for counts in document["raw"]["engines"].values()]
    assert sum(reused) > 0
    assert all(tokens % 128 == 0 for tokens in reused)


def test_exactness_fails_when_reused_kv_is_wrong(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SlabCache.place

    def slightly_off(self: SlabCache, start: int, tensors: Sequence[Any], *, row: int = 0) -> None:
        place(self, start, [tensor * 1.0001 for tensor in tensors], row=row)

    monkeypatch.setattr(SlabCache, "place", slightly_off)
    document = measure(folder, tmp_path, "exactness", "--requests", "40", code=1)
    assert document["failed"]
    assert {"other logits", "other KV"} <= {error for item in document["raw"]["failures"] for error in item["wrong"]}


def test_fidelity_compares_answers_and_first_tokens(folder: Path, tmp_path: Path) -> None:
    options = ("--prompts", "4", "--new-tokens", "8", "--chunk-size", "32")
    found = measure(folder, tmp_path, "fidelity", *options)["raw"]["prompts"]
    assert len(found) == 4
    for item in found:
        assert item["reused"] > 0
        assert abs(item["kl"]) < 1e-6
        assert item["position"] is None or item["margin"] < 1e-2


def test_a_text_that_is_too_short_says_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    assert main(["ttft", "--model", str(folder), "--text", str(short)]) == 2
    assert "give longer files with --text" in capsys.readouterr().err


def test_a_text_that_is_not_there_says_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ttft", "--model", str(folder), "--text", "absent.txt"]) == 2
    assert "cannot read the text" in capsys.readouterr().err
