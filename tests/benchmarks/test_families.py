"""Families: one of every kind has the outcome that is expected, and no family of Transformers is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from benchmarks.exact import families
from benchmarks.exact.families import KINDS, Outcome, look_at, names, read_expected
from benchmarks.runner import main
from kvboost.engine import KVBoost


def test_every_family_of_transformers_is_known() -> None:
    new = sorted(set(names()) - set(read_expected()))
    assert not new, (
        f"Transformers {transformers.__version__} has causal language models that families.json does not know: "
        f"{', '.join(new)}. Run `python -m benchmarks families --families {' '.join(new)} --write-expected`, see that "
        "their outcomes are right (a configuration that is not built may need a line in family_configs.py), and commit "
        "the file"
    )


def test_the_short_form_finds_what_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "families.json"
    assert main(["families", "--quick", "--json", str(file)]) == 0
    outcomes = {found["family"]: found for found in json.loads(file.read_text())["raw"]["outcomes"]}
    assert set(outcomes) == set(KINDS)
    assert outcomes["llama"]["hit"] == 300
    assert outcomes["llama"]["difference"] == 0.0
    assert outcomes["llama"]["greedy"] == "plain's"
    assert {found["outcome"] for found in outcomes.values()} >= {"equal", "refused", "no cache", "not run"}


def test_another_outcome_than_expected_is_a_claim_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "families.json"
    file.write_text(json.dumps({"openai-gpt": "equal"}))
    monkeypatch.setattr(families, "EXPECTED", file)
    assert main(["families", "--families", "openai-gpt"]) == 1
    assert "openai-gpt: no cache, expected: equal" in capsys.readouterr().out
    assert main(["families", "--families", "openai-gpt", "--write-expected"]) == 0
    assert json.loads(file.read_text()) == {"openai-gpt": "no cache"}


def test_a_family_over_its_time_or_one_that_crashes_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert families._in_a_process("llama", str(tmp_path), 0).reason == "not done after 0 s"
    monkeypatch.setattr(families, "_send", _crash)
    assert families._in_a_process("llama", str(tmp_path), 60).reason == "its process ended with 3"


def _crash(*_: object) -> None:
    raise SystemExit(3)


def test_a_warm_request_of_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = KVBoost.prefill

    def off(engine: KVBoost, *given: object, **more: object) -> object:
        result = prefill(engine, *given, **more)  # type: ignore[arg-type]
        if result.reuse.exact_tokens:
            result.logits[0] += _OFF[0]
        return result

    monkeypatch.setattr(KVBoost, "prefill", off)
    _OFF[0] = 1e-7
    assert look_at("llama").outcome == "rounding"
    _OFF[0] = 1.0
    assert look_at("llama").outcome == "differs"


_OFF = [0.0]


def test_one_that_is_not_built_says_why() -> None:
    assert look_at("musicgen") == Outcome(
        "musicgen", reason="not built: AttributeError: 'MusicgenConfig' object has no attribute 'dropout'"
    )
