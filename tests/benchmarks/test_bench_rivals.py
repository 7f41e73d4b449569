"""What rivals do in their processes, with the engines they wrap made up."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bench.rivals.llama_cpp_engine import LlamaCpp
from benchmarks.bench.rivals.predecessor import Predecessor
from benchmarks.bench.rivals.protocol import Answer, Clock, _rss_peak, _serve, _threads
from benchmarks.bench.rivals.transformers_batching import Batching

ORDER: dict[str, Any] = {"do": "generate", "tokens": [1, 2, 3], "text": "one two three", "new": 2}


def batching(*outputs: tuple[list[int], bool]) -> Any:
    """A manager that says this and then is silent."""
    told = [SimpleNamespace(error=None, generated_tokens=ids, is_finished=lambda d=done: d) for ids, done in outputs]
    engine: Any = Batching.__new__(Batching)
    engine._ends = []
    engine._manager = SimpleNamespace(add_request=lambda *_, **__: "r", request_id_iter=lambda _: iter(told))
    return engine


def test_a_manager_that_ends_is_no_answer() -> None:
    assert batching(([5], False), ([5, 6], True)).generate(ORDER, Clock()).tokens == [5, 6]
    for outputs in ((), (([5], False),)):
        with pytest.raises(RuntimeError, match="ended before the answer"):
            batching(*outputs).generate(ORDER, Clock())


def test_an_answer_without_tokens_has_no_time() -> None:
    engine = SimpleNamespace(generate=lambda order, clock: Answer([]))
    with pytest.raises(RuntimeError, match="without a token"):
        _serve(engine, ORDER)


def test_llama_cpp_must_have_the_tokens_of_the_model_and_is_asked_once() -> None:
    texts: list[bytes] = []

    def tokenize(text: bytes, *, add_bos: bool, special: bool) -> list[int]:
        texts.append(text)
        assert not add_bos
        assert special
        return [1, 2, 3]

    engine: Any = LlamaCpp.__new__(LlamaCpp)
    engine._checked, engine._last = False, []
    engine._llama = SimpleNamespace(tokenize=tokenize, generate=lambda *_, **__: iter([7, 8, 9]), token_eos=lambda: 0)
    assert [_serve(engine, ORDER)["tokens"] for _ in range(2)] == [[7, 8]] * 2
    assert texts == [b"one two three"]
    engine._checked = False
    with pytest.raises(RuntimeError, match="give --gguf a file of the same model"):
        _serve(engine, {**ORDER, "tokens": [1, 2, 4]})


def test_the_predecessor_must_read_the_tokens_of_the_others() -> None:
    def answer(text: str, on_token: Any, **_: Any) -> Any:
        on_token(7)
        return SimpleNamespace(kv_reuse_ratio=0.5)

    engine: Any = Predecessor.__new__(Predecessor)
    engine._tokenizer = SimpleNamespace(encode=lambda text: [1, 2, 3])
    engine._engine = SimpleNamespace(generate=answer)
    assert _serve(engine, ORDER)["tokens"] == [7]
    with pytest.raises(RuntimeError, match="other tokens of a prompt's text"):
        _serve(engine, {**ORDER, "tokens": [0, 1, 2, 3]})


def test_llama_cpp_uses_the_cores_it_may_use_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    module = SimpleNamespace(Llama=lambda **options: given.update(options), __version__="1")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = {"gguf": "file", "max_tokens": 10}
    assert _threads(LlamaCpp(settings)) == given["n_threads"] == given["n_threads_batch"] == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert _threads(LlamaCpp(settings)) == given["n_threads"] == 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets a process's peak of memory")
def test_a_peak_of_memory_can_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(forget=lambda: None)
    assert _serve(engine, {"do": "forget"}) == {}
    with mmap.mmap(-1, 200 * 2**20) as held:  # not from the heap, which may hold that much already and keep it
        held.write(b"x" * len(held))
        before = _rss_peak()
    assert _serve(engine, {"do": "forget", "reset_peak": True}) == {"peak_reset": True}
    assert _rss_peak() < before - 100 * 2**20

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr("benchmarks.bench.rivals.protocol.open", refused, raising=False)
    assert _serve(engine, {"do": "forget", "reset_peak": True}) == {"peak_reset": False}
