"""Logs made to have one fault each. What the fault costs is counted here a second time, from the texts themselves."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from kvboost.core.keys import token_array
from kvboost.errors import ConfigError
from kvboost.explain.faults import FaultKind
from kvboost.explain.replay import LoggedPrompt, read_log
from kvboost.explain.report import Explanation, explain, text_report
from kvboost.types import Break

Chat = list[tuple[str, str]]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def text_of(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def breaks() -> np.ndarray:
    table = np.zeros(256, dtype=np.uint8)
    table[ord("\n")], table[ord(".")] = Break.NEWLINE, Break.SENTENCE
    return table


def explained(texts: Sequence[str], chats: Sequence[Chat] | None = None, rate: float | None = None) -> Explanation:
    digests = [tuple(repr(message).encode() for message in chat) for chat in chats] if chats else [()] * len(texts)
    prompts = [
        LoggedPrompt(line, token_array(bytes_of(text)), messages=messages)
        for line, (text, messages) in enumerate(zip(texts, digests, strict=True), 1)
    ]
    return explain(prompts, decode=text_of, breaks=breaks(), tokens_per_second=rate)


def prose(seed: int, sentences: int) -> str:
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 9)))

    return " ".join(" ".join(word() for _ in range(9)) + "." for _ in range(sentences))


def shared(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def reused(texts: Sequence[str]) -> list[int]:
    """The longest beginning that each text shares with an earlier one."""
    return [max((shared(text, other) for other in texts[:number]), default=0) for number, text in enumerate(texts)]


RULES = "\n".join(prose(seed, 2) for seed in range(12))
DATES = [f"2026-11-{day:02} {hour:02}:{day + hour:02}:07" for day in range(1, 9) for hour in (9, 15)]
UUIDS = [f"{n:08x}-{n * 3 % 65536:04x}-4a1b-9c3d-{n * 97:012x}" for n in range(0xA1B2C3, 0xA1B2C3 + 16 * 4099, 4099)]


def with_value(line: str, values: Sequence[str]) -> list[str]:
    return [
        f"You are a help desk.\n{line.format(value)}\n{RULES}\nQuestion: {prose(100 + number, 3)}\n"
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("line", "values", "named"),
    [
        ("It is {} here.", DATES, "A date in line 2"),
        ("Request {} of this session.", UUIDS, "A UUID in line 2"),
        ("You have answered {} questions.", [str(n) for n in range(3, 19)], "A number in line 2"),
        ("You talk to {} now.", [prose(n, 1).split()[0] for n in range(16)], "Text in line 2"),
    ],
)
def test_a_value_that_changes_early_is_named_with_its_cost(line: str, values: Sequence[str], named: str) -> None:
    texts = with_value(line, values)
    (fault,) = explained(texts).faults
    assert fault.kind is FaultKind.CHANGING_TEXT
    assert fault.title.startswith(named)
    assert values[1] in fault.evidence
    assert values[0] in fault.evidence
    assert "volatile" in fault.change
    moved = [text.replace(value, "", 1) for text, value in zip(texts, values, strict=True)]
    truth = sum(reused(moved)) - sum(reused(texts))
    assert fault.tokens == pytest.approx(truth, rel=0.1)
    assert fault.lines == list(range(2, 17))


def test_two_values_share_the_cost_between_them() -> None:
    half = len(RULES) // 2
    texts = [
        f"Desk.\nIt is {date} here.\n{RULES[:half]}\nSession {uuid}.\n{RULES[half:]}\nQuestion: {prose(200 + n, 3)}\n"
        for n, (date, uuid) in enumerate(zip(DATES, UUIDS, strict=True))
    ]
    faults = explained(texts).faults
    assert sorted(fault.title.partition(" in ")[0] for fault in faults) == ["A UUID", "A date"]
    moved = [t.replace(d, "").replace(u, "") for t, d, u in zip(texts, DATES, UUIDS, strict=True)]
    assert sum(fault.tokens for fault in faults) == pytest.approx(sum(reused(moved)) - sum(reused(texts)), rel=0.1)


def turns_of(chat: Chat) -> str:
    return "".join(f"<{role}>{content}\n" for role, content in chat)


def keeps(chat: Chat) -> str:
    return turns_of(chat) + "<assistant>"


def stripped(chat: Chat) -> Chat:
    """Thinking stays until the user speaks again, as in the templates of thinking models."""
    last = max(number for number, (role, _) in enumerate(chat) if role == "user")
    return [
        (role, content.partition("</think>")[2] if number < last and "</think>" in content else content)
        for number, (role, content) in enumerate(chat)
    ]


def agent_chat() -> list[Chat]:
    """Requests of a chat with tools: each turn thinks, calls a tool, and answers."""
    chat: Chat = [("system", prose(1, 4))]
    requests = []
    for turn in range(6):
        chat = [*chat, ("user", prose(10 + turn, 3))]
        requests.append(chat)
        chat = [*chat, ("assistant", f"<think>{prose(30 + turn, 6)}</think>{prose(50 + turn, 2)}")]
        chat = [*chat, ("tool", prose(70 + turn, 8))]
        requests.append(chat)
        chat = [*chat, ("assistant", f"<think>{prose(90 + turn, 4)}</think>{prose(110 + turn, 3)}")]
    return requests


@pytest.mark.parametrize("as_text", [False, True])
def test_a_template_that_strips_turns_is_named_with_its_cost(as_text: bool) -> None:
    chats = agent_chat()
    texts = [keeps(stripped(chat)) for chat in chats]
    (fault,) = explained(texts, None if as_text else chats).faults
    assert fault.kind is FaultKind.REWRITTEN_TURNS
    assert "<think>" in fault.evidence
    assert ("template" in fault.evidence) is not as_text
    truth, exact = 0, reused(texts)
    for number, chat in enumerate(chats[1:], 1):
        known = stripped(chat)[: len(chats[number - 1])]  # would begin the prompt alike, had nothing been stripped
        truth += max(0, len(turns_of(known)) - exact[number])
    assert truth > 1000
    assert fault.tokens == pytest.approx(truth, rel=0.1)


def test_a_chat_that_loses_its_oldest_turns_is_a_rewritten_one() -> None:
    turns = [("user" if n % 2 == 0 else "assistant", prose(300 + n, 4)) for n in range(24)]
    chats = [[("system", RULES[:400]), *turns[max(0, end - 6) : end]] for end in range(1, 24, 2)]
    (fault,) = explained([keeps(chat) for chat in chats], chats).faults
    assert fault.kind is FaultKind.REWRITTEN_TURNS


def rag() -> tuple[list[str], list[list[str]], str]:
    rng = random.Random(4)
    pool = [prose(500 + n, 6) + "\n\n" for n in range(10)]
    head = "Answer from the passages.\n\n"
    orders = [rng.sample(pool, 5) for _ in range(20)]
    questions = [f"Question: {prose(700 + n, 1)}\nAnswer:" for n in range(20)]
    return [head + "".join(o) + q for o, q in zip(orders, questions, strict=True)], orders, head


def test_passages_in_ever_new_order_are_named_with_their_cost() -> None:
    texts, orders, _ = rag()
    (fault,) = explained(texts).faults
    assert fault.kind is FaultKind.NEW_ORDER
    assert "arrange" in fault.change
    truth = 0
    for number, order in enumerate(orders):
        seen = {passage for other in orders[:number] for passage in other}
        leading = 0
        for other in orders[:number]:
            same = 0
            while same < 5 and order[same] == other[same]:
                same += 1
            leading = max(leading, same)
        truth += sum(len(passage) for passage in order[leading:] if passage in seen)
    assert fault.tokens == pytest.approx(truth, rel=0.1)


def no_values() -> list[str]:
    return with_value("No date here, {}.", ["please"] * 16)


def unrelated() -> list[str]:
    return [prose(900 + n, 30) for n in range(10)]


def page_of(found: Explanation) -> str:
    """As the example draws it."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "explain" / "page.py"))
    return str(example["html_page"](json.loads(json.dumps(found.as_dict()))))


def growing_chat() -> list[str]:
    return [keeps(chat) for chat in agent_chat()]


@pytest.mark.parametrize("log", [no_values, unrelated, growing_chat])
def test_a_log_without_a_fault_has_none(log: Callable[[], list[str]]) -> None:
    found = explained(log())
    assert found.faults == ()
    assert "No fault found" in text_report(found)
    assert "No fault found" in page_of(found)


def test_bars_count_every_token_once_and_exact_ones_are_those_shared() -> None:
    texts = with_value("It is {} here.", DATES)
    found = explained(texts, rate=100.0)
    assert [bar.tokens for bar in found.bars] == [len(bytes_of(text)) for text in texts]
    for bar, common in zip(found.bars, reused(texts), strict=True):
        assert common - 64 <= bar.count("exact") <= common  # whole chunks only
        assert bar.common == common
    document = found.as_dict()
    assert document["faults"][0]["seconds"] == document["faults"][0]["tokens"] / 100.0
    assert sum(document["tokens"][kind] for kind in ("exact", "known", "new")) == document["tokens"]["all"]


def test_the_end_of_an_earlier_prompt_counts_as_reused() -> None:
    texts = growing_chat()
    bars = explained(texts).bars
    assert [bar.count("exact") for bar in bars[1:]] == [len(bytes_of(text)) for text in texts[:-1]]


def test_the_page_escapes_prompts_and_runs_nothing() -> None:
    texts = with_value("<script>alert({})</script>", [f"1{n}" for n in range(16)])
    page = page_of(explained(texts, rate=50.0))
    assert "<script" not in page
    assert "&lt;script&gt;alert([" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('<div class="row small" title=') == 16


def test_a_long_log_shows_what_lost_most() -> None:
    texts = with_value("It is {} here.", [f"2026-11-01 10:{n // 60:02}:{n % 60:02}" for n in range(60)])
    told = text_report(explained(["unrelated " * 30, *texts]))
    assert "the 40 of 61 prompts that lost most are shown" in told
    assert told.count("|") == 41


def test_a_line_separator_inside_a_prompt_ends_no_line(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"prompt": "one\u2028line\u0085still"}\r\n\n{"prompt": "two"}\n', encoding="utf-8")
    assert [(record.line, record.prompt) for record in read_log(file)] == [(1, "one\u2028line\u0085still"), (3, "two")]


def test_prompts_come_as_json_lines_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text('{"prompt": "a"}\n\n{"token_ids": [1, 2], "boundaries": [5]}\n')
    assert [(record.prompt, record.boundaries) for record in read_log(file)] == [("a", []), ([1, 2], [5])]
    file.write_text("one\ntwo\n")
    assert [record.prompt for record in read_log(file, or_texts=True)] == ["one", "two"]
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_log(file)
    file.write_text('{"prompt": "a"}\n{"token_ids": [1], "boundaries": "5"}\n')
    with pytest.raises(ConfigError, match='line 2: "boundaries" is no list'):
        read_log(file)
    file.write_text('\n{"prompt": "one\u2028line"}\n\n{"prompt": 1', encoding="utf-8")
    with pytest.raises(Exception, match="line 4"):
        read_log(file, or_texts=True)
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(Exception, match="line 2"):
        read_log(file, or_texts=True)
