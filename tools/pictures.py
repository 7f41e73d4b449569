"""Draws the pictures of the documentation: ``python -m tools.pictures`` writes docs/pictures/*.svg.

Each brings its own ground and follows the reader's colour scheme, so it can be read on light and on dark pages. A test
draws them again and compares: edit this file, not the pictures.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_WIDTH = 760
_STYLE = """
svg { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.ground { fill: #ffffff; stroke: #d5dbe1; } .ink { fill: #1c2730; } .soft { fill: #5a6873; } .bold { font-weight: 600; }
.line { stroke: #5a6873; fill: none; stroke-width: 1.5; } .tip { fill: #5a6873; }
.exact { fill: #99dccf; stroke: #0b7d69; } .approx { fill: #ffd58f; stroke: #a86400; }
.fresh { fill: #b9cdf5; stroke: #3159a8; }
.box { fill: #f2f5f7; stroke: #aab5be; } .dash { stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
.ground { fill: #17202a; stroke: #33414e; } .ink { fill: #e8eef2; } .soft { fill: #a4b2bd; }
.line { stroke: #a4b2bd; } .tip { fill: #a4b2bd; }
.exact { fill: #0d5a4d; stroke: #4fd0b7; } .approx { fill: #6b4407; stroke: #ffb84d; }
.fresh { fill: #26437e; stroke: #8fb0f5; }
.box { fill: #202c38; stroke: #526270; }
}"""


class Picture:
    """SVG, piece by piece. Coordinates are pixels from the top left."""

    def __init__(self, title: str, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" width="{_WIDTH}">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8" class="ground"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "ink", *, middle: bool = False) -> None:
        """One line of text; its baseline is at ``y``."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}"{anchor}>{escape(words)}</text>')

    def box(self, x: float, y: float, size: tuple[float, float], kind: str = "box", words: str = "") -> None:
        """A rectangle of ``size`` (width, height), with words in its middle."""
        width, height = size
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, middle=True)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], kind: str = "line") -> None:
        """A straight arrow."""
        path = f"M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}"
        self._parts.append(f'<path d="{path}" class="{kind}" marker-end="url(#tip)"/>')

    def row(self, x: float, y: float, cells: list[tuple[float, str, str]], *, height: float = 30) -> None:
        """Boxes side by side: (width, kind, words) each."""
        for width, kind, words in cells:
            self.box(x, y, (width - 3, height), kind, words)
            x += width

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """What the colours mean: (kind, words) each."""
        for kind, words in entries:
            self.box(x, y - 11, (14, 14), kind)
            self.text(x + 20, y + 1, words, "soft")
            x += 36 + 7.2 * len(words)

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([*self._parts, "</svg>", ""])


def reuse() -> Picture:
    """The one picture of the README: what a second request computes."""
    p = Picture("A second request computes only its question", 226)
    p.text(24, 34, "first request", "ink bold")
    p.row(24, 46, [(500, "fresh", "document"), (130, "fresh", "question"), (84, "box", "answer")])
    p.text(24, 94, "computed, and stored chunk by chunk", "soft")
    p.text(24, 132, "next request, also after a restart", "ink bold")
    p.row(
        24,
        144,
        [(500, "exact", "document: the same bits, from the cache"), (130, "fresh", "question"), (84, "box", "answer")],
    )
    p.legend(24, 206, [("exact", "reused"), ("fresh", "computed")])
    return p


def chunks() -> Picture:
    """Chunks are stored, steps are computed, tiles are what kernels see."""
    p = Picture("Chunks, steps and tiles", 316)
    p.text(24, 34, "Chunks: what is stored and found again. 16 to 64 tokens, cut at natural places.", "ink bold")
    widths = [88, 60, 104, 72, 96, 52, 110, 64]
    p.row(24, 46, [(width, "exact" if i < 5 else "fresh", "") for i, width in enumerate(widths)])
    found = 24 + sum(widths[:5])
    p.text(24, 94, "stored by an earlier request", "soft")
    p.text(found, 94, "new", "soft")
    p.text(24, 132, "Step: what one forward pass computes. All that is missing, if memory allows.", "ink bold")
    p.box(24, 144, (sum(widths[:5]) - 3, 30), "box dash", "not computed")
    p.box(found, 144, (sum(widths[5:]) - 3, 30), "fresh", "one step")
    p.text(24, 212, "Tiles: the shape in which kernels see the rows, whatever the step.", "ink bold")
    p.row(24, 224, [(80.75, "box", "") for _ in range(8)])
    p.text(24, 278, "So the bits of a position depend on the tokens up to it and on nothing else:", "soft")
    p.text(24, 298, "a run that resumes here has the bits of a run from the start.", "soft")
    return p


def trusts() -> Picture:
    """Exact and approximate KV never mix."""
    p = Picture("The two trusts", 318)
    p.text(24, 34, "Exact: the same tokens behind the same tokens", "ink bold")
    p.row(
        24,
        46,
        [
            (110, "exact", "system"),
            (150, "exact", "passage A"),
            (150, "fresh", "passage B"),
            (110, "fresh", "question"),
        ],
    )
    p.text(24, 96, "Reused to the bit. What is computed behind it is exact as well, and is stored as exact.", "soft")
    p.text(24, 140, 'Approximate: the same tokens behind others (only with quality="auto", "high", "fast")', "ink bold")
    p.row(
        24,
        152,
        [
            (110, "exact", "system"),
            (150, "fresh", "passage C"),
            (150, "approx", "passage A"),
            (110, "approx", "question"),
        ],
    )
    p.text(24, 202, "Passage A was computed behind other text: it is repositioned and repaired. From there on", "soft")
    p.text(24, 222, "everything is approximate: never stored as exact, never reported as bitwise.", "soft")
    p.legend(24, 262, [("exact", "exact, reused"), ("fresh", "exact, computed"), ("approx", "approximate")])
    p.text(24, 296, "Every result says which it was: result.reuse.bitwise, exact_tokens, moved_tokens.", "soft")
    return p


def repair() -> Picture:
    """Reposition, recompute some, spread, check."""
    p = Picture("How text that stood elsewhere is repaired", 356)
    p.text(24, 34, "1  Find: a stored passage, computed at position 40", "ink bold")
    p.row(24, 46, [(90, "box", "other text"), (300, "exact", "passage")])
    p.text(24, 110, "2  Reposition: its keys are rotated", "ink bold")
    p.row(24, 122, [(230, "box", "other text here"), (300, "approx", "passage"), (120, "fresh", "question")])
    p.arrow((330, 78), (390, 118))
    p.text(24, 186, "3  Recompute: some positions run through all layers against the whole cache", "ink bold")
    p.box(24, 198, (227, 30))
    picked = {0, 4, 5, 11, 12, 17, 23}
    p.row(254, 198, [(12.5, "fresh" if i in picked else "approx", "") for i in range(24)])
    p.box(554, 198, (117, 30), "fresh", "question")
    p.text(24, 262, "4  Spread: where it helps this model, their change is carried over to neighbours", "ink bold")
    p.text(24, 296, "5  Check (if set): some answers are computed both ways. Too many differ: it stops.", "ink bold")
    p.legend(24, 334, [("approx", "repositioned"), ("fresh", "computed here")])
    return p


def tiers() -> Picture:
    """Where chunks are kept, and for how long."""
    p = Picture("Tiers", 288)
    rows = [
        ("workspace", "the last caches, still in place", "this process, no copy"),
        ("memory", "cache_bytes", "this process"),
        ("host", "host_cache_bytes", "this process, beside an accelerator"),
        ("disk", "disk_cache_dir", "outlives the process, which others share"),
        ("Redis or Valkey", "remote_url", "shared by machines"),
    ]
    p.text(56, 34, "A lookup goes down until it finds the chunk; what it finds comes up into memory.", "ink bold")
    for i, (name, setting, life) in enumerate(rows):
        y = 50 + 42 * i
        p.box(56, y, (150, 32), "box", name)
        p.text(222, y + 21, setting)
        p.text(440, y + 21, life, "soft")
    p.arrow((36, 54), (36, 248))
    p.text(56, 274, "A tier that fails or lags is a miss, never an error: the prompt is computed.", "soft")
    return p


PICTURES = {"reuse": reuse, "chunks": chunks, "trusts": trusts, "repair": repair, "tiers": tiers}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
