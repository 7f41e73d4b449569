"""The process that compiles grammars first: what one schema does to it is not the next one's fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.generation import structured
from kvboost.serve.generation.structured import TOO_LONG, GrammarCheck

pytest.importorskip("llguidance")

_SLOW = {"type": "integer", "multipleOf": 999_983}  # takes minutes
_LARGE = {"type": "integer", "multipleOf": 39_989}  # 20 MB


def _grammar(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


_SMALL = _grammar({"type": "object"})


@pytest.fixture
def check() -> Iterator[GrammarCheck]:
    with closing(GrammarCheck()) as made:
        yield made


def test_what_follows_a_hostile_schema_is_compiled(check: GrammarCheck) -> None:
    for _ in range(10):
        began = time.monotonic()
        assert check.check(_grammar(_SLOW), within=0.1) == TOO_LONG
        assert time.monotonic() - began < 5
        assert check._process is None, "a dead process waits to be noticed"
        began = time.monotonic()
        assert check.check(_SMALL) == ""
        assert time.monotonic() - began < 10


def test_a_process_that_is_killed_from_outside_is_no_grammars_fault(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check.check(_SMALL) == ""
    assert check._process is not None
    check._process.kill()
    assert check.check(_SMALL) == ""
    monkeypatch.setattr(structured, "_CHILD", "print(flush=True)")  # it ends whatever it is asked
    check._process.kill()
    assert "llguidance failed" in check.check(_SMALL)


def test_the_reason_comes_from_the_process(check: GrammarCheck) -> None:
    assert "regex parse error" in check.check(_grammar({"type": "string", "pattern": "("}))
    assert check.check(_SMALL) == ""


@pytest.mark.skipif("sys.platform != 'linux'")
def test_memory_is_bounded(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MEMORY_BYTES", 2**23)
    assert "too much memory" in check.check(_grammar(_LARGE), within=60)
    assert check.check(_SMALL) == ""


def test_a_file_in_the_working_directory_is_no_module(
    check: GrammarCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert check.check(_SMALL) == ""


def test_closing_waits_for_no_grammar_and_nothing_is_started_afterwards() -> None:
    check, raised = GrammarCheck(), list[BaseException]()

    def work() -> None:
        try:
            check.check(_grammar(_SLOW), within=60)
        except ApiError as error:
            raised.append(error)

    assert check.check(_SMALL) == ""
    process = check._process
    assert process is not None
    thread = threading.Thread(target=work)
    thread.start()
    while not check._lock.locked():
        time.sleep(0.01)
    time.sleep(0.3)
    assert thread.is_alive()
    began = time.monotonic()
    check.close()
    assert time.monotonic() - began < 30, "it waited for the grammar, which may take 60 s here"
    thread.join(10)
    assert process.poll() is not None
    with pytest.raises(ApiError, match="shutting down") as refused:
        check.check(_SMALL)
    assert refused.value.status == 503
    assert [str(error) for error in raised] == [str(refused.value)]
    assert check._process is None
