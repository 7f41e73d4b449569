"""``kvboost run`` and ``chat`` on a tiny model: answers, reuse from a directory, settings from outside."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost.cli import main
from kvboost.cli.chat import Conversation, reuse_line
from kvboost.errors import ConfigError
from kvboost.types import GenerationResult, ReuseReport
from tests.helpers.tokenizer import byte_tokenizer

LONG = "a long question about the moon and the sun and everything else " * 8
REUSE = re.compile(
    r"\[(\d+) prompt tokens: (\d+) exact, (\d+) non-prefix, (\d+) recomputed, (\d+) fresh .*first token after"
)


def reuse(said: str) -> list[list[int]]:
    return [[int(number) for number in match.groups()] for match in REUSE.finditer(said)]


def test_run_answers_and_the_next_one_finds_what_it_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["run", str(folder), LONG, "--max-new-tokens", "4", "--disk-cache-dir", str(tmp_path / "cache")]
    assert main(call) == 0
    cold = capsys.readouterr()
    ((tokens, exact, _, _, fresh),) = reuse(cold.err)
    assert (exact, fresh) == (0, tokens)
    monkeypatch.setattr(sys, "stdin", io.StringIO(LONG))
    assert main([*call[:2], "-", *call[3:]]) == 0
    warm = capsys.readouterr()
    ((_, exact, _, _, _),) = reuse(warm.err)
    assert exact > 0.8 * tokens
    assert warm.out == cold.out
    assert main([*call, "--tenant", "other"]) == 0
    assert reuse(capsys.readouterr().err)[0][1] == 0


def test_raw_text_has_no_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder), "abc", "--raw", "--max-new-tokens", "1"]) == 0
    assert reuse(capsys.readouterr().err)[0][0] == 3
    assert main(["run", str(folder), "abc", "--max-new-tokens", "1"]) == 0
    assert reuse(capsys.readouterr().err)[0][0] == len("<user>abc\n<assistant>")


def test_chat_reads_no_turn_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{LONG}\n\nand more?\nand more still?\n/exit\nnot asked\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "6", "--quality", "exact"]) == 0
    turns = reuse(capsys.readouterr().err)
    assert len(turns) == 3
    assert turns[0][1] == 0
    assert turns[1][1] >= turns[0][0] - 1
    assert turns[2][1] >= turns[0][0] - 1


def test_a_question_too_long_does_not_end_the_chat(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'long ' * 1000}\nshort\n"))
    assert main(["chat", str(folder), "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().err
    assert "ask something shorter" in said
    assert [turn[0] for turn in reuse(said)] == [len("<user>short\n<assistant>")]


def test_chat_in_a_process_of_its_own_with_settings_from_outside(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "kvboost.toml"
    config.write_text(f'disk_cache_dir = "{tmp_path / "cache"}"\n')
    monkeypatch.setenv("KVBOOST_CONFIG", str(config))
    monkeypatch.setenv("KVBOOST_TENANT", "acme")
    assert main(["chat", str(folder), "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert f'disk_cache_dir = "{tmp_path / "cache"}"  # {config}' in shown
    assert 'tenant = "acme"  # KVBOOST_TENANT' in shown

    command = [sys.executable, "-m", "kvboost", "chat", str(folder), "--max-new-tokens", "4"]
    done = subprocess.run(
        command, input=f"{LONG}\nagain\n", capture_output=True, text=True, env=dict(os.environ), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [turn[1] > 400 for turn in reuse(done.stderr)] == [False, True]

    def again() -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(LONG + "\n"))
        assert main(["chat", str(folder), "--max-new-tokens", "4"]) == 0
        said = capsys.readouterr()
        assert said.out == done.stdout.splitlines(keepends=True)[0]
        return reuse(said.err)[0][1]

    assert again() > 400, "the directory kept nothing"
    # What the engine stored for this tenant, the cache command finds by its name.
    assert main(["cache", "purge", str(tmp_path / "cache"), "--tenant", "other", "--yes"]) == 0
    assert capsys.readouterr().out == "0 records removed\n"
    assert main(["cache", "purge", str(tmp_path / "cache"), "--tenant", "acme", "--yes", "--json"]) == 0
    assert re.fullmatch(r'\{"removed": [1-9]\d*\}\n', capsys.readouterr().out)
    assert again() == 0


def test_the_line_about_reuse_names_what_stood_in_the_way() -> None:
    report = ReuseReport(1, 2, 3, 4, bitwise=False, reason="the model is odd")
    result = GenerationResult("", (1, 2), tuple(range(10)), "stop", 12.3, 1000.0, report)
    assert reuse_line(result) == (
        "[10 prompt tokens: 1 exact, 2 non-prefix, 3 recomputed, 4 fresh (approximate); "
        "first token after 12 ms, 2 new ones at 2.0/s; the model is odd]"
    )


class MergingTokenizer:
    """Writes ``ab`` as one id where it tokenises text, although a model may also say ``a`` and ``b``."""

    chat_template = "yes"

    def __init__(self, *, keeps: int = 100, end: str = "|") -> None:
        self.keeps, self.end = keeps, end

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        dropped = len(messages) - self.keeps
        texts = [m["role"][0] + ":" + (m["content"] if at >= dropped else "...") for at, m in enumerate(messages)]
        return "".join(text + self.end for text in texts) + "a:"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        ids = []
        while text:
            width = 2 if text.startswith("ab") else 1
            ids.append(1000 if width == 2 else ord(text[0]))
            text = text[width:]
        return {"input_ids": ids}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i == ord("|"))]
        return "".join("ab" if i == 1000 else chr(i) for i in shown)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_keeps_its_ids(ended: bool) -> None:
    tokenizer = MergingTokenizer()
    chat = Conversation(tokenizer)
    first = chat.ask("hi")
    said = ids("xaby")  # the text tokenises to three
    assert chat.answered([*said, *(ids("|") if ended else [])]) == "xaby"
    second = chat.ask("more")
    assert second == [*first, *said, *ids("|u:more|a:")]
    assert tokenizer.decode(second, skip_special_tokens=False) == "u:hi|a:xaby|u:more|a:"
    chat.answered(said)
    third = chat.ask("most")
    assert third[: len(second)] == second
    assert chat.boundaries == [len(first) - 1, len(second) - 1, len(third) - 1]


def test_a_template_that_rewrites_earlier_turns_is_followed() -> None:
    tokenizer = MergingTokenizer(keeps=2)
    chat = Conversation(tokenizer)
    chat.ask("hi")
    chat.answered(ids("xaby"))
    second = chat.ask("more")
    assert tokenizer.decode(second, skip_special_tokens=False) == "u:...|a:xaby|u:more|a:"
    assert chat.boundaries == [len(second) - 1]


def test_a_question_can_be_taken_back() -> None:
    tokenizer = byte_tokenizer()
    chat = Conversation(tokenizer, system="be brief")
    chat.ask("hi")
    chat.answered(tokenizer("well", add_special_tokens=False)["input_ids"])
    expected = chat.ask("right")
    chat.withdraw()
    assert chat.ask("right") == expected
    chat.withdraw()
    chat.ask("wrong")
    chat.withdraw()
    assert (
        tokenizer.decode(chat.ask("right")) == "<system>be brief\n<user>hi\n<assistant>well\n<user>right\n<assistant>"
    )


def test_without_a_template_there_is_no_chat() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(tokenizer)
