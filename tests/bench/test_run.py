"""A run on a tiny model: who is asked what, what is left out, and that a second run goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvboost.bench.contestants import Contestant, Missing
from kvboost.bench.journal import Journal, load
from kvboost.bench.page import html_report
from kvboost.bench.report import BenchError, describe_machine
from kvboost.bench.run import CAPACITY, KIND, Bench, Options
from kvboost.bench.summary import pairings, report_of


def journal_of(options: Options, file: Path) -> Journal:
    return Journal(file, KIND, options.settings(), describe_machine(dtype="auto", model=options.model))


@pytest.fixture(scope="module")
def file(model: str, stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain Transformers, a kept cache and a stand-in over a chat; one rival has no environment."""
    out = tmp_path_factory.mktemp("run") / "samples.jsonl"
    options = Options(model, tokens=700, new=3, cold=1, pythons={"vllm": str(stand_in)})
    with journal_of(options, out) as journal:
        rivals = ["llama-cpp", "plain", "kept-cache", "vllm", "kvboost-0.9"]  # the first one is not there
        left_out = Bench(options, journal).run(["chat"], rivals, alone=True)
    assert left_out == [
        "llama-cpp: install llama-cpp-python and add --rival llama-cpp=PATH/TO/python --gguf FILE",
        "kvboost-0.9: install kvboost==0.9.0 and transformers==4.57.6 and add --rival kvboost-0.9=PATH/TO/python",
    ]
    return out


def test_ours_and_a_rival_get_the_same_prompts_and_reuse_the_same_turns(file: Path) -> None:
    plain, kept, stand_in = pairings(load(file, KIND)[1])
    assert [pairing.rival for pairing in (plain, kept, stand_in)] == ["plain", "kept-cache", "vllm"]
    assert len(plain.ours) == len(plain.theirs) == 7  # the first of eight turns only fills caches
    for pairing in (plain, kept):
        same, count = pairing.same_answers()
        assert same == count
    assert all(answer["cached"] == 0 for answer in (*plain.theirs, *plain.cold_ours, *kept.cold_theirs))
    cached = [answer["cached"] for answer in kept.ours]
    assert cached == sorted(cached)
    assert cached[0] > 100
    assert cached == [answer["cached"] for answer in kept.theirs]
    assert plain.threads[0] == plain.threads[1]
    assert plain.bitwise is True
    assert kept.bitwise is None  # asked once
    assert plain.memory[0] > 50e6
    assert plain.share("approximate") == 0.0
    assert all(answer["cpu_ms"] > 0 and answer["total_ms"] >= answer["ttft_ms"] for answer in plain.ours)


def test_a_rival_does_not_see_this_package(file: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    with Contestant("vllm", {}, python=str(stand_in)) as rival:
        assert rival.versions == {"path": ""}
    with Contestant("vllm-kvboost", {}, python=str(stand_in)) as one_of_ours:
        assert one_of_ours.versions == {"path": "/somewhere"}


def test_a_second_run_measures_nothing_again(file: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.bench.run.Contestant", lambda *args, **more: pytest.fail("started again"))
    before = file.read_bytes()
    options = Options(model, tokens=700, new=3, cold=1)
    with journal_of(options, file) as journal:
        assert Bench(options, journal).run(["chat"], ["plain", "kept-cache", "vllm"], alone=True) == []
    assert file.read_bytes() == before
    with pytest.raises(BenchError, match="was begun with tokens 700 instead of 800"):
        journal_of(Options(model, tokens=800, new=3, cold=1), file)


def test_a_file_is_not_continued_with_another_model_or_machine(file: Path, model: str, tmp_path: Path) -> None:
    options = Options(model, tokens=700, new=3, cold=1)
    namesake = shutil.copytree(model, tmp_path / Path(model).name)
    with journal_of(replace(options, model=str(namesake)), file):
        pass  # a copy is the same model
    config = namesake / "config.json"
    text = config.read_text()
    config.write_text(json.dumps({**json.loads(text), "rope_theta": 7.0}))
    with pytest.raises(BenchError, match="was begun with files"):
        journal_of(replace(options, model=str(namesake)), file)
    config.write_text(text)
    with (namesake / "model.safetensors").open("ab") as weights:
        weights.write(b" ")
    with pytest.raises(BenchError, match="was begun with files"):
        journal_of(replace(options, model=str(namesake)), file)
    for name in ("cpu", "torch", "transformers"):
        machine = replace(describe_machine(model=model), **{name: "another"})
        with pytest.raises(BenchError, match=f"another machine, with {name} .* instead of 'another'; .* another --out"):
            Journal(file, KIND, options.settings(), machine)


def test_tables_and_page_say_what_was_measured(file: Path) -> None:
    header, samples = load(file, KIND)
    assert any(sample["rival"] == CAPACITY for sample in samples)
    report = report_of(header, samples)
    assert not report.failed
    said = report.markdown()
    assert said.count("| chat ") == 6
    assert "1 of 1 workloads" in said
    assert "vllm had 2 threads and ours 1" in said
    assert "plain had" not in said
    assert "dtype float32;" in said  # not auto
    assert "dtypes of its own file" not in said
    for sample in samples:
        if sample["rival"] == "vllm":
            sample["dtypes"]["vllm"] = None
    assert "vllm ran in the dtypes of its own file" in report_of(header, samples).markdown()
    page = html_report([(header, samples)])
    assert page.count("<svg") == 3  # nothing was recomputed
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert "tiny-llama" in page
    assert str(file.parent) not in page


def test_other_bits_fail_the_run(file: Path) -> None:
    header, samples = load(file, KIND)
    samples[0]["bitwise"] = False
    assert report_of(header, samples).failed


def test_a_rival_that_fails_is_left_out_and_ours_ends_the_run(model: str, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\necho \'{"missing": "vllm"}\'\n')
    broken.chmod(0o755)
    with pytest.raises(Missing, match="its Python has no vllm; install vllm and add --rival vllm="):
        Contestant("vllm", {}, python=str(broken))
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
    with pytest.raises(Missing, match="vllm: it ended with 3: out of luck"):
        Contestant("vllm", {}, python=str(broken))
    broken.write_text("#!/bin/sh\nexec >&-\necho 'slow to end' >&2\nsleep 0.3\nexit 4\n")
    with pytest.raises(Missing, match="vllm: it ended with 4: slow to end"):
        Contestant("vllm", {}, python=str(broken))
    for said in ("hello", "7"):
        broken.write_text(f"#!/bin/sh\necho {said}\n")
        with pytest.raises(Missing, match=f"vllm: it said '{said}', which is no answer"):
            Contestant("vllm", {}, python=str(broken))
    with pytest.raises(BenchError, match="our engine cannot start"):
        Contestant("kvboost", {"model": str(tmp_path / "nowhere")})
    with Contestant("kvboost", {"model": model, "engine": {"quality": "exact"}}) as ours:
        with pytest.raises(BenchError, match="kvboost failed: .*shorten the prompt"):
            ours.ask("generate", tokens=[5] * 9000, new=1)
        answer = ours.ask("generate", tokens=[5] * 90, new=1)  # it goes on
        assert len(answer["tokens"]) == 1
