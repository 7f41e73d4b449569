"""Builds the documentation's site: ``python -m tools.site`` writes it to build/site, and any warning is an error.

Links in the repository are written for readers of the repository: relative paths of files. The pages are copied to
build/pages first, those from outside docs/ too, and each link becomes one to the page of that file, or, for a file that
is no page, its path (a link if ``KVBOOST_REPO_URL`` says where the repository is). A link to a file that is not there
fails the build; what is behind a ``#`` is checked by Zensical.
"""

from __future__ import annotations

import os
import os.path
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploy.md",
    "examples/README.md": "examples/README.md",
    "examples/fleet/README.md": "examples/fleet.md",
    "examples/vllm/README.md": "examples/vllm.md",
}
"""Pages of the site that are files of the repository, where people look for them."""

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^( *```.*?^ *```\s*$)", re.MULTILINE | re.DOTALL)


class BrokenLinkError(Exception):
    """A page links to a file that is not there."""


def turned(text: str, here: str, *, repository: str = "") -> str:
    """``text`` of the repository's file ``here`` with links for the site, those in fenced code apart."""
    parts = _FENCE.split(text)
    link = lambda match: _turn(match, here, repository)  # noqa: E731
    return "".join(part if part.lstrip().startswith("```") else _LINK.sub(link, part) for part in parts)


def _turn(match: re.Match[str], here: str, repository: str) -> str:
    words, target = match.groups()
    if re.match(r"[a-z]+:|#", target):
        return match.group()
    path, _, anchor = target.partition("#")
    source = os.path.normpath(PurePosixPath(here).parent / path)
    if not (ROOT / source).exists():
        raise BrokenLinkError(f"{here} links to {target}, which is not there")
    if page_of(source) is None:
        return f"[{words}]({repository.rstrip('/')}/blob/main/{source})" if repository else f"{words} (`{source}`)"
    start = PurePosixPath(page_of(here) or "").parent
    return f"[{words}]({os.path.relpath(page_of(source) or '', start)}{'#' + anchor if anchor else ''})"


def page_of(source: str) -> str | None:
    """The page or picture of the site that a file of the repository is; None if it is none."""
    if source.startswith("docs/") and (ROOT / source).is_file():
        return source.removeprefix("docs/")
    return OUTSIDE.get(source)


def stage(folder: Path, *, repository: str = "") -> None:
    """Copy all pages to ``folder`` with their links turned, and everything else of docs/ as it is."""
    sources = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()]
    for source in [*sources, *OUTSIDE]:
        target = folder / str(page_of(source))
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            target.write_text(turned((ROOT / source).read_text(), source, repository=repository))
        else:
            shutil.copyfile(ROOT / source, target)


def navigation(nav: list[Any]) -> list[Any]:
    """``nav`` with every page of a folder in place of an entry that names the folder, such as ``results/``."""
    return [_expanded(entry) for entry in nav]


def _expanded(entry: Any) -> Any:
    ((title, target),) = entry.items()
    if isinstance(target, list):
        return {title: navigation(target)}
    if not target.endswith("/"):
        return entry
    names = sorted((path.name for path in (ROOT / "docs" / target).glob("*.md")), key=lambda n: (n != "README.md", n))
    return {title: [target + name for name in names]}


def pages_in(nav: list[Any]) -> set[str]:
    """The pages that a navigation names."""
    found: set[str] = set()
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found |= pages_in(target) if isinstance(target, list) else {target}
    return found


def main() -> int:
    """Build the site; 0 if nothing was to be said about it."""
    pages = BUILD / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    repository = os.environ.get("KVBOOST_REPO_URL", "")
    try:
        stage(pages, repository=repository)
    except BrokenLinkError as error:
        print(error, file=sys.stderr)
        return 1
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["nav"] = navigation(config["nav"])
    lost = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")} - pages_in(config["nav"])
    if lost:
        print(f"not in the navigation of mkdocs.yml: {', '.join(sorted(lost))}", file=sys.stderr)
        return 1
    for setting, variable in (("repo_url", "KVBOOST_REPO_URL"), ("site_url", "KVBOOST_SITE_URL")):
        if os.environ.get(variable):
            config[setting] = os.environ[variable]
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [Path(sys.executable).parent / "zensical", "build", "--strict", "--clean", "-f", BUILD / "mkdocs.yml"]
    return subprocess.run(command, cwd=BUILD, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
