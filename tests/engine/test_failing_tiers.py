"""Tiers that fail under an engine: its answers stay a cold engine's. All cases: the benchmark tier_faults."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.faults import Fault
from benchmarks.common.servers import RedisServer
from kvboost.store.record.format import RecordFormat
from tests.helpers.failing import Failing, Judge, over_failing_disk, over_failing_redis

Tiny = Callable[..., Any]


@pytest.fixture(scope="module")
def judge_of(tiny: Tiny) -> Judge:
    return Judge(tiny("llama"))


@pytest.fixture
def judge(judge_of: Judge) -> Judge:
    judge_of.requests = judge_of.failed = judge_of.differing = judge_of.reused = 0
    return judge_of


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["write", "rename", "fsync", "read"])
def test_a_disk_that_fails_once_changes_no_answer(judge: Judge, tmp_path: Path, call: str, error: int) -> None:
    files = Failing(call, 3, error)
    over_failing_disk(judge, tmp_path, files)
    assert files.failed
    assert judge.well
    assert judge.reused > 0


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE], ids=lambda f: f.value)
def test_a_server_that_fails_changes_no_answer(judge: Judge, redis_at: RedisServer, fault: Fault) -> None:
    over_failing_redis(judge, redis_at.port, fault, "before loading")
    assert judge.requests == 9
    assert judge.well


def test_the_judge_sees_a_wrong_answer(judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = RecordFormat.decode

    def wrong(self: RecordFormat, buffer: Any, key: bytes) -> Any:
        block = decode(self, buffer, key)
        block.tensors[0].add_(1)
        return block

    monkeypatch.setattr(RecordFormat, "decode", wrong)
    over_failing_disk(judge, tmp_path, Failing())
    assert judge.differing > 0
