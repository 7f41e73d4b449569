"""A GPU day on a tiny model: whole, killed, resumed, with wrong answers put in, and on simulated devices."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.measure import TextSource
from benchmarks.common.stand_ins import make_model
from benchmarks.exact import gpu_day
from benchmarks.gpu import answers, bits, copies, day, memory, speed
from benchmarks.gpu.day import Day, Findings, Sizes
from benchmarks.gpu.page import html_page
from benchmarks.gpu.record import DayFile, explain, without_places
from benchmarks.runner import main
from kvboost.hf.codec import Int8Codec
from kvboost.hf.ragged import RaggedRunner
from kvboost.store import DiskTier, HostTier, MemoryStore
from kvboost.types import KVBlock, PutOutcome
from tests.helpers.devices import Devices, put
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_SIZES = ("--lengths", "96", "--rounds", "1", "--new", "8")
_SECTIONS = ["answers", "bits", "copies", "speed", "memory"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    place = tmp_path / "results"
    place.mkdir()
    return place


def run_day(model: Path, results: Path, *options: str) -> int:
    return main(["gpu_day", "--model", str(model), "--short", *_SIZES, "--results", str(results), *options])


def written(results: Path) -> tuple[dict[str, Any], str]:
    (file,), (page,) = results.glob("*.json"), results.glob("*.html")
    return json.loads(file.read_text()), page.read_text()


def statuses(section: dict[str, Any]) -> dict[str, str]:
    return {check["what"]: check["status"] for check in section["checks"]}


def without_work(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    """Sections that only say that they ran."""
    for name, section in gpu_day.SECTIONS.items():
        parts = {"part": lambda day, findings, name=name: ran.append(name)}
        monkeypatch.setitem(gpu_day.SECTIONS, name, replace(section, parts=parts))


def test_a_whole_day_on_a_tiny_model(model: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_day(model, results) == 0
    document, page = written(results)
    sections = document["sections"]
    assert list(sections) == _SECTIONS
    for section in sections.values():
        assert section["state"] == "done"
        assert section["setup"]["torch"] == torch.__version__
        assert section["setup"]["device"] == "CPU"
        assert len(section["setup"]["model digest"]) == 16
        assert section["settings"]["lengths"] == [96]
        assert "FAILED" not in statuses(section).values()
    assert statuses(sections["answers"])["KV from the disk tier"] == "passed"
    assert statuses(sections["answers"])["KV from the host tier"] == "not run"
    assert statuses(sections["bits"])["numerics='bitwise': warm equals cold"] == "passed"
    assert sections["copies"]["raw"]["One decode step, by sequences that decode together"]["ours, 8"]["kinds"]
    assert set(sections["speed"]["raw"]["first token, 96"]["call_ms"]) == {"plain", "cold", "warm"}
    assert set(sections["speed"]["raw"]["loading"]) == {"computed by plain", "memory", "disk"}
    assert sections["memory"]["raw"]["peak"]["estimate"] > 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert [line.rpartition("/")[2] for line in last] == ["gpu_day-tiny-llama-cpu.json", "gpu_day-tiny-llama-cpu.html"]
    # Nothing of this machine, and nothing from outside.
    for text in (json.dumps(document), page):
        assert not re.search(r"/(tmp|root|home|usr|work)\b", text)
        assert str(results.parent.name) not in text
    assert "import argparse" not in page  # the prompts are Python's own library
    assert not re.search(r"(src|href)=|https?://|<script|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_what_is_done_is_not_run_again(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    without_work(monkeypatch, ran)
    assert run_day(model, results) == 0
    assert ran == _SECTIONS
    monkeypatch.setattr(gpu_day, "_load", lambda *given: pytest.fail("the model is not needed"))
    assert run_day(model, results) == 0
    assert ran == _SECTIONS
    assert capsys.readouterr().err.count("done already") == len(_SECTIONS)
    monkeypatch.undo()
    without_work(monkeypatch, ran)
    assert run_day(model, results, "--section", "bits", "--again") == 0
    assert ran == [*_SECTIONS, "bits"]
    # Other settings, other figures.
    assert run_day(model, results, "--section", "memory", "--new", "9") == 0
    assert ran == [*_SECTIONS, "bits", "memory"]


_KILLED = """
import os, signal, sys
from benchmarks.exact import gpu_day
from benchmarks.runner import main
from dataclasses import replace

def killed(day, findings):
    findings.note("lost", "with the section")
    os.kill(os.getpid(), signal.SIGKILL)

for name, section in gpu_day.SECTIONS.items():
    part = killed if name == "bits" else lambda day, findings: findings.note("kept", "of the first run")
    gpu_day.SECTIONS[name] = replace(section, parts={"part": part})
main(sys.argv[1:])
"""


def test_a_killed_run_loses_only_the_section_that_ran(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["gpu_day", "--model", str(model), "--short", *_SIZES, "--results", str(results)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    killed = subprocess.run(
        [sys.executable, "-c", threads + _KILLED, *options], env=environment, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    document, page = written(results)
    assert {name: section["state"] for name, section in document["sections"].items()} == {
        "answers": "done",
        "bits": "begun",
    }
    assert "Right answers" in page
    ran: list[str] = []
    without_work(monkeypatch, ran)
    assert run_day(model, results) == 0
    assert ran == ["copies", "speed", "memory", "bits"]  # what ended the process cannot keep others from running
    document, _ = written(results)
    assert document["sections"]["answers"]["checks"][0]["found"] == "of the first run"
    assert {section["state"] for section in document["sections"].values()} == {"done"}


def test_an_error_is_its_sections_failure_and_the_next_goes_on(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    without_work(monkeypatch, ran)

    def broken(day: Day, findings: Findings) -> None:
        raise OSError(f"cannot read {model}/weights.bin")

    parts = {"broken": broken, "after": lambda day, findings: ran.append("after")}
    section = gpu_day.SECTIONS["answers"]
    monkeypatch.setitem(gpu_day.SECTIONS, "answers", replace(section, parts=parts))
    assert run_day(model, results) == 1
    assert ran == ["after", *_SECTIONS[1:]]
    document, page = written(results)
    assert document["sections"]["answers"]["state"] == "ended by an error"
    (check,) = document["sections"]["answers"]["checks"]
    assert check["status"] == "FAILED"
    assert check["found"].startswith("OSError: cannot read weights.bin\n")
    assert "test_gpu_day.py" in check["found"]
    assert str(model.parent) not in page
    # It is no result: the next start tries it again, and nothing else.
    monkeypatch.setitem(gpu_day.SECTIONS, "answers", section)
    without_work(monkeypatch, ran)
    assert run_day(model, results) == 0
    assert ran[-1] == "answers"
    assert len(ran) == 1 + len(_SECTIONS)


def test_a_dead_device_ends_the_run_and_loses_nothing(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    without_work(monkeypatch, ran)
    monkeypatch.setattr(gpu_day, "_dead", lambda day: "AcceleratorError" if ran == ["answers", "bits"] else None)
    assert run_day(model, results) == 1
    assert ran == ["answers", "bits"]
    assert "start the same command again" in capsys.readouterr().err
    assert list(written(results)[0]["sections"]) == ["answers", "bits"]


# Wrong answers, put in one by one. Each must be found, by the check that is for it.


def _seed_other_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that returns the KV of the chunk stored before, repeated or cut to the length asked for."""
    before: list[Any] = []
    put_block = MemoryStore.put

    def wrong(store: MemoryStore, block: KVBlock) -> PutOutcome:
        other = before[-1] if before else block.tensors
        before.append(block.tensors)
        length = block.tensors[0].shape[2]
        longer = (torch.cat([tensor] * length, dim=2) for tensor in other)  # [slots, heads, tokens, dim]
        tensors = tuple(tensor[:, :, :length].contiguous() for tensor in longer)
        return put_block(store, replace(block, tensors=tensors))

    monkeypatch.setattr(MemoryStore, "put", wrong)


def _seed_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk tier that returns a little less than it was given; checksums of what it wrote are right."""
    monkeypatch.setattr(DiskTier, "load", _shrunk(DiskTier.load))


def _shrunk(load: Callable[..., Iterator[KVBlock | None]]) -> Callable[..., Iterator[KVBlock | None]]:
    def wrong(tier: Any, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        for block in load(tier, keys):
            yield block and replace(block, tensors=tuple(tensor * 0.999 for tensor in block.tensors))

    return wrong


def _seed_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits that unpack to a little more than they should."""
    unpack = Int8Codec.unpack
    monkeypatch.setattr(Int8Codec, "unpack", lambda *given: tuple(1.2 * tensor for tensor in unpack(*given)))


def _seed_joint_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that get each other's logits: in the runner's thread only, or its own probe would refuse at once."""
    decode = RaggedRunner.decode

    def wrong(*given: Any, **more: Any) -> torch.Tensor:
        logits = decode(*given, **more)
        return logits.roll(1, 0) if threading.current_thread().name == "kvboost-batch" else logits

    monkeypatch.setattr(RaggedRunner, "decode", wrong)


def _seed_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored KV whose last bit differs: no tolerance sees it."""
    put_block = MemoryStore.put

    def wrong(store: MemoryStore, block: KVBlock) -> PutOutcome:
        return put_block(store, replace(block, tensors=tuple(tensor * (1 + 1e-6) for tensor in block.tensors)))

    monkeypatch.setattr(MemoryStore, "put", wrong)


def _seed_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers itself would answer otherwise."""
    plain = Day.plain_logits
    monkeypatch.setattr(Day, "plain_logits", lambda *given: 1.01 * plain(*given))


@pytest.mark.parametrize(
    ("seed", "section", "found_by"),
    [
        (_seed_other_chunk, "answers", {"warm, cold and plain Transformers answer alike", "KV from memory"}),
        (_seed_disk, "answers", {"KV from the disk tier"}),
        (_seed_packing, "answers", {"KV in 8 bits unpacks to what was packed"}),
        (_seed_joint_decoding, "answers", {"3 jobs side by side against each alone"}),
        (_seed_a_bit, "answers", {"KV from memory"}),
        (_seed_a_bit, "bits", {"numerics='bitwise': warm equals cold"}),
        (_seed_plain, "answers", {"warm, cold and plain Transformers answer alike"}),
    ],
)
def test_a_wrong_answer_fails_and_stands_first(
    seed: Callable[[pytest.MonkeyPatch], None],
    section: str,
    found_by: set[str],
    model: Path,
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed(monkeypatch)
    assert run_day(model, results, "--section", section) == 1
    document, page = written(results)
    found = statuses(document["sections"][section])
    assert {what for what, status in found.items() if status == "FAILED"} >= found_by
    assert page.index("What failed") < page.index("<h2>Sections")
    first_rows = re.findall(r'<section class="card "><h2>[12]\. .*?<tbody><tr><td class="status (\w+)">', page, re.S)
    assert first_rows == ["bad"]


def test_a_section_that_failed_stands_before_those_that_did_not(tmp_path: Path) -> None:
    file = DayFile(tmp_path / "day.json", {"model": "m"}, {})
    for name, holds in (("one", True), ("two", False)):
        findings = Findings()
        findings.check("it holds", holds, found="<b>", expected="yes")
        file.keep(name, findings.as_dict(), state="done", seconds=1.0)
    page = html_page(file, {"one": "1. One", "two": "2. Two", "three": "3. Three"})
    cards = re.findall(r"<h2>(.*?)</h2>", page)
    assert cards == ["What failed", "Sections", "Measured on", "2. Two", "1. One"]
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "earlier run" not in page
    later = DayFile(tmp_path / "day.json", {"model": "m"}, {"rounds": 9})
    assert html_page(later, {"one": "1. One"}).count("earlier run") == 2
    assert not later.is_done("one")
    assert re.search(r"3\. Three</td><td class=\"status soft\">not run", page)


def test_answers_that_differ_by_rounding_are_told_from_wrong_ones(model: Path) -> None:
    tiny = tiny_model("llama", vocab_size=300)
    measured = _day(tiny, count=copies.profiled)
    prompt = measured.prompt(0, 40)
    logits = measured.plain_logits(prompt)
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert measured.other_answer(prompt, [best, 5], [best, 5]) is None
    assert measured.other_answer(prompt, [best], [best, 5]) == "1 tokens instead of 2"
    assert "another token at 0" in str(measured.other_answer(prompt, [worst, 5], [best, 5]))
    with torch.no_grad():  # two tokens that are equally likely everywhere
        tiny.get_output_embeddings().weight[worst] = tiny.get_output_embeddings().weight[best]
    assert measured.other_answer(prompt, [worst, 5], [best, 7]) is None


def test_memory_that_grows_is_found(model: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(10**9, 10**12, 10**8))
    monkeypatch.setattr(memory._Meter, "used", lambda meter: next(used))
    monkeypatch.setattr(memory._Meter, "peak", lambda meter: 10**12)
    assert run_day(model, results, "--section", "memory") == 1
    found = statuses(written(results)[0]["sections"]["memory"])
    assert found == {"peak against the estimate": "FAILED", "growth over a loop of requests": "FAILED"}


def test_a_warm_sample_without_reuse_is_an_error_and_no_time(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "put", lambda store, block: PutOutcome.REFUSED)
    assert run_day(model, results, "--section", "speed") == 1
    section = written(results)[0]["sections"]["speed"]
    assert any("known tokens were reused" in check["found"] for check in section["checks"])
    assert not any(name.startswith("first token") for name in section["raw"])


def test_names_of_the_profiler_are_counted_by_what_they_mean() -> None:
    names = Counter(
        {
            "aten::mm": 3,
            "cudaLaunchKernel": 5,
            "cudaLaunchKernelExC": 1,
            "cuLaunchKernel": 2,
            "hipExtModuleLaunchKernel": 1,
            "urEnqueueKernelLaunch": 1,
            "cudaStreamSynchronize": 2,
            "cudaDeviceSynchronize": 1,
            "hipEventSynchronize": 1,
            "cudaMemcpyAsync": 4,
            "Memcpy HtoD (Pageable -> Device)": 2,
            "Memcpy HtoD (Pinned -> Device)": 7,
            "Memcpy DtoH (Device -> Pageable)": 1,
            "Memcpy DtoD (Device -> Device)": 9,
            "void at::native::elementwise_kernel<...>": 50,
            "cudaStreamIsCapturing": 6,
        }
    )
    counts, same = copies.by_kind(names)
    expected = {"operators": 3, "launches": 10, "waits": 4, "copy calls": 4, "uploads": 9, "downloads": 1}
    assert counts == {**expected, "not pinned": 3}
    assert same == names


def test_the_profiler_sees_operators_of_the_cpu() -> None:
    counts, names = copies.profiled(lambda: torch.ones(3, 3) @ torch.ones(3, 3))
    assert names["aten::mm"] == 1
    assert counts["operators"] >= 3


def _day(tiny: Any, *, count: day.Counting) -> Day:
    tokenizer = byte_tokenizer()
    sizes = Sizes(lengths=(96,), rounds=1, new=4, requests=4, positions=8000)
    return Day(tiny, tokenizer, TextSource(tokenizer), sizes, count)


_ON_DEVICES = [
    *((answers, name) for name in answers.PARTS if name != "jobs side by side"),  # whose thread makes no such tensors
    (bits, "warm against cold"),
    *((copies, name) for name in copies.PARTS),
    (speed, "first tokens"),
    (speed, "loading"),
    *((memory, name) for name in memory.PARTS),
]


@pytest.mark.parametrize(("module", "part"), _ON_DEVICES)
def test_parts_run_on_a_simulated_device(module: Any, part: str) -> None:
    tiny = put(tiny_model("llama", vocab_size=300, max_position_embeddings=8192), lambda _: "cuda:0")
    findings = Findings()
    kinds = {"launch": "launches", "wait": "waits", "upload": "uploads", "download": "downloads"}
    with Devices() as devices:

        def count(work: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
            seen = devices.during(work)
            return Counter({kinds[kind]: seen[kind] for kind in kinds}), Counter(event.op for event in devices.events)

        module.PARTS[part](_day(tiny, count=count), findings)
    assert "FAILED" not in [check["status"] for check in findings.checks]
    assert findings.checks or findings.tables
    if module is copies:
        (told,) = findings.raw.values()
        assert all(one["kinds"]["launches"] > 0 for one in told.values())
    if part == "warm against cold":
        assert statuses(findings.as_dict())["numerics='bitwise': warm equals cold"] == "passed"


def test_a_host_tier_that_returns_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = put(tiny_model("llama", vocab_size=300), lambda _: "cuda:0")
    found = []
    for seeded in (False, True):
        if seeded:
            monkeypatch.setattr(HostTier, "load", _shrunk(HostTier.load))
        findings = Findings()
        with Devices():
            answers.tiers(_day(tiny, count=copies.profiled), findings)
        found.append(statuses(findings.as_dict()))
    assert found[0]["KV from the host tier"] == "passed"
    assert found[1] == {**found[0], "KV from the host tier": "FAILED"}


def test_bits_that_nothing_was_reused_for_are_not_called_equal() -> None:
    """On a grid of 1,024 a model of 512 positions resumes nowhere."""
    tiny = put(tiny_model("llama", vocab_size=300), lambda _: "cuda:0")
    findings = Findings()
    with Devices():
        measured = _day(tiny, count=copies.profiled)
        measured = replace(measured, sizes=replace(measured.sizes, positions=400))
        bits.warm_and_cold(measured, findings)
    assert statuses(findings.as_dict())["numerics='bitwise': warm equals cold"] == "not run"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot open /somewhere/else/model.bin: no", "cannot open model.bin: no"),
        ("'~/cache/x.json'", "'x.json'"),
        ("in ../up/file.py", "in file.py"),
        ("640 tokens/s and 1/2 of it, and/or", "640 tokens/s and 1/2 of it, and/or"),
        ("torch 2.13.0+cpu", "torch 2.13.0+cpu"),
        ("/a/b/", "(folder)"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, told: str) -> None:
    assert without_places({"x": [text]}) == {"x": [told]}


def test_host_and_user_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.record._NAMES", {"alices-box": "(host)", "alice": "(user)"})
    assert without_places("alice at alices-box, malice") == "(user) at (host), malice"


def test_a_long_message_is_cut() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("x" * 5000)
    assert len(explain(caught.value)) < 1000


def test_prompts_are_cut_to_the_models_positions(
    model: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    without_work(monkeypatch, ran)
    assert run_day(model, results, "--lengths", "500", "100000", "--section", "speed") == 0
    assert written(results)[0]["settings"]["lengths"] == [500, 8192 - 8 - 128]
    assert run_day(model, results, "--new", "8100") == 2
    assert "lower --new" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", '{"gpu_day": 99, "sections": {}}', '{"gpu_day": 1, "sections": {"a": {}}}']
)
def test_another_file_is_left_alone(
    content: str, model: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = results / "gpu_day-tiny-llama-cpu.json"
    file.write_text(content)
    assert run_day(model, results) == 2
    assert "move it away" in capsys.readouterr().err
    assert file.read_text() == content


def test_results_go_into_a_folder_that_is_there(model: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_day(model, results / "no") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("device", "said"), [("cuda", "sees no cuda device"), ("nonsense", "is no device")])
def test_a_device_that_is_not_there_is_one_line(
    device: str,
    said: str,
    model: Path,
    results: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert run_day(model, results, "--device", device) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not list(results.iterdir())


def test_who_stops_it_is_told_how_to_go_on(
    model: Path, results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.exact.gpu_day._run_parts", stopped)
    assert run_day(model, results) == 2
    assert "the same command runs it again" in capsys.readouterr().err
