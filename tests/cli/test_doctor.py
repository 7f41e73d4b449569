from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvboost.cli import doctor as cli
from kvboost.cli import main
from kvboost.engine import forecast as engine_memory
from tests.helpers.awq import save_awq
from tests.helpers.models import tiny_model
from tests.helpers.packing import pack_all
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(autouse=True)
def _quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.offload.rates._SECONDS", 0.001)


def test_without_a_model_the_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in ("machine", "memory", "torch", "transformers", "[serve]", "[redis]"):
        assert any(line.startswith(f"{name} ") for line in said.splitlines()), said


def test_missing_extras_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.EXTRAS, "crypto", ("no_such_module_at_all",))
    assert (
        cli.machine()["[crypto]"]
        == 'missing: install KVBoost with its extra crypto (in a checkout: pip install ".[crypto]")'
    )
    assert cli.machine()["[serve]"] == "installed"


def test_a_model_is_tried_and_estimated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--context", "1000", "--batch", "4"]) == 0
    said = capsys.readouterr()
    assert "exact reuse         on" in said.out
    assert "attention           sdpa" in said.out
    assert "self-test           passed: of 96 prompt tokens, 95 came from the cache bit for bit" in said.out
    assert "Memory for 4 x 1000 tokens, with all caches full:" in said.out
    assert "KV of running requests" in said.out
    assert "Measured here: memory" in said.out
    assert "--kv-cache-bits 8 --cache-bytes " in said.out
    assert "what to change" in said.out
    assert f"loading {folder}" in said.err


def test_packed_weights_are_in_the_estimate(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_all(monkeypatch)
    assert main(["doctor", str(folder), "--no-load"]) == 0
    assert "packed" not in capsys.readouterr().out
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "  packed weights  " in said
    assert "MB packed for the CPU's kernels" in said


def test_without_loading_only_the_estimate_is_made(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvboost.engine.engine.load_model", never)
    assert main(["doctor", str(folder), "--no-load"]) == 0
    said = capsys.readouterr().out
    assert "self-test           not run: as asked" in said
    assert "Memory for 1 x 2048 tokens" in said  # as many as the model was made for
    assert main(["doctor", str(folder), "--no-load", "--context", "5000"]) == 0
    assert "made for 2048 tokens" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_not_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_memory, "memory_available", lambda device="cpu": -(10**12))
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "self-test           not run: the model does not fit into memory" in said
    assert "nothing listed fits: lower --context or --batch" in said


def test_the_fastest_way_that_fits_is_advised(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_memory, "memory_available", lambda device="cpu": 1_900_000_000)
    assert main(["doctor", str(folder), "--no-load", "--cache-bytes", "2GB"]) == 0
    said = capsys.readouterr().out
    assert "what to change      KV stored in 8 bits: --kv-cache-bits 8 --cache-bytes " in said


def test_settings_reach_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--no-load", "--cache-bytes", "3GiB"]) == 0
    assert "chunks in memory                   3.0 GiB" in capsys.readouterr().out


def test_a_self_test_without_reuse_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--cache-bytes", "0"]) == 0
    assert "self-test           nothing was reused: the cache is too small" in capsys.readouterr().out


def test_another_answer_from_the_cache_fails_the_test() -> None:
    class Broken:
        model = tiny_model("llama")

        def __init__(self) -> None:
            self.calls = 0

        def generate(self, tokens: list[int], **_: Any) -> Any:
            self.calls += 1
            return dataclasses.make_dataclass("R", ["token_ids"])((self.calls,))

    assert cli.self_test(Broken()).startswith("FAILED")  # type: ignore[arg-type]


def test_a_model_without_an_estimate_is_still_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=260, hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "exact reuse         off" in said
    assert "memory estimate     none: mamba does not say how many heads" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere-at-all", "--no-load"], "nowhere-at-all"),
        (["./nowhere"], "there is no model folder"),
        (["MODEL", "--context", "0"], "--context"),
        (["MODEL", "--no-load", "--weight-budget", "10"], "too small"),
        (["MODEL", "--no-load", "--weight-budget", "much"], "is not a size"),
        (["MODEL", "--no-load", "--dtype", "float17"], "dtype is not one torch knows"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *(str(folder) if word == "MODEL" else word for word in arguments)]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("kvboost doctor: ")
    assert message in last


def test_quantised_weights_are_not_estimated_as_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_awq(tiny_model("llama", hidden_size=64, intermediate_size=128), tmp_path, group=32)
    assert main(["doctor", str(tmp_path), "--no-load"]) != 0
    assert "its weights are quantised, which is not built so far" in capsys.readouterr().err
