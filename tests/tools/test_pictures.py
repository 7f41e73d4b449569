from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools import pictures

_WIDE = 7.9
"""Pixels of a character: more than the average one of a wide font at this size."""


@pytest.mark.parametrize("name", sorted(pictures.PICTURES))
def test_the_committed_picture_is_what_the_script_draws(name: str) -> None:
    assert (pictures.FOLDER / f"{name}.svg").read_text() == pictures.PICTURES[name]().svg(), (
        "run python -m tools.pictures"
    )


@pytest.mark.parametrize("path", sorted(pictures.FOLDER.glob("*.svg")), ids=lambda path: path.stem)
def test_words_stay_inside_and_are_seen_in_both_schemes(path: Path) -> None:
    root = ET.fromstring(path.read_text())
    style = path.read_text()
    light, dark = style.split("prefers-color-scheme: dark", 1)
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = _WIDE * len(text.text or "")
        start = float(text.attrib["x"]) - (wide / 2 if "text-anchor" in text.attrib else 0)
        assert start >= 0, text.text
        assert start + wide <= 760, text.text
        for kind in set(text.attrib["class"].split()) - {"bold"}:
            assert re.search(rf"\.{kind} {{", light), kind
            assert re.search(rf"\.{kind} {{", dark), kind


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)
