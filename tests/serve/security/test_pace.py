"""One tenant's large requests rest while others are here, and never if nobody is."""

from __future__ import annotations

import pytest

from kvboost.serve.security import fair_pool as module
from kvboost.serve.security.fair_pool import Pace


class Clock:
    """A time that passes when told."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "monotonic", lambda: made.now)
    return made


def test_a_tenant_that_is_alone_never_rests(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("a"):
        pace.worked("a", 1.0)
        assert pace.wait("a") == 0.0


def test_while_another_is_here_work_rests_in_proportion(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("a"), pace.here("b"):
        pace.worked("a", 0.5)
        assert pace.wait("a") == pytest.approx(2.0)
        assert pace.wait("b") == 0.0, "it has not worked"
        clock.now += 1.5
        assert pace.wait("a") == pytest.approx(0.5)
        clock.now += 0.5
        assert pace.wait("a") == 0.0


def test_the_other_counts_for_a_while_after_its_last_request(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("b"), pace.here("b"):
        pass
    clock.now += 1.5
    pace.worked("a", 1.0)
    assert pace.wait("a") == pytest.approx(4.0)
    clock.now += 1.0
    assert pace.wait("a") == 0.0, "the other has gone"


def test_one_of_two_requests_that_ends_leaves_its_tenant_here(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("b"):
        with pace.here("b"):
            pass
        clock.now += 11.0
        pace.worked("a", 1.0)
        assert pace.wait("a") == pytest.approx(4.0)


def test_no_rest_is_longer_than_five_seconds_and_none_shortens_another(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("b"):
        pace.worked("a", 100.0)
        pace.worked("a", 0.001)
        assert pace.wait("a") == pytest.approx(5.0)


def test_rests_add_up(clock: Clock) -> None:
    pace = Pace(4.0)
    with pace.here("b"):
        pace.worked("a", 0.25)
        clock.now += 0.5
        pace.worked("a", 0.25)
        assert pace.wait("a") == pytest.approx(1.5), "what the stages of one request took, together"


def test_without_rest_nothing_is_kept(clock: Clock) -> None:
    pace = Pace(0.0)
    pace.worked("a", 1.0)
    assert not pace._begins


def test_nothing_is_kept_of_tenants_that_have_gone(clock: Clock) -> None:
    pace = Pace(4.0)
    for number in range(100):
        with pace.here(str(number)):
            pace.worked(str(number), 1.0)
        clock.now += 11.0
    assert len(pace._last) == 1
    assert len(pace._begins) <= 1
    assert not pace._under_way
