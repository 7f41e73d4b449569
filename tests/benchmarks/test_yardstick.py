"""The yardstick on a tiny model, and the figures, candidates and files it is made of."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.approx.yard import variants
from benchmarks.approx.yard.strategies import Even, Setting, parse_strategy, settings_of
from benchmarks.approx.yard.traffic import Stream, first_visits
from benchmarks.common import rag
from benchmarks.common.quality import Reference, forward, harm
from benchmarks.common.stand_ins import make_model, make_questions
from benchmarks.internals import KVLayout, SlabCache, TensorSpec
from benchmarks.runner import main
from kvboost import KVBoost
from kvboost.extend import RepairSituation
from kvboost.types import CONTEXT_MARK_BYTES, Chunk, KVBlock
from tests.helpers.tokenizer import byte_tokenizer

Tiny = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("yard")
    file = make_questions(place)
    records = json.loads(file.read_text())
    for passage in (passage for record in records for passage in record["ctxs"]):
        passage["text"] = passage["text"][:200]  # every byte is a token
    file.write_text(json.dumps(records))
    return make_model(place)


def measure(folder: Path, out: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    data = ["--model", str(folder), "--data", str(folder.parent / "questions.json"), "--out", str(out)]
    small = ["--passages", "2", "--tokens", "4"]
    assert main(["yardstick", *data, *small, *options]) == code
    return [json.loads(line) for line in out.read_text().splitlines()[1:]]


def test_every_history_is_compared_with_a_full_reading(folder: Path, tmp_path: Path) -> None:
    strategies = ["even=1", "auto=0.3", "variants-nearest", "variants-mean=0.3", "variants-fit=0.3"]
    found = measure(folder, tmp_path / "o.jsonl", "--prompts", "1", "--strategies", *strategies)
    by = {(sample["history"], sample["strategy"]): sample for sample in found}
    assert len(by) == len(found)
    for history in ("alone", "unrelated", "reordered"):
        assert by[history, "none"]["found"] == 1.0
        assert by[history, "none"]["recomputed"] == 0.0
        assert by[history, "none"]["kl"] > 0.0
        assert by[history, "auto=0.3"]["recomputed"] == pytest.approx(0.3, abs=0.02)
        # All positions recomputed are the full reading.
        assert by[history, "even=1"]["kl"] < 1e-9
        assert by[history, "even=1"]["same_answer"]
        assert by[history, "even=1"]["f1"] == by[history, "even=1"]["full_f1"]
    assert by["floor", "exact reuse"]["kl"] < 1e-9 < by["floor", "KV in 8 bits"]["kl"]
    assert by["floor", "bfloat16 instead of float32"]["kl"] > 1e-9
    assert ("alone", "variants-mean=0.3") not in by  # alone, a passage has one variant
    assert by["unrelated", "variants-fit=0.3"]["variants"] == [2, 2]  # two unrelated passages have two orders
    kls = {by["unrelated", name]["kl"] for name in ("none", "variants-mean=0.3", "variants-fit=0.3")}
    assert len(kls) == 3


def test_a_run_is_continued_and_comes_out_as_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    options = ["--floors", "--histories", "reordered", "traffic", "--strategies", "even=0.3"]
    whole = measure(folder, tmp_path / "whole.jsonl", "--prompts", "2", *options)
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(lines[:-2]) + lines[-2][:20])  # killed while it wrote
    continued = measure(folder, part, "--prompts", "2", *options)
    assert [_lasting(sample) for sample in continued] == [_lasting(sample) for sample in whole]
    assert part.read_text().startswith("".join(lines[:-2]))
    assert {sample["found"] for sample in whole if sample["history"] == "traffic"} == {1.0}
    one = measure(folder, tmp_path / "one.jsonl", "--prompts", "1", *options)
    assert [_lasting(sample) for sample in one] == [_lasting(sample) for sample in whole if sample["prompt"] == 0]


def _lasting(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "seconds"}


def test_a_file_of_another_run_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.jsonl"
    options = ["--prompts", "1", "--floors", "--histories", "reordered", "--strategies", "none"]
    measure(folder, out, *options)
    capsys.readouterr()
    measure(folder, out, *options, "--dtype", "bfloat16", code=2)
    error = capsys.readouterr().err
    assert "was begun with dtype 'float32' instead of 'bfloat16'" in error
    assert "give another --out" in error
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    assert main(["yardstick", "--report", str(other)]) == 2
    assert "give another file" in capsys.readouterr().err


def test_times_are_taken_in_pairs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "1", "--floors", "--histories", "reordered", "--strategies", "none", "--time"]
    (sample,) = measure(folder, tmp_path / "o.jsonl", *options)
    assert sample["ttft_ms"] > 0
    assert sample["plain_ms"] > 0
    assert "plain / this |" in capsys.readouterr().out


def test_tables_of_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {
        **dict.fromkeys(("date", "cpu", "torch", "transformers"), "x"),
        **{"cores": 2, "threads": 2, "dtype": "float32", "model": "m"},
    }
    for name, worse in (("a", 0.0), ("b", 1.0)):
        header = {
            "yardstick": 1,
            "settings": {"model": name, "dtype": "float32", "timed": False},
            "machine": machine,
        }
        lines = [header]
        for prompt in range(3):
            for label, kl in (("none", 0.25), ("auto=0.15", 0.125 + worse)):
                figures = {"kl": kl, "top1": 0.5, "regret": 0.25, "decisive_share": 0.125, "same_answer": prompt > 0}
                rest = {"reused": prompt < 2, "found": 1.0, "recomputed": 0.15, "f1": 0.5, "full_f1": 0.75}
                lines.append({"prompt": prompt, "history": "reordered", "strategy": label, **figures, **rest})
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["yardstick", "--report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    (first, second) = (row for row in rows if row[0] == "auto=0.15" and len(row) > 4)
    assert first[1:3] == ["2 of 3", "100.0"]
    assert first[4:6] == ["0.1250 [0.1250 0.1250]", "-0.1250 [-0.1250 -0.1250]"]
    assert second[5].startswith("+0.8750")
    assert first[8] == "12.5 [12.5 12.5]"
    assert first[9] == "50 [0 100]"
    assert first[11] == "-0.250 [-0.250 -0.250]"
    assert ["auto=0.15", "0.125 [0.125 0.125]", "1.125 [1.125 1.125]"] in rows  # side by side


def test_regret_and_decisive_flips_of_known_distributions() -> None:
    full = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.6, 0.3, 0.1]]).log()
    other = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.9, 0.05, 0.05]]).log()
    found = harm(full, other)
    assert found["regret"] == pytest.approx((math.log(7 / 2) + math.log(0.4 / 0.35)) / 3, rel=1e-5)
    # The second choice was a near tie, the third is the same.
    assert (found["decisive"], found["decisive_flips"]) == (2, 1)
    assert found["decisive_share"] == pytest.approx(1 / 3)
    assert harm(full, full) == {"regret": 0.0, "decisive": 2, "decisive_flips": 0, "decisive_share": 0.0}


def test_an_answer_is_continued_where_it_differs(tiny: Tiny) -> None:
    """The same as decoding from the beginning, for a reading that agrees at first and one that never does."""
    engine = KVBoost(tiny("llama", vocab_size=300, max_position_embeddings=8192), byte_tokenizer(), quality="exact")
    part = tuple(range(3, 60))
    prompt = rag.RagPrompt(
        "why?", ("x",), head=part, passages=(part,), tail=(7, 8), unrelated=(), primer=(1,), line_break=(9,)
    )
    reference = Reference(engine, prompt, tokens=8)
    other = replace(prompt, tail=(7, 9))
    own = Reference(engine, other, tokens=8).answer
    for same in (0, 3):
        reference.answer = [*own[:same], *((token + 1) % 300 for token in own[same:])]
        read = engine.prefill(other.tokens)
        fed = forward(engine.model, reference.answer[:-1], read.cache)
        logits = torch.cat([read.logits.view(1, -1), fed])
        assert reference.answer_after(engine.model, logits, read.cache) == own
        assert read.cache.get_seq_length() == len(other.tokens) + len(own) - 1  # what was fed and not chosen is gone


def test_labels_name_a_strategy_its_ratio_and_its_spread() -> None:
    asked = [
        parse_strategy(text)
        for text in ("none", "auto", "auto-spread=0.2", "variants-mean", "variants-fit=0.3", "fast")
    ]
    assert settings_of(asked, [0.0, 0.15]) == [
        Setting("none", "none", 0.0),
        Setting("auto=0.15", "auto", 0.15),
        Setting("auto-spread=0.2", "auto-spread", 0.2),
        Setting("variants-mean", "variants-mean", 0.0),
        Setting("variants-fit=0.3", "variants-fit", 0.3),
        Setting("fast", "fast", 0.15),
    ]
    spreads = {
        text: settings_of([parse_strategy(text)], [0.1])[1].repair(family="llama").strategy.spreads
        for text in ("auto", "query")
    }
    flipped = {
        text: settings_of([parse_strategy(text)], [0.1])[1].repair(family="llama").strategy.spreads
        for text in ("auto-spread", "query+spread")
    }
    assert (list(spreads.values()), list(flipped.values())) == ([True, False], [False, True])
    for wrong in ("nonsense", "variants-fit+spread", "auto=2", "auto=x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_strategy(wrong)


def test_an_even_sample_takes_its_budget_from_everywhere() -> None:
    def chosen(count: int, budget: int) -> list[int]:
        places = torch.arange(count)
        return Even().choose(RepairSituation(0, 2, places, places, places, budget, None, None, None)).tolist()

    assert chosen(10, 3) == [0, 3, 6]
    assert chosen(4, 9) == [0, 1, 2, 3]
    assert chosen(5, 0) == []


def _cache(seed: int) -> SlabCache:
    cache = SlabCache(KVLayout((TensorSpec(2, 8, torch.float32, torch.device("cpu")),) * 4), capacity=40)
    for slab in cache.slabs:
        slab.normal_(generator=torch.Generator().manual_seed(seed))
    cache.set_length(40)
    return cache


@pytest.mark.parametrize("by_passage", [False, True])
def test_a_change_that_lies_between_the_variants_is_found_from_a_sample(by_passage: bool) -> None:
    stored = [_cache(seed) for seed in range(4)]
    passages = [variants.PassageVariants(5, 20, stored), variants.PassageVariants(25, 40, stored[:3])]
    right = _cache(4)
    for passage in passages:
        span = slice(passage.start, passage.end)
        for slab, *others in zip(right.slabs, *(cache.slabs for cache in stored), strict=True):
            first, second, third = (other[..., span, :] for other in others[:3])
            slab[..., span, :] = first + 0.75 * (second - first) - 0.5 * (third - first)
    sample = torch.tensor([5, 9, 13, 17, 27, 31, 35])
    cache = _cache(5)
    before = variants.copy_of(cache, 40)
    for target, whole in zip(cache.slabs, right.slabs, strict=True):
        target[..., sample, :] = whole[..., sample, :]
    kept = variants.copy_of(cache, 40)
    variants.fit_into(cache, passages, sample, by_passage=by_passage)
    variants.fit_into(kept, passages, sample, by_passage=by_passage, keep_sample=True)
    for made, other, whole, old in zip(cache.slabs, kept.slabs, right.slabs, before.slabs, strict=True):
        for span in (slice(5, 20), slice(25, 40)):
            assert (made[..., span, :] - whole[..., span, :]).abs().max() < 0.15
        assert torch.equal(other[..., sample, :], whole[..., sample, :])
        assert torch.equal(made[..., 20:25, :], old[..., 20:25, :])  # nothing is known there
    variants.mean_into(cache, passages)
    mean = torch.stack([c.slabs[0][..., 30, :] for c in stored[:3]]).mean(0)
    assert torch.allclose(cache.slabs[0][..., 30, :], mean, atol=1e-6)


def test_blocks_are_joined_by_what_they_were_computed_behind() -> None:
    """Two contexts of the same length: the start alone would mix their blocks."""
    chunks = [Chunk(0, 2, b"a" * 8, b"", None, b"A" * 32), Chunk(2, 5, b"b" * 12, b"", None, b"B" * 32)]

    def block(chunk: Chunk, start: int, context: bytes) -> KVBlock:
        made = KVBlock.of(chunk, (), context=context, bitwise=True, key=context + chunk.tokens)
        return replace(made, start=start)

    x, y, a = (name * CONTEXT_MARK_BYTES for name in (b"X", b"Y", b"A"))
    blocks = {
        b"A" * 32: [block(chunks[0], 10, x), block(chunks[0], 10, y), block(chunks[0], 0, b"")],
        b"B" * 32: [block(chunks[1], 12, y + a), block(chunks[1], 12, x + a)],
    }
    chains = variants.passage_chains(chunks, blocks)
    assert [[block.context for block in chain] for chain in chains] == [[x, x + a], [y, y + a]]


def test_the_traffic_before_a_question_is_other_questions_and_other_orders(folder: Path, tiny: Tiny) -> None:
    prompts = rag.load_prompts(byte_tokenizer(), folder.parent / "questions.json", count=4, passages=3)
    visits = first_visits(prompts)
    assert visits == first_visits(prompts)
    assert sorted(visit.question for visit in visits) == sorted(prompt.question for prompt in prompts)
    by_question = {prompt.question: prompt for prompt in prompts}
    for visit in visits:
        own = set(by_question[visit.question].passages)
        assert len(visit.passages) == len(set(visit.passages)) == 3
        assert len(own & set(visit.passages)) == 2
    engine = KVBoost(tiny("llama", vocab_size=300, max_position_embeddings=8192), byte_tokenizer(), quality="high")
    stream = Stream(engine, prompts[:2])
    seen = {passage for visit in first_visits(prompts[:2]) for passage in visit.passages}
    assert stream.known(prompts[0]) == [passage in seen for passage in prompts[0].passages]
    stream.ask(prompts[0])
    assert all(stream.known(prompts[0]))
