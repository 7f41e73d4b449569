from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost.cli import main
from tests.explain.test_explain import agent_chat, with_value
from tests.helpers.tokenizer import byte_tokenizer

_STRIPPING = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if loop.index < last.user else m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a model: weights are not asked for."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = byte_tokenizer()
    made.chat_template = _STRIPPING
    made.save_pretrained(path)
    return path


def test_a_log_of_texts_is_told_with_bars_and_costs(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "prompts.jsonl"
    texts = with_value("It is {} here.", [f"2026-11-0{n} 10:2{n}" for n in range(1, 9)])
    log.write_text("\n\n".join(json.dumps({"prompt": text, "user": 7}) for text in texts))
    call = ["explain", str(log), "--model", str(tokenizer), "--tokens-per-second", "1000"]
    assert main(call) == 0
    said = capsys.readouterr().out
    assert "1. A date in line 2 of the prompt changes" in said
    assert "2026-11-02 10:22" in said or "[10:22]" in said or "[2026-11-02]" in said
    assert " s in 7 prompts" in said
    assert str(tmp_path) not in said


def test_a_log_of_chats_is_rendered_by_the_template(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "chats.jsonl"
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in agent_chat()]
    log.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    assert main(["explain", str(log), "--model", str(tokenizer), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (fault,) = document["faults"]
    assert fault["kind"] == "rewritten turns"
    assert "template" in fault["example"]
    assert fault["seconds"] is None
    assert document["prompts"] == len(chats)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ('{"text": "b"}', 'line 3 has neither "prompt"'),
        ('["b"]', 'line 3 has neither "prompt"'),
        ('{"messages": []}', 'line 3 has neither "prompt"'),
        ('{"messages": [{"content": "b"}]}', 'line 3: every message needs a "role"'),
        (
            '{"messages": [{"role": "user", "content": 5}, {"role": "user", "content": "b"}]}',
            "line 3: 'int object' has",
        ),
    ],
)
def test_a_broken_line_is_named(
    line: str, message: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "prompts.jsonl"
    log.write_text('{"prompt": "a"}\n\n' + line + "\n")
    assert main(["explain", str(log), "--model", str(tokenizer)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["absent.jsonl", "--model", "TOKENIZER"], "cannot be read"),
        (["EMPTY", "--model", "TOKENIZER"], "is empty"),
        (["LOG"], "Missing option '--model'"),
        (["LOG", "--model", "./nowhere"], "there is no model folder at ./nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], message: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty").write_text("\n")
    names = {"LOG": tmp_path / "log", "EMPTY": tmp_path / "empty", "TOKENIZER": tokenizer}
    assert main(["explain", *(str(names.get(option, option)) for option in options)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
