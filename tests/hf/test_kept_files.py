"""What is kept between starts: whole files, and not too many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvboost.hf import kept_files


def test_the_oldest_files_of_a_kind_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "_MOST", 3)
    for number in range(6):
        path = tmp_path / f"{number}.json"
        kept_files.write_whole(path, str(number))
        os.utime(path, (number, number))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.json", "4.json", "5.json"]
