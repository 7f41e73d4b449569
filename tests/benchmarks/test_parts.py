"""Proofs in parts: a run that was stopped and continued says what one says that was never stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import parts
from benchmarks.common.journal import Journal
from benchmarks.common.stand_ins import make_model
from benchmarks.exact import exactness_families
from benchmarks.runner import main
from benchmarks.store import disk_kills, record_fuzz
from kvboost import KVBoost
from tests.helpers.exactness import ExactReuseMachine

PROOFS = {
    "record_fuzz": ["--inputs", "240", "--corruptions", "70"],
    "disk_kills": ["--kills", "40"],
    "exactness_families": ["--requests", "300", "--families", "llama", "gpt2"],
}
OF_ONE_RUN = ("seconds", "reopen, s, at most")  # never the same twice


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, and their work by random numbers alone where it would take seconds or depend on the moment."""
    monkeypatch.setattr(record_fuzz, "_PART", 25)
    monkeypatch.setattr(disk_kills, "_KILLS_PER_DIRECTORY", 6)
    monkeypatch.setattr(disk_kills, "kill_round", lambda directory, capacity, rng: {rng.randrange(900)})
    monkeypatch.setattr(disk_kills, "look", lambda tier, directory, capacity, said: {"files read back": sum(said)})
    monkeypatch.setattr(exactness_families, "_PART", 30)
    monkeypatch.setattr(exactness_families, "run_state_machine_as_test", asks_by_seed)


def asks_by_seed(machine: Any, settings: Any) -> None:
    rng = random.Random(machine._hypothesis_internal_use_seed)
    machine.requests, machine.hits = rng.randrange(20, 40), rng.randrange(1, 20)


def rows(proof: str, tmp_path: Path, *options: str, code: int = 0) -> list[dict[str, str]]:
    """What the table of a run says."""
    file = tmp_path / "report.json"
    assert main([proof, *PROOFS[proof], "--json", str(file), *options]) == code
    table = json.loads(file.read_text())["tables"][0]
    found = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [{name: cell for name, cell in row.items() if name not in OF_ONE_RUN} for row in found]


def stop_at(part: int, proof: str, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """A run that is ended while it writes the line of its n-th part."""

    class Stopped(Journal):
        def add(self, sample: dict[str, Any]) -> None:
            if len(self.samples) == part:
                raise KeyboardInterrupt
            super().add(sample)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "Journal", Stopped)
        with pytest.raises(KeyboardInterrupt):
            main([proof, *PROOFS[proof], "--out", str(out), *options])
    with out.open("a") as file:
        file.write('{"kind": "')


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()][1:]


@pytest.mark.parametrize("part", [0, 1, 5])
@pytest.mark.parametrize("proof", PROOFS)
def test_a_stopped_run_ends_with_the_sums_of_a_whole_one(
    proof: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(proof, tmp_path)
    out = tmp_path / "out.jsonl"
    stop_at(part, proof, out, monkeypatch)
    before = out.read_bytes()
    assert rows(proof, tmp_path, "--out", str(out)) == whole
    assert out.read_bytes().startswith(before[: before.rfind(b"\n")]), "a finished part was written again"
    assert rows(proof, tmp_path, "--out", str(out)) == whole, "a run that has nothing left to do"


@pytest.mark.parametrize("proof", PROOFS)
def test_every_part_has_random_numbers_of_its_own(proof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Seen(random.Random):
        def __init__(self, seed: str) -> None:
            drawn.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(parts.random, "Random", Seen)
    out = tmp_path / "out.jsonl"
    rows(proof, tmp_path, "--out", str(out))
    kinds = {line["kind"] for line in lines(out)}
    ours = [seed for seed in drawn if any(kind in str(seed) for kind in kinds)]
    assert len(set(ours)) == len(ours) == len(lines(out)) > len(kinds)
    if proof == "exactness_families":  # where they reach the work by another seed
        assert len({(line["requests"], line["hits"]) for line in lines(out)}) > len(kinds)


def test_a_run_for_more_continues_one_for_less(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows("disk_kills", tmp_path, "--kills", "24", "--out", str(out))
    first = lines(out)
    assert [row["kill -9"] for row in rows("disk_kills", tmp_path, "--out", str(out))] == ["20", "20"]
    assert lines(out)[: len(first)] == first


def breaks(proof: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the claim does not hold."""

    def crashes(record: record_fuzz.Written, data: bytes) -> str:
        return "accepted" if data == record.data else "crashed"

    if proof == "record_fuzz":
        monkeypatch.setattr(record_fuzz, "feed", crashes)
    else:
        monkeypatch.setattr(disk_kills, "look", lambda *given: {"lost": 1})


@pytest.mark.parametrize("proof", ["record_fuzz", "disk_kills"])
def test_what_was_found_before_the_stop_is_not_forgotten(
    proof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as broken:
        breaks(proof, broken)
        stop_at(1, proof, out, broken)
    column = {"record_fuzz": "crashes", "disk_kills": "lost"}[proof]
    found = [row[column] for row in rows(proof, tmp_path, "--out", str(out), code=1)]
    assert sum(cell != "0" for cell in found) == 1


@pytest.mark.parametrize("proof", PROOFS)
def test_what_raised_is_a_line_and_fails_the_run_that_continues(
    proof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    stop_at(2, proof, out, monkeypatch)

    def differs(*given: Any, **named: Any) -> None:
        raise AssertionError("KV rows differ")

    work = {"record_fuzz": (record_fuzz, "largest_allocation"), "disk_kills": (disk_kills, "kill_round")}
    with monkeypatch.context() as broken:
        broken.setattr(*work.get(proof, (exactness_families, "run_state_machine_as_test")), differs)
        with pytest.raises(AssertionError, match="KV rows differ"):
            main([proof, *PROOFS[proof], "--out", str(out)])
    assert lines(out)[-1]["error"] == "AssertionError: KV rows differ\n"
    found = rows(proof, tmp_path, "--out", str(out), code=1)
    if proof == "exactness_families":
        assert sorted(row["differ"] for row in found) == ["0", "1", "1"]  # one model and all


def test_a_loss_ends_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that went on could be stopped before its line is written, and other kills may not show the loss again."""
    breaks("disk_kills", monkeypatch)
    out = tmp_path / "out.jsonl"
    rows("disk_kills", tmp_path, "--out", str(out), code=1)
    assert {line["kills"] for line in lines(out)} == {2}


def test_a_file_begun_otherwise_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    rows("disk_kills", tmp_path, "--out", str(out))
    assert main(["disk_kills", "--out", str(out), "--seed", "7"]) == 2
    assert "was begun with seed 0 instead of 7" in capsys.readouterr().err
    assert main(["record_fuzz", "--out", str(out)]) == 2
    assert "was begun with proof 'disk_kills' instead of 'record_fuzz'" in capsys.readouterr().err


def test_a_model_that_never_reuses_anything_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_hits(machine: Any, settings: Any) -> None:
        machine.requests = 50

    monkeypatch.setattr(exactness_families, "run_state_machine_as_test", without_hits)
    assert rows("exactness_families", tmp_path, code=1)[0]["with a hit"] == "0"


@pytest.mark.parametrize("name", list(exactness_families._CASES))
def test_prompts_are_longer_than_a_step(name: str) -> None:
    machine = exactness_families._tiny(name)
    with KVBoost(machine["model"], None, quality="exact") as engine:
        grid = engine.session.prefiller.rule.grid
    assert grid is None or grid * 3 <= ExactReuseMachine.longest * machine["scale"]


def test_trained_models_take_part_in_two_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = make_model(tmp_path)
    found = rows("exactness_families", tmp_path, "--requests", "2", "--model", str(folder))
    assert [row["model"] for row in found] == [f"{folder.name}, float32", f"{folder.name}, bfloat16", "all"]
    assert all(int(row["with a hit"]) > 0 for row in found)
