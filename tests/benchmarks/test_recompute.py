"""The recompute benchmark on a tiny model, and the figures it is made of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.approx.recompute import Setting, settings_of
from benchmarks.common.quality import agreement, best_f1, interval, normalised
from benchmarks.common.stand_ins import make_questions
from benchmarks.runner import main
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("repair") / "tiny-llama"
    tiny_model("llama", vocab_size=300, max_position_embeddings=8192).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    make_questions(place.parent)
    return place


def measure(folder: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    data = ["--model", str(folder), "--data", str(folder.parent / "questions.json"), "--json", str(tmp_path / "o.json")]
    small = ["--prompts", "2", "--passages", "3", "--tokens", "6", "--chunk-size", "64"]
    assert main(["recompute", *data, *small, *options]) == 0
    document: dict[str, Any] = json.loads((tmp_path / "o.json").read_text())
    return document


def test_recompute_compares_every_setting_with_a_full_prefill(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    document = measure(
        folder,
        tmp_path,
        "--histories",
        "head",
        "reordered",
        "--ratios",
        "0",
        "0.1",
        "0.5",
        "--f1",
        "--plot",
        str(picture),
    )
    samples = document["raw"]["samples"]
    labels = [
        "none",
        "selective",
        "first 0.1",
        "first 0.5",
        "even 0.1",
        "even 0.5",
        "cacheblend 0.1",
        "cacheblend 0.5",
        "query 0.1",
        "query 0.5",
        "auto 0.1",
        "auto 0.5",
    ]
    assert [sample["label"] for sample in samples[: len(labels)]] == labels
    assert len(samples) == 2 * 2 * len(labels)
    for sample in samples:
        assert sample["reused"]
        assert sample["kl"] >= 0.0
        assert 0.0 <= sample["top1"] <= 1.0
        assert "f1" in sample
        if sample["strategy"] == "none":
            assert sample["recomputed_tokens"] == 0
        elif sample["strategy"] in ("first", "query"):
            assert sample["recomputed"] == pytest.approx(sample["ratio"], abs=0.02)
    by_label = {label: [s["kl"] for s in samples if s["label"] == label] for label in labels}
    assert sum(by_label["query 0.5"]) < sum(by_label["none"])
    assert [table["title"].split(";")[0] for table in document["tables"]] == [
        "Recompute: passages prefilled before: head",
        "Recompute: passages prefilled before: reordered",
    ]
    ElementTree.fromstring(picture.read_text())


def test_what_one_setting_computes_is_not_found_by_the_next(folder: Path, tmp_path: Path) -> None:
    """The same setting first and last gives the same numbers: nothing was kept in between."""
    alone = measure(folder, tmp_path, "--histories", "unrelated", "--strategies", "none")["raw"]["samples"]
    behind = measure(folder, tmp_path, "--histories", "unrelated", "--strategies", "query", "none", "--ratios", "0.3")
    last = [sample for sample in behind["raw"]["samples"] if sample["label"] == "none"]
    assert [sample["kl"] for sample in alone] == [sample["kl"] for sample in last]


def test_missing_data_and_a_missing_folder_for_the_plot_say_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recompute", "--model", str(folder), "--data", str(tmp_path / "absent.json")]) == 2
    assert "give --data a JSON file" in capsys.readouterr().err
    assert main(["recompute", "--model", str(folder), "--plot", str(tmp_path / "no" / "x.svg")]) == 2
    assert "create it first" in capsys.readouterr().err


def test_settings_are_not_repeated() -> None:
    assert settings_of(["none", "selective", "first", "query"], [0.0, 0.15, 1.0]) == [
        Setting("none", 0.0),
        Setting("selective", 0.15),
        Setting("first", 0.15),
        Setting("first", 1.0),
        Setting("query", 0.15),
    ]


def test_agreement_of_known_distributions() -> None:
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
    found = agreement(full, other)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    assert found["first_kl"] == pytest.approx(first, rel=1e-5)
    assert found["kl"] == pytest.approx((first + second) / 2, rel=1e-5)
    assert (found["top1"], found["all_top1"]) == (0.5, 0.0)
    assert agreement(full, full) == {"kl": 0.0, "first_kl": 0.0, "top1": 1.0, "all_top1": 1.0}


def test_f1_as_squad_has_it() -> None:
    assert normalised("The Exeter-College, a  college!") == ["exetercollege", "college"]
    assert best_f1("exeter college", ["Exeter College."]) == 1.0
    assert best_f1("It was Exeter College", ["nothing", "Exeter College"]) == pytest.approx(2 * 2 / (4 + 2))
    assert best_f1("", ["x"]) == 0.0
    assert best_f1("the", ["a"]) == 1.0


def test_intervals_are_seeded_and_enclose_the_mean() -> None:
    values = [0.1, 0.4, 0.2, 0.9, 0.3]
    mean, low, high = interval(values)
    assert (mean, low, high) == interval(values)
    assert min(values) <= low < mean < high <= max(values)
    assert interval([0.5]) == (0.5, 0.5, 0.5)
