"""What trust is kept over a restart: the same counts for the same model, and none for anything else."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.approx.guard import ReuseGuard
from kvboost.approx.trust import TrustFile, TrustState
from tests.approx.test_find import HEAD, ONE, QUESTION, TWO, engine_for, text, warm
from tests.approx.test_shadow import _ask

Tiny = Callable[..., Any]


def made(directory: Path, identity: str = "a model") -> ReuseGuard:
    return ReuseGuard(0.3, repairs=["cheap", "best"], earn=True, keeper=TrustFile(directory, identity=lambda: identity))


class _Last:
    """Keeps the last state, and gives none to anybody."""

    state: TrustState | None = None

    def load(self) -> None:
        return None

    def save(self, state: TrustState, *, anew: bool = False) -> None:
        self.state = state


@settings(deadline=None)
@given(observed=st.lists(st.booleans(), max_size=120), restarts=st.sets(st.integers(0, 119)))
def test_restarts_change_nothing(tmp_path_factory: pytest.TempPathFactory, observed: list[bool], restarts: Any) -> None:
    directory, last = tmp_path_factory.mktemp("trust"), _Last()
    once, often = ReuseGuard(0.3, repairs=["cheap", "best"], earn=True, keeper=last), made(directory)
    for index, differed in enumerate(observed):
        if index in restarts:
            often = made(directory)
        once.observe(differed, rung=once.standing.rung)
        often.observe(differed, rung=often.standing.rung)
        assert (once.standing, once.bound, once.reason) == (often.standing, often.bound, often.reason)
        assert TrustFile(directory, identity=lambda: "a model").load() == last.state


def test_what_was_earned_is_kept_and_its_recent_checks_are(tmp_path: Path) -> None:
    trust = made(tmp_path)
    while not trust.allowed:
        trust.observe(False)
    for count in range(250):
        trust.observe(count % 10 == 0)
    kept = TrustFile(tmp_path, identity=lambda: "a model").load()
    assert kept == TrustState(0, True, checked=250, differed=25, recent_checked=50, recent_differed=5)
    assert made(tmp_path).allowed


def test_a_repair_that_another_process_has_given_up_stays_given_up(tmp_path: Path) -> None:
    one, two = made(tmp_path), made(tmp_path)
    while one.standing.rung == 0:
        one.observe(True)
    while not two.allowed:
        two.observe(False)
    assert made(tmp_path).standing == (False, True, 1)
    two.reset()
    assert made(tmp_path).standing == (False, True, 0), "unless the user says so"


def test_another_model_has_earned_nothing(tmp_path: Path) -> None:
    trust = made(tmp_path)
    while not trust.allowed:
        trust.observe(False)
    assert not made(tmp_path, "another").allowed
    assert made(tmp_path).allowed


def test_what_a_model_that_changed_shows_is_not_kept_as_the_first_ones(tmp_path: Path) -> None:
    now = ["a model"]
    trust = ReuseGuard(0.05, repairs=["cheap"], earn=True, keeper=TrustFile(tmp_path, identity=lambda: now[0]))
    trust.observe(True)
    now[0] = "trained further"
    while not trust.allowed:
        trust.observe(False)
    kept = TrustFile(tmp_path, identity=lambda: "a model").load()
    assert kept == TrustState(checked=1, differed=1)
    assert TrustFile(tmp_path, identity=lambda: now[0]).load() is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 0, "identity": "a model", "state": {}}',
        '{"format": 2, "identity": "a model", "state": {"checked": 3, "differed": 4}}',
        '{"format": 2, "identity": "a model", "state": {"allowed": 1}}',
        '{"format": 2, "identity": "a model", "state": {"rung": -1}}',
        '{"format": 2, "identity": "a model", "state": {"checked": 1000000000000000}}',
        '{"format": 2, "identity": "a model", "state": {"other": 1}}',
        '{"format": 2, "identity": "another", "state": {"allowed": true}}',
    ],
)
def test_a_file_of_no_use_counts_as_none(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path).observe(False)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        trust = made(tmp_path)
    assert trust.bound.checked == 0
    assert "earned anew" in caplog.text
    trust.observe(False)
    assert json.loads(file.read_text())["state"]["checked"] == 1


def test_a_state_behind_the_last_repair_allows_nothing(tmp_path: Path) -> None:
    TrustFile(tmp_path, identity=lambda: "a model").save(TrustState(rung=9, allowed=True))
    assert made(tmp_path).standing == (False, False, 1)


def test_whatever_keeps_it_from_being_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the model's identity does after a move to another device."""
    names = iter(["a model"])
    trust = ReuseGuard(0.3, repairs=["cheap"], earn=True, keeper=TrustFile(tmp_path, identity=lambda: next(names)))
    trust.observe(False)
    trust.observe(False)
    assert (trust.bound.checked, caplog.text.count("cannot be written")) == (2, 1)


def test_a_directory_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    trust = made(tmp_path / "file" / "trust")
    caplog.clear()
    trust.observe(False)
    trust.observe(False)
    assert trust.bound.checked == 2
    assert caplog.text.count("cannot be written") == 1


def test_an_engine_goes_on_where_the_last_one_with_its_directory_stood(
    tiny: Tiny, tmp_path: Path, prices_as_guessed: None
) -> None:
    def opened(model: Any, **others: Any) -> Any:
        return engine_for(
            model, quality="auto", recompute_ratio=1.0, force_approx=True, disk_cache_dir=tmp_path / "cache", **others
        )

    model = copy.deepcopy(tiny("llama"))  # its weights are changed below
    engine = opened(model)
    warm(engine, HEAD, ONE, TWO)
    assert _ask(engine, HEAD, text(1, 40), TWO, ONE, QUESTION).reuse.moved_tokens == 0
    trust = engine.session.prefiller.approx.guard
    while not trust.allowed:
        trust.observe(False)
    engine.close()

    with opened(model) as again:
        assert _ask(again, HEAD, text(2, 40), TWO, ONE, QUESTION).reuse.moved_tokens > 0
    with opened(model, kv_cache_bits=8) as coarser:
        assert not coarser.session.prefiller.approx.guard.allowed
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with opened(model) as other:
        assert not other.session.prefiller.approx.guard.allowed
