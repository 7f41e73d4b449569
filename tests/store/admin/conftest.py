from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.places import KINDS, Place


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of each kind, over real servers."""
    if request.param == "disk":
        return Place("disk", str(tmp_path / "cache"))
    if request.param == "redis":
        return Place("redis", request.getfixturevalue("redis_at").url)
    return Place("s3", request.getfixturevalue("s3_url"))
