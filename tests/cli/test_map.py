"""``kvboost map`` on a tiny model: prompts, chats and OpenAI's batch files, interrupted and gone on with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost.cli import main
from kvboost.scheduler.loop import JobLoop
from kvboost.serve import batch
from kvboost.serve.security.limits import Limits

SHARED = "What was said about the moon and the sun and everything else? " * 6


def written(file: Path, *lines: Any) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def answers_of(file: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["error"] is None for line in lines)
    return {line["custom_id"]: line["response"] for line in lines}


def run(folder: Path, prompts: Path, out: Path, *more: str) -> int:
    return main(["map", str(folder), str(prompts), str(out), *more])


def test_every_kind_of_line_is_answered_and_what_they_share_is_read_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": SHARED}]
    batch = {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": chat, "max_tokens": 2},
    }
    prompts = written(
        tmp_path / "in.jsonl",
        *({"prompt": f"{SHARED}{n}", "max_tokens": 2, "temperature": 0} for n in range(4)),
        {"custom_id": "mine", "messages": chat, "max_tokens": 3},
        batch,
        {"custom_id": "wrong", "messages": chat, "max_tokens": 3, "temprature": 0},
    )
    assert run(folder, prompts, tmp_path / "out.jsonl") == 0
    found = answers_of(tmp_path / "out.jsonl")
    assert set(found) == {"1", "2", "3", "4", "mine", "b", "wrong"}
    assert [found[name]["status_code"] for name in ("1", "mine", "b", "wrong")] == [200, 200, 200, 400]
    assert found["mine"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert "temperature" in found["wrong"]["body"]["error"]["message"]
    used = [found[name]["body"]["usage"] for name in "1234"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert sum(tokens > 0.8 * usage["prompt_tokens"] for tokens, usage in zip(cached, used, strict=True)) == 3
    said = capsys.readouterr().err
    assert "7 answers are in" in said
    assert "1 lines were refused" in said


@pytest.mark.parametrize("status", [408, 429, 503])
def test_the_same_command_goes_on_where_it_stopped(
    status: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": f"{SHARED}{n}", "max_tokens": 2, "temperature": 0} for n in range(3)]
    prompts, out = written(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert run(folder, prompts, out) == 0
    whole = answers_of(out)
    kept = next(line for line in out.read_text().splitlines(keepends=True) if '"custom_id": "1"' in line)
    failed = {"custom_id": "3", "response": {"status_code": status, "body": {}}, "error": None}
    out.write_text(kept + json.dumps(failed) + "\n" + kept[:40])  # as a killed process leaves it
    assert run(folder, prompts, out) == 0
    again = answers_of(out)
    assert set(again) == set(whole)
    assert len(out.read_text().splitlines()) == 4  # the failure stays in the file, before its answer
    for name, response in whole.items():
        assert again[name]["body"]["choices"][0]["text"] == response["body"]["choices"][0]["text"]
    capsys.readouterr()
    assert run(folder, prompts, out) == 0
    assert "are answered in" in capsys.readouterr().err


def test_settings_from_outside_hold_and_another_process_finds_what_was_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, cache, config = tmp_path / "in.jsonl", str(tmp_path / "cache"), tmp_path / "kvboost.toml"
    written(prompts, {"prompt": SHARED, "max_tokens": 2, "temperature": 0})
    config.write_text(f'disk_cache_dir = "{cache}"\n')
    monkeypatch.setenv("KVBOOST_CONFIG", str(config))
    monkeypatch.setenv("KVBOOST_TENANT", "acme")
    assert run(folder, prompts, tmp_path / "none", "--show-config") == 0
    shown = capsys.readouterr().out
    assert f'disk_cache_dir = "{cache}"  # {config}' in shown
    assert 'tenant = "acme"  # KVBOOST_TENANT' in shown

    command = [sys.executable, "-m", "kvboost", "map", str(folder), str(prompts), str(tmp_path / "1.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "; 0 of" in done.stderr

    def cached(name: str, *more: str) -> int:
        assert run(folder, prompts, tmp_path / name, *more) == 0
        return int(answers_of(tmp_path / name)["1"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("2.jsonl") > 0.8 * len(SHARED), "the directory kept nothing"
    assert (
        answers_of(tmp_path / "2.jsonl")["1"]["body"]["choices"]
        == answers_of(tmp_path / "1.jsonl")["1"]["body"]["choices"]
    )
    assert cached("3.jsonl", "--tenant", "other") == 0
    # What the engine stored for this tenant, the cache command finds by its name.
    capsys.readouterr()
    assert main(["cache", "purge", cache, "--tenant", "nobody", "--yes"]) == 0
    assert capsys.readouterr().out == "0 records removed\n"
    assert main(["cache", "purge", cache, "--tenant", "acme", "--yes", "--json"]) == 0
    assert re.fullmatch(r'\{"removed": [1-9]\d*\}\n', capsys.readouterr().out)
    assert cached("4.jsonl") == 0


def test_an_interrupted_run_says_how_to_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = written(tmp_path / "in.jsonl", *({"prompt": f"{SHARED}{n}", "max_tokens": 2} for n in range(3)))
    out, post, asked = tmp_path / "out.jsonl", batch._post, []

    async def interrupted(*request: Any) -> Any:
        asked.append(request)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return await post(*request)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_post", interrupted)
        assert run(folder, prompts, out) == 130
    assert f"interrupted; the same command goes on after the lines that {out} answers" in capsys.readouterr().err
    assert run(folder, prompts, out) == 0
    assert set(answers_of(out)) == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 of in.jsonl is no JSON"),
        ("[1]", "line 1 of in.jsonl is no object"),
        ('{"question": "x"}', "line 1 of in.jsonl asks nothing"),
        ('{"prompt": "x", "stream": true}', "asks for a stream"),
        ('{"custom_id": "a", "url": "/v1/nothing", "body": {}}', "needs a custom_id, a body, and a url"),
        (
            '{"custom_id": "a", "prompt": "x"}\n{"custom_id": "a", "prompt": "y"}',
            "line 2 of in.jsonl has the custom_id",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_before_the_model_is_loaded(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(line + "\n")
    assert run(tmp_path / "no-model", prompts, tmp_path / "out.jsonl") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_other_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = written(tmp_path / "in.jsonl", {"prompt": "x"})
    assert run(tmp_path, tmp_path / "absent.jsonl", tmp_path / "out.jsonl") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run(tmp_path, prompts, written(tmp_path / "other.jsonl", {"a": 1})) == 2
    assert "is no file of answers to go on with" in capsys.readouterr().err
    assert run(tmp_path, prompts, tmp_path / "here" / ".." / "in.jsonl") == 2
    assert "name another file" in capsys.readouterr().err
    assert json.loads(prompts.read_text()) == {"prompt": "x"}
    assert run(tmp_path, prompts, tmp_path / "absent" / "out.jsonl") == 2
    assert "there is no directory" in capsys.readouterr().err
    assert run(tmp_path, prompts, tmp_path / "out.jsonl", "--together", "0") == 2
    assert "--together 0" in capsys.readouterr().err


def test_a_line_of_many_answers_is_not_refused_for_the_commands_own_limits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tight(Limits):
        """Each line fits by itself, and no two of them do."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**{"max_total_body_bytes": 1000, **given})

    monkeypatch.setattr(batch, "Limits", Tight)
    asked = {"prompt": ["x" * 25] * 16, "n": 8, "max_tokens": 1}
    prompts = written(tmp_path / "in.jsonl", asked, asked)
    assert run(folder, prompts, tmp_path / "out.jsonl", "--together", "1") == 0
    found = answers_of(tmp_path / "out.jsonl").values()
    assert [(answer["status_code"], len(answer["body"]["choices"])) for answer in found] == [(200, 128)] * 2


def test_what_a_killed_process_left_of_an_answer_is_told_from_what_a_user_wrote(tmp_path: Path) -> None:
    whole = b'{"custom_id": "a\\"\\\\\xc3\xa9", "response": {"status_code": 200, "body": {}}, "error": null}'
    out = tmp_path / "out.jsonl"
    for end in range(1, len(whole) + 1):
        out.write_bytes(whole + b"\n" + whole[:end])
        assert batch.answered(out) == ({'a"\\\xe9'}, len(whole) + 1)


@pytest.mark.parametrize(
    "mine",
    [
        '{"prompt": "x"}',
        '{"custom_id": "a", "prompt": "x"}',
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}',
        "a note",
    ],
)
def test_a_file_of_the_users_is_left_as_it_is(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, other = written(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "mine"
    other.write_text(mine)
    assert run(tmp_path / "no-model", prompts, other) == 2
    assert "is no file of answers to go on with" in capsys.readouterr().err
    assert other.read_text() == mine


def test_no_answer_is_cut_before_the_prompts_were_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, torn = tmp_path / "out.jsonl", '{"custom_id": "1", "resp'
    out.write_text(torn)
    assert run(tmp_path / "no-model", tmp_path / "absent.jsonl", out) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert out.read_text() == torn


def test_a_runner_that_fails_ends_the_run_and_the_next_one_asks_the_rest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = written(tmp_path / "in.jsonl", *({"prompt": f"{n}", "max_tokens": 1} for n in range(9)))
    out, step, steps = tmp_path / "out.jsonl", JobLoop.step, 0
    parsed, parse = list[str](), batch._parsed

    def parsing(text: str, *where: Any) -> batch.Line:
        parsed.append(text)
        return parse(text, *where)

    def failing(self: JobLoop, group: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise RuntimeError("out of memory")
        step(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(JobLoop, "step", failing)
        patch.setattr(batch, "_WINDOW", 6)
        patch.setattr(batch, "_parsed", parsing)
        assert run(folder, prompts, out, "--together", "1") == 1
    assert len(parsed) == 9 + 6  # once before the model is loaded, then a window
    statuses = [answer["status_code"] for answer in answers_of(out).values()]
    good = statuses.count(200)
    assert 0 < good < len(statuses) <= good + 2  # those under way when it failed, and no others
    said = capsys.readouterr().err
    assert f"{good} answers are in" in said
    assert f"{9 - good} lines failed or were not asked; run the same command again" in said
    assert "lines were refused" not in said
    assert run(folder, prompts, out) == 0
    assert [answer["status_code"] for answer in answers_of(out).values()] == [200] * 9
    assert f"{9 - good} answers are in" in capsys.readouterr().err


def test_a_pipe_of_prompts_is_refused_since_it_is_read_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.write(write, b'{"prompt": "x"}\n')
    os.close(write)
    try:
        assert run(tmp_path / "no-model", Path(f"/dev/fd/{read}"), tmp_path / "out.jsonl") == 2
    finally:
        os.close(read)
    assert "write the lines to a file first" in capsys.readouterr().err
