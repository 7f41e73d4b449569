"""What a trace of known parts must give: counted by hand, kind by kind, for every way of reusing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.ragpulse import Part, part_tokens, read_trace
from benchmarks.runner import main

Lengths = Mapping[str, Mapping[int, int]]

# Below 48 tokens the chunker makes no cut of its own: with boundaries, every part is one chunk.
LENGTHS: Lengths = {
    "sys_prompt": {1: 10, 2: 20},
    "passages": {1: 30, 2: 40, 3: 25},
    "history": {7: 5},
    "web_search": {8: 15},
    "user_input": {9: 4},
}
REQUESTS = (
    {"sys_prompt": [1, 2], "passages_ids": [1, 2], "history": [7], "web_search": [], "user_input": [9]},
    # The same passages in another order.
    {"sys_prompt": [1, 2], "passages_ids": [2, 1], "history": [7], "web_search": [], "user_input": [9]},
    # A passage twice in one request: the second is not yet kept when the request looks it up.
    {"sys_prompt": [1], "passages_ids": [1, 3, 3], "history": [], "web_search": [8], "user_input": [9]},
    # Rule (b) did not keep passage 3 and web search 8: they stood behind passage 1, which had moved.
    {"sys_prompt": [1, 2], "passages_ids": [3], "history": [], "web_search": [8], "user_input": [9]},
    # The last one again: by rule (a) it was read with moved parts, so only its beginning is exact.
    {"sys_prompt": [1, 2], "passages_ids": [3], "history": [], "web_search": [8], "user_input": [9]},
)
FILES = {"sys_prompt": 1, "passages": 2, "history": 3, "user_input": 4, "web_search": 5}
WAYS = ("prefix only", "anywhere, rule (a)", "anywhere, rule (b)")


def write_trace(folder: Path, lengths: Lengths = LENGTHS, requests: Sequence[Mapping[str, Any]] = REQUESTS) -> Path:
    """A trace as RAGPulse writes it, blank lines included."""
    folder.mkdir()
    for name, number in FILES.items():
        id_field = "passage_id" if name == "passages" else f"{name}_id"
        lines = [json.dumps({id_field: part, "token_length": size}) for part, size in lengths[name].items()]
        (folder / f"{number}_{name}.jsonl").write_text("\n\n".join(lines) + "\n\n")
    lines = [json.dumps({"timestamp": "1", "input_length": 0, "hash_ids": request}) for request in requests]
    (folder / "0_trace.jsonl").write_text("\n" + "\n  \n".join(lines) + "\n\n")
    return folder


def measure(folder: Path, *options: str) -> dict[str, Any]:
    file = folder.parent / "out.json"
    assert main(["hit_rate", "--traces", str(folder.parent), "--json", str(file), *options]) == 0
    written = file.read_text()
    assert str(folder.parent) not in written
    raw: dict[str, Any] = json.loads(written)["raw"]
    return raw


def by_kind(system: int = 0, passages: int = 0, history: int = 0, web: int = 0, user: int = 0) -> dict[str, int]:
    counts = (system, passages, history, web, user)
    return dict(zip(("system prompt", "passages", "history", "web search", "user input"), counts, strict=True))


def test_every_count_is_the_one_made_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = measure(write_trace(tmp_path / "ragpulse"))
    assert raw["requests"] == 5
    assert raw["tokens"] == by_kind(system=130, passages=270, history=10, web=45, user=20)
    per_request = raw["reused_tokens_by_request"]
    assert per_request["prefix only"] == [0, 30, 10, 30, 70]
    assert per_request["anywhere, rule (a)"] == [0, 30 + 70 + 5, 10 + 30, 30 + 25 + 15, 70]
    assert per_request["anywhere, rule (b)"] == [0, 105, 40, 30, 70]
    assert raw["found"] == {
        "prefix only": {"exact": by_kind(system=100, passages=25, web=15), "non-prefix": by_kind()},
        "anywhere, rule (a)": {
            "exact": by_kind(system=100),
            "non-prefix": by_kind(passages=70 + 30 + 25 + 25, history=5, web=15 + 15),
        },
        "anywhere, rule (b)": {
            "exact": by_kind(system=100, passages=25, web=15),
            "non-prefix": by_kind(passages=70 + 30, history=5),
        },
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row[1:] for row in rows if row}
    assert table["reused, % of tokens"] == ["all", "passages", "system prompt", "history", "web search", "user input"]
    assert table["prefix only"] == ["29.5", "9.3", "76.9", "0.0", "33.3", "0.0"]
    assert table["anywhere, rule (a)"] == ["60.0", "55.6", "76.9", "50.0", "66.7", "0.0"]
    assert table["anywhere, rule (a): exact part"] == ["21.1", "0.0", "76.9", "0.0", "0.0", "0.0"]
    assert table["anywhere, rule (b)"] == ["51.6", "46.3", "76.9", "50.0", "33.3", "0.0"]


def test_fewer_requests_are_the_first_ones(tmp_path: Path) -> None:
    raw = measure(write_trace(tmp_path / "ragpulse"), "--requests", "2")
    assert raw["requests"] == 2
    assert raw["reused_tokens_by_request"] == dict(zip(WAYS, ([0, 30], [0, 105], [0, 105]), strict=True))


def test_without_boundaries_short_prompts_have_no_complete_chunk(tmp_path: Path) -> None:
    # No prompt reaches the 192 tokens below which chunks of 512 are not cut.
    raw = measure(write_trace(tmp_path / "ragpulse"), "--no-boundaries", "--chunk-size", "512")
    assert raw["reused_tokens_by_request"] == {way: [0] * 5 for way in WAYS}


def test_without_boundaries_long_passages_are_found_again_but_for_their_edges(tmp_path: Path) -> None:
    lengths = {**LENGTHS, "passages": {1: 5000, 2: 5000}}
    folder = write_trace(tmp_path / "ragpulse", lengths, REQUESTS[:2])
    raw = measure(folder, "--no-boundaries")
    whole, edges = 10_000, 4 * 2 * 256  # at each end of each passage, at most about two of the longest chunks
    found = raw["found"]["anywhere, rule (a)"]
    assert whole - edges < found["exact"]["passages"] + found["non-prefix"]["passages"] < whole
    assert measure(folder)["found"]["anywhere, rule (a)"]["non-prefix"]["passages"] == whole


def test_the_last_chunk_is_never_reused_even_if_the_prompt_is_the_same(tmp_path: Path) -> None:
    request = {"sys_prompt": [], "passages_ids": [1, 2], "history": [], "web_search": [], "user_input": []}
    raw = measure(write_trace(tmp_path / "ragpulse", requests=[request] * 3))
    assert raw["reused_tokens_by_request"] == {way: [0, 30, 30] for way in WAYS}


def test_equal_ids_are_equal_text_and_kinds_do_not_share_it() -> None:
    text = part_tokens(Part(1, 5, 50))
    assert np.array_equal(text, part_tokens(Part(1, 5, 50)))
    assert not np.array_equal(text, part_tokens(Part(0, 5, 50)))
    assert not np.array_equal(text, part_tokens(Part(1, 6, 50)))


def test_parts_stand_in_the_order_of_the_trace(tmp_path: Path) -> None:
    turned = {"user_input": [9], "sys_prompt": [2, 1]}
    (parts,) = read_trace(write_trace(tmp_path / "ragpulse", requests=[turned]).parent)
    assert parts == [Part(4, 9, 4), Part(0, 2, 20), Part(0, 1, 10)]


def test_a_missing_trace_is_one_line_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hit_rate", "--traces", str(tmp_path / "absent")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "there is no RAGPulse trace in" in err
    assert "--traces FOLDER" in err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("0_trace.jsonl", "\n\n", "holds no requests"),
        ("0_trace.jsonl", '\n{"hash_ids": {"sys_prompt": [77]}}', "0_trace.jsonl line 2 must have hash_ids"),
        ("0_trace.jsonl", '{"hash_ids": {"something": [1]}}', "trouble at 'something'"),
        ("0_trace.jsonl", '{"hash_ids": [1]}', "0_trace.jsonl line 1 must have hash_ids"),
        ("0_trace.jsonl", "{}", "trouble at 'hash_ids'"),
        ("2_passages.jsonl", "{", "2_passages.jsonl line 1 is not JSON"),
        ("2_passages.jsonl", "[]", "2_passages.jsonl line 1 is not a JSON object"),
        ("2_passages.jsonl", '{"passage_id": 1, "token_length": -1}', "must have whole numbers passage_id"),
    ],
)
def test_a_damaged_trace_names_the_line(
    file: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_trace(tmp_path / "ragpulse")
    (folder / file).write_text(content)
    assert main(["hit_rate", "--traces", str(folder.parent)]) == 2
    assert message in capsys.readouterr().err
