from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from tools import site


def test_links_lead_to_pages_of_the_site() -> None:
    assert site.turned("[a](docs/fleet.md#events)", "CHANGELOG.md") == "[a](fleet.md#events)"
    assert site.turned("[a](../deploy/README.md)", "docs/serving.md") == "[a](deploy.md)"
    assert site.turned("[a](../../docs/vllm.md)", "examples/vllm/README.md") == "[a](../vllm.md)"
    assert site.turned("[a](../serving.md)", "docs/results/README.md") == "[a](../serving.md)"


def test_files_that_are_no_pages_are_named() -> None:
    text = "[the router](../src/kvboost/fleet/route.py)"
    assert site.turned(text, "docs/fleet.md") == "the router (`src/kvboost/fleet/route.py`)"
    turned = site.turned(text, "docs/fleet.md", repository="https://example.org/kvboost/")
    assert turned == "[the router](https://example.org/kvboost/blob/main/src/kvboost/fleet/route.py)"


def test_other_links_and_code_stay() -> None:
    for text in (
        "[a](https://example.org/x)",
        "[a](#here)",
        "```python\nx[0](no.md)\n```\n",
        "1. a\n   ```\n   [b](no)\n   ```\n",
    ):
        assert site.turned(text, "docs/fleet.md") == text


def test_a_link_to_nothing_is_an_error() -> None:
    with pytest.raises(site.BrokenLinkError, match=r"docs/fleet\.md links to nowhere\.md"):
        site.turned("[a](nowhere.md)", "docs/fleet.md")


def test_every_link_of_the_readme_is_there() -> None:
    """The README is no page of the site, so the build does not look at it."""
    site.turned((site.ROOT / "README.md").read_text(), "README.md")


def test_folders_of_the_navigation_become_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for name in ("b", "a", "README"):
        (tmp_path / "docs" / "results" / f"{name}.md").touch()
    monkeypatch.setattr(site, "ROOT", tmp_path)
    nav = site.navigation([{"Start": [{"Home": "index.md"}]}, {"Results": "results/"}])
    assert nav[1] == {"Results": ["results/README.md", "results/a.md", "results/b.md"]}
    assert site.pages_in(nav) == {"index.md", "results/README.md", "results/a.md", "results/b.md"}
